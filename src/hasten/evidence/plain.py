"""Write plain data as JSON, with null for NaN and infinities, and read it back if its `schema` is the expected one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hasten.errors import HastenError
from hasten.files import parse_json, read_bytes

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Kind = TypeVar("Kind")

_LONG = 2000  # longest error message, in characters; pydantic lists every value that does not fit


def read_plain(kind: type[Kind], path: Path, schema: str, description: str, advice: str, missing: str = "") -> Kind:
    """Read a dataclass from a JSON file; null in place of a float becomes NaN, which `finite` wrote as null.

    Args:
        kind: The dataclass.
        path: The file.
        schema: The required value of its field `schema`.
        description: The kind of file in messages: "a diagnosis".
        advice: What to do about a file of another schema.
        missing: Begin of the message for a missing file; default: "no diagnosis at".

    Raises:
        HastenError: The file does not exist, is not readable, is no JSON, or has another schema.
    """
    from pydantic import ValidationError

    name = description.removeprefix("a ")
    try:
        data = parse_json(read_bytes(path))
        if not isinstance(data, dict) or data.get("schema") != schema:
            raise HastenError(f"{path} is not {description} of the schema {schema}", advice)
        reader: TypeAdapter[Kind] = _adapter(kind)  # type: ignore[arg-type]
        try:
            return reader.validate_python(data)
        except ValidationError as error:
            # pydantic refuses null for a float: put NaN there, and check the data again.
            for problem in error.errors():
                if problem["type"] == "float_type" and problem["input"] is None:
                    _set_to_nan(data, problem["loc"])
            return reader.validate_python(data)
    except FileNotFoundError:
        raise HastenError(f"{missing or f'no {name} at'} {path}") from None
    except OSError as error:
        raise HastenError(f"cannot read the {name} {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # pydantic's errors are ValueErrors
        raise HastenError(f"{path} is not {description} of the schema {schema}: {_shortened(str(error))}") from None


@functools.cache  # making one takes 0.1 s, and a check of a plan reads the evidence of each of its runs
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _shortened(text: str) -> str:
    return text if len(text) < _LONG else f"{text[:_LONG]}..."


def _set_to_nan(data: Any, location: Sequence[str | int]) -> None:
    """Replace the null at a place of pydantic's by NaN.

    For a union type, the place goes on below the null with the names of the types that were tried.
    """
    for step in location:
        if data[step] is None:
            data[step] = math.nan
            return
        data = data[step]


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def tuples(value: Any) -> Any:
    """Turn every list into a tuple, at any depth: undo what JSON does to the tuples of `dataclasses.asdict`."""
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def with_texts(value: Kind, change: Callable[[str], str]) -> Kind:
    """Return plain data (dataclasses, dicts, lists, tuples) with `change` applied to every string, also to keys."""
    changed: Any = value
    if isinstance(value, str):
        changed = change(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = dataclasses.replace(value, **{name: with_texts(item, change) for name, item in fields.items()})
    elif isinstance(value, dict):
        changed = {with_texts(key, change): with_texts(item, change) for key, item in value.items()}
    # Series of numbers, which may be long, have no texts and are returned as they are.
    elif isinstance(value, list | tuple) and not all(isinstance(item, int | float) for item in value):
        changed = type(value)(with_texts(item, change) for item in value)
    return changed  # type: ignore[no-any-return]
