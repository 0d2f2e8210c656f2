"""The source for a user's own torch Dataset, converted sample by sample."""

from __future__ import annotations

import importlib
import io
import itertools
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hasten.data.convert.source import BadRecord, RowSource, fingerprint_of
from hasten.data.permutation import Permutation
from hasten.errors import HastenError

_ESTIMATED = 8  # samples from which the total size is estimated


def dataset_named(text: str) -> Any:
    """Return the dataset named as `data.py:train_set` or `package.module:make_dataset`; a function is called.

    Raises:
        HastenError: The file, module or name does not exist, fails, or is not a map-style dataset.
    """
    place, _, name = text.rpartition(":")
    how = "write it as data.py:train_set or package.module:make_dataset"
    sys.path.insert(0, str(Path.cwd()))
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise HastenError(f"no such file {place}", how)
            sys.path.insert(0, str(Path(place).resolve().parent))
            namespace = runpy.run_path(place)
        else:
            namespace = vars(importlib.import_module(place))
        if name not in namespace:
            raise HastenError(f"{place} has no {name!r}", how)
        named = namespace[name]
        dataset = named() if callable(named) and not hasattr(named, "__getitem__") else named
    except HastenError:
        raise
    except Exception as error:  # user code may raise anything
        raise HastenError(f"{text} fails: {type(error).__name__}: {error}", "fix it first") from error
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise HastenError(f"{text} is a {type(dataset).__name__}, not a dataset with a length and an index", how)
    return dataset


class Samples(RowSource):
    """The samples of a dataset as rows: a dict's values by name, a tuple's as `x0`, `x1`, anything else as `x`.

    Tensors and arrays become numbers or flat fixed-size lists, with their `shape` in the column's metadata; images
    become PNG, which is lossless.

    Args:
        dataset: A map-style dataset.
        name: The dataset's name on the command line.
        shuffle: Write samples in a random order, the same each time.
    """

    def __init__(self, dataset: Any, name: str, shuffle: bool) -> None:
        self._dataset, self._name, self._shuffle = dataset, name, shuffle
        self.what = f"samples of {type(dataset).__name__}"
        self.records: int | None = len(dataset)
        self._schema: Any = None
        if not self.records:
            raise HastenError(f"{name} is empty", "is it another split?")
        self._order = Permutation(self.records, 0, 0) if shuffle else None
        first = [row for row in itertools.islice(self._rows(0), _ESTIMATED) if isinstance(row, dict)]
        values = [value for row in first for value in row.values()]
        taken = sum(len(value) if isinstance(value, bytes | str) else 8 * len(_as_list(value)) for value in values)
        self.size = taken // max(1, len(first)) * self.records

    def fingerprint(self) -> str:
        """Return a digest of the dataset's name, length and shuffling; nothing more is known of it."""
        return fingerprint_of([], self._name, self.records, self._shuffle)

    def schema(self) -> Any:
        """Return the schema, by the types of the first sample's values."""
        import pyarrow as pa

        if self._schema is None:
            sample = self._dataset[self._place(0)]
            fields = []
            for name, value in _parts(sample).items():
                shape = list(getattr(value, "shape", ()))
                try:
                    kind = pa.array([_plain(value)]).type
                except (pa.ArrowException, TypeError) as error:
                    raise HastenError(
                        f"a sample of {self._name} has a value {name!r} of the type {type(value).__name__}: {error}",
                        "numbers, text, bytes, lists, tensors and PIL images can be kept",
                    ) from None
                if hasattr(value, "dtype"):
                    inner = pa.from_numpy_dtype(_array(value).dtype)
                    kind = pa.list_(inner, _array(value).size) if shape else inner
                metadata = {"shape": repr(shape)} if len(shape) > 1 else None
                fields.append(pa.field(name, kind, metadata=metadata))
            self._schema = pa.schema(fields)
        return self._schema

    def _place(self, number: int) -> int:
        """Return the index of the sample to write as row `number`."""
        return number if self._order is None else int(self._order(number))

    def _rows(self, start: int) -> Iterator[dict[str, Any] | BadRecord]:
        for number in range(start, len(self._dataset)):
            index = self._place(number)
            try:
                row = {name: _plain(value) for name, value in _parts(self._dataset[index]).items()}
            except Exception as error:  # user code may raise anything
                yield BadRecord(f"sample {index} of {self._name}", f"{type(error).__name__}: {error}")
                continue
            yield row


def _parts(sample: Any) -> dict[str, Any]:
    """Return a sample's values by column name."""
    if isinstance(sample, dict):
        return {str(name): value for name, value in sample.items()}
    if isinstance(sample, tuple | list):
        return {f"x{number}": value for number, value in enumerate(sample)}
    return {"x": sample}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _array(value: Any) -> Any:
    import numpy as np

    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def _plain(value: Any) -> Any:
    """Convert a value for pyarrow: a tensor to a number or flat list, an image to PNG bytes."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = _array(value)
        return array.item() if array.ndim == 0 else array.reshape(-1).tolist()
    if type(value).__module__.startswith("PIL."):
        file = io.BytesIO()
        value.save(file, "PNG")
        return file.getvalue()
    return value
