"""`hasten.data.ParquetDataset`: rows of Parquet files as tensors, for `hasten.data.DataLoader`."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from hasten.data.parquet_columns import parts_of
from hasten.data.parquet_files import files_of, together
from hasten.data.parquet_images import ImageError
from hasten.data.parquet_order import FileOrder, LaneOrder
from hasten.data.permutation import Indices
from hasten.data.remote.files import PendingRead, RemoteFile, RowGroupPrefetch
from hasten.data.remote.options import Remote
from hasten.errors import HastenError

_BUDGET = 256 << 20  # bytes of row groups that are open at a time, as far as `window` is not given
_MOST = 16
_FILTERING = 8  # row groups whose rows are looked through at a time


class _Group:
    """A row group: which file, which number, how many rows, and which of them are left by the filters."""

    __slots__ = ("file", "kept", "number", "rows")

    def __init__(self, file: int, number: int, rows: int, kept: Indices | None = None) -> None:
        self.file = file
        self.number = number
        self.kept = kept
        self.rows = rows if kept is None else len(kept)


class ParquetDataset(Dataset[dict[str, Any]]):
    """Rows of Parquet files, read by row groups, only the columns asked for.

    A batch is a dict: numbers as tensors, fixed-size lists as 2-D tensors, lists of differing lengths padded (with
    `<name>_lengths`) or packed (with `<name>_offsets`), strings and bytes as lists, images as uint8 tensors
    batch x 3 x height x width (a list where sizes differ). Under `hasten.data.DataLoader` a shuffled epoch reads
    `window` row groups at a time, each once, and rows of all of them are mixed; workers are threads unless asked.

    Args:
        paths: A file, a folder of `*.parquet`, a pattern, or a list of them; read in sorted order. Folders `key=value`
            in a folder, as Spark writes them, are read too, `key` as a column. Also URLs (https, s3, gs and what
            else fsspec reads; a folder there ends in "/").
        columns: Which ones; None: all.
        images: Columns of encoded images (bytes, or Hugging Face's {bytes, path}) that are decoded.
        stack: New name -> columns of one type that become one 2-D tensor.
        ragged: "pad" lists to the longest of the batch, or "packed".
        padding: The value they are padded with.
        filters: As pyarrow's: `[("label", "<", 5)]`. Row groups are left out by their statistics, then rows.
        window: Row groups open at a time in a shuffled epoch, and so how far rows are mixed; None: up to 16 within
            256 MB. The same for all ranks; where these divide it, each reads row groups of its own.
        transform: Called with each batch. Draw from `hasten.data.sample_rng()`.
        remote: How URLs are read: time-outs, retries, keys, the cache on disk. See `hasten.data.Remote`.

    Example:
        >>> data = ParquetDataset("train/*.parquet", columns=["image", "label"], images=["image"])
        >>> loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=4)
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        *,
        images: Sequence[str] = (),
        stack: dict[str, list[str]] | None = None,
        ragged: Literal["pad", "packed"] = "pad",
        padding: float = 0,
        filters: Any = None,
        window: int | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        remote: Remote | None = None,
    ) -> None:
        if ragged not in ("pad", "packed"):
            raise HastenError(f"ragged={ragged!r} must be 'pad' or 'packed'")
        if window is not None and window < 1:
            raise HastenError(f"window={window} must be at least 1")
        stack = {title: list(names) for title, names in (stack or {}).items()}
        self._files, self._reader = files_of(paths, remote)
        self.files: list[Path | str] = [file.place for file in self._files]
        self.transform = transform
        schema = self._files[0].schema
        self.columns = list(schema.names if columns is None else columns)
        self._check_types(schema, [*self.columns, *images, *(name for names in stack.values() for name in names)])
        wanted = dict.fromkeys([*self.columns, *images, *(name for names in stack.values() for name in names)])
        self._parts = parts_of(schema, list(wanted), set(images), stack, ragged, padding)
        self._names = list(wanted)
        self._groups = self._kept_groups(filters)
        self._sizes: Indices = np.array([group.rows for group in self._groups], np.int64)
        self._ends = np.cumsum(self._sizes)
        if not len(self):
            why = f"no row passes filters={filters}" if filters is not None else "their files have no rows"
            raise HastenError(f"nothing to read in {self._files[0]}{' and others' * (len(self._files) > 1)}: {why}")
        self.window = window or self._own_window()
        self.fingerprint = repr(
            ([(file.name, file.size) for file in self._files],
             self._names, self._sizes.tolist(), self.window, repr(filters))
        )  # fmt: skip
        self._reset()

    def _reset(self) -> None:
        self._open: OrderedDict[int, _Loading] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._ahead: RowGroupPrefetch | None = None
        if self._reader is not None:
            self._reader.forget()
            self._ahead = RowGroupPrefetch(self._begin, self._reader.remote.ahead)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_lock", "_ahead")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row, without a dimension for the batch."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = self._gathered([index % len(self)])
        return {name: values[0] for name, values in batch.items()}

    def order(self, seed: int, epoch: int) -> LaneOrder:
        """Return the shuffled order of an epoch."""
        return LaneOrder(self._sizes, self.window, seed, epoch, self._follow)

    def order_in_files(self, seed: int, epoch: int) -> Callable[[Indices], Indices]:
        """Return the order of an epoch that is not shuffled."""
        return FileOrder(self._sizes, self._follow)

    def _follow(self, groups: list[int]) -> None:
        """Learn in which order a pass opens row groups."""
        if self._ahead is not None and self._process == os.getpid():
            self._ahead.follow(groups)

    def read_batch(self, indices: Sequence[int]) -> Any:
        """Return the batch of these rows."""
        batch = self._gathered(indices)
        return batch if self.transform is None else self.transform(batch)

    def _gathered(self, indices: Sequence[int]) -> dict[str, Any]:
        where = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._ends, where, side="right")
        places, rows, groups = [], [], []
        needed: list[int] = np.unique(numbers).tolist()
        for count, number in enumerate(needed):
            if self._ahead is not None and count % self.window == 0:
                self._prepare(needed[count : count + self.window])  # all on their way before the first is waited for
            place = np.flatnonzero(numbers == number)
            group = self._groups[number]
            inside = where[place] - (self._ends[number] - group.rows)
            places.append(place)
            rows.append(inside)
            groups.append(self._loaded(number))
        batch: dict[str, Any] = {}
        for number, part in enumerate(self._parts):
            blocks = [group[number] for group in groups]
            try:
                batch.update(part.gather(list(zip(blocks, rows, strict=True)), places))
            except ImageError as error:
                error.message = (
                    f"row {indices[error.number]} ({self.where(int(indices[error.number]))}): {error.message}"
                )
                raise
        return batch

    def where(self, index: int) -> str:
        """Return the file and row group in which a row lies."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        group = self._groups[number]
        inside = index - int(self._ends[number] - group.rows)
        row = inside if group.kept is None else int(group.kept[inside])
        return f"{self._files[group.file]}, row group {group.number}, row {row} of it"

    def _loaded(self, number: int) -> list[Any]:
        """A row group's arrays: read once by the first thread that needs them, and kept while the window is there."""
        (loading,) = self._prepare([number])
        with loading.lock:
            if loading.arrays is None:
                coming, loading.coming = loading.coming, None  # where it fails, the next try fetches again
                loading.arrays = self._read(self._groups[number], coming)
        return loading.arrays

    def _prepare(self, numbers: list[int]) -> list[_Loading]:
        """Have a place for row groups that are needed, and those from afar on their way."""
        if self._process != os.getpid():  # forked: another thread may have held the lock
            self._reset()
        found = []
        with self._lock:
            for number in numbers:
                loading = self._open.get(number)
                if loading is None:
                    loading = self._open[number] = _Loading()
                    if self._ahead is not None:
                        loading.coming = self._ahead.take(number, self._open.__contains__)
                    while len(self._open) > 2 * self.window + 1:
                        self._open.popitem(last=False)
                else:
                    self._open.move_to_end(number)
                found.append(loading)
        return found

    def _begin(self, number: int) -> PendingRead | None:
        """Have a row group fetched, if its file is not on a local disk."""
        group = self._groups[number]
        file = self._files[group.file]
        return file.begin(group.number, self._names) if isinstance(file, RemoteFile) else None

    def _read(self, group: _Group, coming: PendingRead | None = None) -> list[Any]:
        file = self._files[group.file]
        if isinstance(file, RemoteFile):
            table = file.read(group.number, self._names, coming)
        else:
            table = file.read(group.number, self._names)
        if group.kept is not None:
            table = table.take(group.kept)
        return [part.load(table, f"{file}, row group {group.number}") for part in self._parts]

    def _check_types(self, schema: Any, names: list[str]) -> None:
        """Raise where a file lacks a column, or has it with another type than the first file."""
        for file in self._files:
            own = file.schema
            for name in names:
                if name not in own.names:
                    raise HastenError(f"{file} has no column {name!r}", f"it has {', '.join(map(repr, own.names))}")
                if own.field(name).type != schema.field(name).type:
                    raise HastenError(
                        f"column {name!r} is {schema.field(name).type} in {self._files[0]} and {own.field(name).type} "
                        f"in {file}",
                        "write the files with one schema",
                    )

    def _kept_groups(self, filters: Any) -> list[_Group]:
        counts = [
            [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
            for file in self._files
        ]
        if filters is None:
            return [_Group(file, n, rows) for file, own in enumerate(counts) for n, rows in enumerate(own) if rows]
        import pyarrow as pa
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        def kept(found: tuple[int, int, list[str]]) -> _Group:
            file, number, names = found
            table = self._files[file].read(number, names)
            return _Group(file, number, counts[file][number], _passing(table, condition))

        try:
            condition = filters if isinstance(filters, ds.Expression) else pq.filters_to_expression(filters)
            possible = []
            for number, file in enumerate(self._files):
                footer = pa.BufferOutputStream()
                file.metadata.write_metadata_file(footer)  # statistics are all that is needed to leave out row groups
                fragment = ds.ParquetFileFormat().make_fragment(
                    pa.BufferReader(footer.getvalue()), partition_expression=file.guarantee()
                )
                for part in fragment.split_by_row_group(filter=condition, schema=file.schema):
                    names = [name for name in file.schema.names if name in str(condition)]
                    possible.append((number, part.row_groups[0].id, names))
            return [group for group in together(kept, possible, _FILTERING) if group.rows]
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise HastenError(f"filters={filters!r} cannot be applied: {error}") from error

    def _own_window(self) -> int:
        """As many groups as fit the budget, by what their footers say of their size; the same on all ranks."""
        sizes = [
            sum(group.column(number).total_uncompressed_size for number in range(group.num_columns)
                if group.column(number).path_in_schema.split(".")[0] in self._names)
            for file in self._files for group in map(file.metadata.row_group, range(file.metadata.num_row_groups))
        ]  # fmt: skip
        return int(max(2, min(_MOST, _BUDGET // max(1, *sizes, 1))))


class _Loading:
    """A row group's arrays, once they are read; before that, from afar, its bytes on their way."""

    __slots__ = ("arrays", "coming", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arrays: list[Any] | None = None
        self.coming: PendingRead | None = None


def _passing(table: Any, condition: Any) -> Indices:
    """The numbers of the rows that pass."""
    import pyarrow as pa

    kept: Indices = (
        table.append_column("_hasten_row", pa.array(np.arange(table.num_rows)))
        .filter(condition)
        .column("_hasten_row")
        .to_numpy()
    )
    return kept
