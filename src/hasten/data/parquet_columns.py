"""Loads columns of a row group as arrays, and gathers batches from them without a Python loop over rows.

Each class handles one kind of column. `load` turns its columns of a row group into arrays, once per row group;
`gather` copies the rows of a batch out of the arrays of several row groups. Only strings, bytes and images need a
loop over rows, as they become Python lists.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from hasten.data.parquet_images import decode
from hasten.errors import HastenError

_LONG_ROW = 1024  # bytes
_CHUNK = 4096  # rows copied at a time, so that the destination stays in the CPU core's cache


class Scalars:
    """Numeric columns of one type, stored as one rows x columns array so that a row is contiguous in memory."""

    def __init__(self, names: list[str], stacked: str | None, kind: Any) -> None:
        self.names = names
        self.stacked = stacked
        self.row_bytes = len(names) * _bytes_of(kind)

    def load(self, table: Any, where: str, out: Any = None) -> Any:
        """Return an array, rows x columns: `out`, if given."""
        columns = [_numbers(table.column(name), name, where) for name in self.names]
        if len(columns) == 1:
            return _put(np.ascontiguousarray(columns[0]).reshape(-1, 1), out)
        rows = np.empty((len(columns[0]), len(columns)), columns[0].dtype) if out is None else out
        for start in range(0, len(rows), _CHUNK):
            for number, column in enumerate(columns):
                rows[start : start + _CHUNK, number] = column[start : start + _CHUNK]
        return rows

    def gather(self, parts: list[tuple[Any, Any]], places: Any) -> dict[str, Any]:
        """Return the batch's tensors: copy the given rows of each part to their places in the batch."""
        values = _rows(parts, places)
        if self.stacked is not None:
            return {self.stacked: values}
        return {name: values[:, number] for number, name in enumerate(self.names)}


class FixedLists:
    """A column of fixed-size lists, which becomes a 2-D tensor."""

    def __init__(self, name: str, length: int, kind: Any) -> None:
        self.name = name
        self.length = length
        self.row_bytes = max(1, length) * _bytes_of(kind)

    def load(self, table: Any, where: str, out: Any = None) -> Any:
        """Return an array, rows x list length: `out`, if given."""
        column = table.column(self.name).combine_chunks()
        _no_nulls(column, self.name, where)
        return _put(_numbers(column.flatten(), self.name, where).reshape(-1, self.length), out)

    def gather(self, parts: list[tuple[Any, Any]], places: Any) -> dict[str, Any]:
        """Return the batch's tensor: copy the given rows of each part to their places in the batch."""
        return {self.name: _rows(parts, places)}


class Ragged:
    """A column of variable-length lists: padded to the longest in the batch, or packed end to end."""

    def __init__(self, name: str, packed: bool, padding: float) -> None:
        self.name = name
        self.packed = packed
        self.padding = padding

    def load(self, table: Any, where: str) -> Any:
        """Return the flat values and the offset of each row in them."""
        column = table.column(self.name).combine_chunks()
        _no_nulls(column, self.name, where)
        offsets = column.offsets.to_numpy().astype(np.int64)
        return _numbers(column.values, self.name, where), offsets

    def gather(self, parts: list[tuple[Any, Any]], places: Any) -> dict[str, Any]:
        """Return `name` and `name_lengths`, or, packed, `name` and `name_offsets`."""
        size = sum(len(rows) for _, rows in parts)
        lengths = np.empty(size, np.int64)
        for ((_, offsets), rows), place in zip(parts, places, strict=True):
            lengths[place] = offsets[rows + 1] - offsets[rows]
        kind = parts[0][0][0].dtype
        if self.packed:
            ends = np.cumsum(lengths)
            starts, values = ends - lengths, np.empty(int(ends[-1]), kind)
        else:
            longest = int(lengths.max(initial=0))
            starts, values = np.arange(size) * longest, np.full(size * longest, self.padding, kind)
        for ((numbers, offsets), rows), place in zip(parts, places, strict=True):
            values[_ranges(starts[place], lengths[place])] = numbers[_ranges(offsets[rows], lengths[place])]
        if self.packed:
            bounds = np.concatenate([starts, ends[-1:]])
            return {self.name: torch.from_numpy(values), f"{self.name}_offsets": torch.from_numpy(bounds)}
        padded = torch.from_numpy(values.reshape(size, -1) if values.size else values.reshape(size, 0))
        return {self.name: padded, f"{self.name}_lengths": torch.from_numpy(lengths)}


class PassedThrough:
    """A column of strings or bytes, returned as lists, or of encoded images, which are decoded."""

    def __init__(self, name: str, image: bool) -> None:
        self.name = name
        self.image = image

    def load(self, table: Any, where: str) -> Any:
        """Return the values as a list, from which `gather` can take single rows without pyarrow's overhead per call."""
        import pyarrow as pa

        column = table.column(self.name).combine_chunks()
        if self.image and pa.types.is_struct(column.type):  # Hugging Face's images: {bytes, path}
            column = column.field("bytes")
        return column.to_pylist()

    def gather(self, parts: list[tuple[Any, Any]], places: Any) -> dict[str, Any]:
        """Return a list or, for images of one size, a uint8 tensor batch x channels x height x width."""
        values: list[Any] = [None] * sum(len(rows) for _, rows in parts)
        for (column, rows), place in zip(parts, places, strict=True):
            for number, row in zip(place.tolist(), rows.tolist(), strict=True):
                values[number] = column[row]
        return {self.name: decode(values, self.name) if self.image else values}


def _rows(parts: list[tuple[Any, Any]], places: list[Any]) -> torch.Tensor:
    if all(_is_run(rows) for _, rows in parts) and _is_run(np.concatenate(places)):  # in file order
        return torch.from_numpy(np.concatenate([block[rows[0] : rows[-1] + 1] for block, rows in parts]))
    first = parts[0][0]
    if len(parts) == 1:
        return torch.from_numpy(first.take(parts[0][1], axis=0))
    values = np.empty((sum(len(rows) for _, rows in parts), *first.shape[1:]), first.dtype)
    if first[:1].nbytes > _LONG_ROW:
        for (block, rows), place in zip(parts, places, strict=True):
            values[place] = block[rows]
        return torch.from_numpy(values)
    # Short rows: NumPy copies them seven times as fast if the copies need no order of their own; a second copy has it.
    end = 0
    for block, rows in parts:
        np.take(block, rows, axis=0, out=values[end : end + len(rows)], mode="clip")  # "raise" would copy twice
        end += len(rows)
    order = np.empty(end, np.int64)
    order[np.concatenate(places)] = np.arange(end)
    return torch.from_numpy(values.take(order, axis=0))


def _put(array: Any, out: Any) -> Any:
    if out is None:
        return array
    out[...] = array
    return out


def _is_run(numbers: Any) -> bool:
    """Return whether numbers follow each other without a gap: 7, 8, 9."""
    return bool(numbers[-1] - numbers[0] == len(numbers) - 1 and (numbers[1:] - numbers[:-1] == 1).all())


def _ranges(starts: Any, lengths: Any) -> Any:
    """Return the concatenation of the ranges that begin at `starts` and have `lengths` elements."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def _numbers(column: Any, name: str, where: str) -> Any:
    import pyarrow as pa

    kind = column.type
    if not pa.types.is_floating(kind):  # a null float becomes NaN
        _no_nulls(column, name, where)
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    array = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.view()


def _bytes_of(kind: Any) -> int:
    return max(1, int(kind.bit_width) // 8)  # a bool has one bit in Arrow, and a byte in a tensor


def _no_nulls(column: Any, name: str, where: str) -> None:
    if column.null_count:
        raise HastenError(
            f"column {name!r} has {column.null_count} nulls in {where}, and a tensor has no place for them",
            f'leave such rows out by filters=pyarrow.dataset.field("{name}").is_valid(), or fill them in the file',
        )


def parts_of(
    schema: Any, names: list[str], images: set[str], stack: dict[str, list[str]], ragged: str, padding: float
) -> list[Any]:
    """Return the handlers (Scalars, Fixed, Ragged, Passed) that turn columns into parts of a batch.

    Raises:
        HastenError: No tensor can be made of a column's type, or stacked columns differ in type.
    """
    import pyarrow as pa

    is_a = pa.types
    parts: list[Any] = []
    stacked = {name for group in stack.values() for name in group}
    for title, group in stack.items():
        types = sorted({str(schema.field(name).type) for name in group})
        if len(types) > 1 or not _is_number(schema.field(group[0]).type):
            raise HastenError(f"stack={{{title!r}: ...}} takes columns of one type of number, not {', '.join(types)}")
        parts.append(Scalars(group, title, schema.field(group[0]).type))
    scalars: dict[str, list[str]] = {}
    for name in names:
        kind = schema.field(name).type
        if name in images:
            if not (is_a.is_binary(kind) or is_a.is_large_binary(kind) or is_a.is_struct(kind)):
                raise HastenError(f"column {name!r} is {kind}: images are columns of bytes, or of {{bytes, path}}")
            parts.append(PassedThrough(name, image=True))
        elif name in stacked:
            continue
        elif _is_number(kind) or is_a.is_temporal(kind):
            scalars.setdefault(str(kind), []).append(name)
        elif is_a.is_fixed_size_list(kind) and _is_number(kind.value_type):
            parts.append(FixedLists(name, kind.list_size, kind.value_type))
        elif (is_a.is_list(kind) or is_a.is_large_list(kind)) and _is_number(kind.value_type):
            _check_padding(name, kind.value_type, padding if ragged == "pad" else 0)
            parts.append(Ragged(name, ragged == "packed", padding))
        elif is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_binary(kind) or is_a.is_large_binary(kind):
            parts.append(PassedThrough(name, image=False))
        else:
            raise HastenError(
                f"column {name!r} is {kind}, of which no tensor can be made",
                "name the columns you need by columns=[...]; columns of images by images=[...]",
            )
    return [*parts, *(Scalars(group, None, schema.field(group[0]).type) for group in scalars.values())]


def _check_padding(name: str, kind: Any, padding: float) -> None:
    """Raise HastenError if a column's type has no such number: NumPy would take another one, or fail at a batch."""
    import pyarrow as pa

    if pa.types.is_floating(kind):
        return
    if pa.types.is_boolean(kind):
        least, most = 0, 1
    elif pa.types.is_unsigned_integer(kind):
        least, most = 0, 2**kind.bit_width - 1
    else:
        least, most = -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1
    if not (math.isfinite(padding) and padding == int(padding) and least <= padding <= most):
        raise HastenError(
            f"padding={padding} is no {kind}, of which the lists in column {name!r} are", "give padding= that is"
        )


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
