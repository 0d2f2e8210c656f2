"""Plain data in JSON files: what is not finite is null, and a file is read only if it is of the schema it should be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hasten.errors import HastenError
from hasten.files import parse_json, read_bytes

Kind = TypeVar("Kind")

_LONG = 2000  # characters of a message; pydantic names every value that does not fit


def read_plain(kind: type[Kind], path: Path, schema: str, what: str, advice: str, missing: str = "") -> Kind:
    """Read a dataclass from a JSON file; null where a float should be is NaN, as `finite` wrote it.

    Args:
        kind: The dataclass.
        path: The file.
        schema: What its field `schema` must be.
        what: What it should be, for messages: "a diagnosis".
        advice: What to do about one of another schema.
        missing: What to say where there is none; default: "no diagnosis at".

    Raises:
        HastenError: No such file, not readable, not JSON, or another schema.
    """
    from pydantic import TypeAdapter, ValidationError

    name = what.removeprefix("a ")
    try:
        data = parse_json(read_bytes(path))
        if not isinstance(data, dict) or data.get("schema") != schema:
            raise HastenError(f"{path} is not {what} of the schema {schema}", advice)
        reader = TypeAdapter(kind)
        try:
            return reader.validate_python(data)
        except ValidationError as error:
            for problem in error.errors():
                if problem["type"] == "float_type" and problem["input"] is None:
                    _set_to_nan(data, problem["loc"])
            return reader.validate_python(data)
    except FileNotFoundError:
        raise HastenError(f"{missing or f'no {name} at'} {path}") from None
    except OSError as error:
        raise HastenError(f"cannot read the {name} {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # pydantic's is a ValueError
        raise HastenError(f"{path} is not {what} of the schema {schema}: {_shortened(str(error))}") from None


def _shortened(text: str) -> str:
    return text if len(text) < _LONG else f"{text[:_LONG]}..."


def _set_to_nan(data: Any, place: Sequence[str | int]) -> None:
    """Put NaN where null is; a place may go on below it with the kinds that were tried there."""
    for step in place:
        if data[step] is None:
            data[step] = math.nan
            return
        data = data[step]


def finite(value: Any) -> Any:
    """NaN and infinities as null, which is all that JSON has for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def tuples(value: Any) -> Any:
    """What `dataclasses.asdict` gave, back from JSON: lists are tuples again, however deep they lie."""
    if isinstance(value, dict):
        return {key: tuples(part) for key, part in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def with_texts(value: Kind, change: Callable[[str], str]) -> Kind:
    """Return plain data (dataclasses, dicts, lists, tuples) with every text in it changed, keys included."""
    changed: Any = value
    if isinstance(value, str):
        changed = change(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = dataclasses.replace(value, **{name: with_texts(part, change) for name, part in fields.items()})
    elif isinstance(value, dict):
        changed = {with_texts(key, change): with_texts(part, change) for key, part in value.items()}
    elif isinstance(value, list | tuple) and not all(isinstance(part, int | float) for part in value):  # a long series
        changed = type(value)(with_texts(part, change) for part in value)
    return changed  # type: ignore[no-any-return]
