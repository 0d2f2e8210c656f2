"""`hasten.data.ParquetDataset`: rows of Parquet files as tensors, for `hasten.data.DataLoader`."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from hasten.data.parquet_columns import Ragged, parts_of
from hasten.data.parquet_files import LocalFile, files_of
from hasten.data.parquet_filters import kept_groups
from hasten.data.parquet_images import ImageError, import_decoders
from hasten.data.parquet_order import FileOrder, LaneOrder, places_of
from hasten.data.permutation import Indices
from hasten.data.remote.files import PendingRead, RemoteFile
from hasten.data.remote.options import Remote
from hasten.data.remote.pool import Pool
from hasten.data.row_block import RowBlock
from hasten.data.row_groups_ahead import ReadAhead, RowGroupPrefetch
from hasten.data.rows_in_memory import RowsInMemory
from hasten.errors import HastenError

_BUDGET = 256 << 20  # bytes of row groups open at a time, if `window` is not given; data no larger stays in memory
_MOST = 16  # row groups open at a time, if `window` is not given
_AHEAD = 64 << 20  # bytes of row groups of local files that are read before they are needed
_BLOCK = 4 << 20  # bytes of rows read at once
_SMALL_IMAGE = 1280  # bytes, encoded: decoding it takes about as long as handing the GIL to another thread
_OF_PROCESS = ("_open", "_lock", "_ahead", "_pool", "_memory")  # attributes that no other process can have


class ParquetDataset(Dataset[dict[str, Any]]):
    """A map-style dataset of rows in Parquet files, read by row group and only in the requested columns.

    A batch is a dict: numbers as tensors, fixed-size lists as 2-D tensors, variable-length lists padded (with
    `<name>_lengths`) or packed (with `<name>_offsets`), strings and bytes as lists, images as uint8 tensors
    batch x 3 x height x width (a list if sizes differ). Under `hasten.data.DataLoader` a shuffled epoch keeps `window`
    row groups open at a time, reads each once, and mixes the rows of all open groups; workers are threads by default,
    or processes where images are very small (1 KB: decoding them takes less than handing the GIL to another thread).
    Numbers and fixed-size lists of local files that take up to 256 MB in all are read once and stay in memory.

    Args:
        paths: A file, a folder of `*.parquet`, a glob pattern, or a list of these; read in sorted order. Hive-style
            subfolders `key=value`, as Spark writes them, are read too, with `key` as a column. URLs also work (https,
            s3, gs and everything else fsspec reads; a remote folder ends in "/").
        columns: Columns to read; None: all.
        images: Columns of encoded images (bytes, or Hugging Face's {bytes, path}) to decode.
        stack: New name -> columns of one type to combine into one 2-D tensor.
        ragged: "pad" variable-length lists to the longest in the batch, or return them "packed".
        padding: The padding value.
        filters: In pyarrow's form: `[("label", "<", 5)]`. Skips whole row groups by their statistics, then rows.
        window: Row groups open at a time in a shuffled epoch, which decides how well rows are mixed; None: up to 16
            within 256 MB. The same for all ranks; if the number of ranks divides it, ranks read different row groups.
        transform: Called with each batch. Draw random numbers from `hasten.data.sample_rng()`.
        remote: How to read URLs: timeouts, retries, credentials, the disk cache. See `hasten.data.Remote`.

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
        self._images = list(images)
        if images:
            import_decoders()
        schema = self._files[0].schema
        self.columns = list(schema.names if columns is None else columns)
        self._check_types(schema, [*self.columns, *images, *(name for names in stack.values() for name in names)])
        column_names = dict.fromkeys([*self.columns, *images, *(name for names in stack.values() for name in names)])
        self._parts = parts_of(schema, list(column_names), set(images), stack, ragged, padding)
        self._names = list(column_names)
        self._groups = kept_groups(self._files, filters)
        self._sizes: Indices = np.array([group.rows for group in self._groups], np.int64)
        self._ends = np.cumsum(self._sizes)
        if not len(self):
            why = f"no row passes filters={filters}" if filters is not None else "their files have no rows"
            raise HastenError(f"nothing to read in {self._files[0]}{' and others' * (len(self._files) > 1)}: {why}")
        self.window = window or self._own_window()
        self._row_bytes = self._bytes_per_row()
        self.rows_at_once = self._rows_at_once()
        self.fingerprint = repr(
            ([(file.name, file.size) for file in self._files],
             self._names, self._sizes.tolist(), self.window, repr(filters))
        )  # fmt: skip
        self._reset()

    def _reset(self) -> None:
        """Start with no open row groups: in a new dataset, a copy, or a forked process."""
        self._open: OrderedDict[int, _Loading] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._pool: Pool | None = None
        if self._reader is not None:
            self._reader.forget()
        budget = _AHEAD if self._reader is None else self._reader.remote.ahead
        self._ahead = RowGroupPrefetch(self._begin, budget)
        # No more than the row groups of a window may take.
        fits = self._row_bytes and self._row_bytes * len(self) <= _BUDGET
        files = [file for file in self._files if isinstance(file, LocalFile)]
        self._memory = RowsInMemory(files, self._parts, self._sizes) if fits and self._reader is None else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def best_workers(self) -> Literal["process", "thread"]:
        """What makes a loader's batches fastest."""
        # Each process reads whole row groups: from a server, every one of them would fetch all bytes. A transform may
        # use the GPU, which a forked process cannot.
        computes = self.transform is not None and torch.cuda.is_available()
        if self._images and self._reader is None and _forks() and not computes:
            rows = sum(file.metadata.num_rows for file in self._files)
            if sum(self._group_sizes(self._images)) <= _SMALL_IMAGE * len(self._images) * rows:
                return "process"
        return "thread"

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row, without a batch dimension; of a packed column its values, without offsets.

        Raises:
            HastenError: There is a transform, which torch's loader and `Subset` would leave out.
        """
        if self.transform is not None:
            raise HastenError(
                "rows of a ParquetDataset with a transform come in batches, and were asked for one by one",
                "use hasten.data.DataLoader; for some of the rows filters= or files of their own, not Subset; to look "
                "at one: read_batch([index])",
            )
        return self.row(index)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row before the transform."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = self._gathered([index % len(self)])
        packed = [part.name for part in self._parts if isinstance(part, Ragged) and part.packed]
        row = {name: batch.pop(name) for name in packed}
        for name in packed:
            del batch[f"{name}_offsets"]
        return {**{name: values[0] for name, values in batch.items()}, **row}

    def order(self, seed: int, epoch: int) -> LaneOrder:
        """Return an epoch's shuffled order, which maps positions to rows."""
        return LaneOrder(self._sizes, self.window, seed, epoch, self._follow)

    def order_in_files(self, seed: int, epoch: int) -> Callable[[Indices], Indices]:
        """Return an epoch's unshuffled order, which maps positions to rows."""
        return FileOrder(self._sizes, self._follow)

    def _follow(self, groups: list[int]) -> None:
        """Tell the prefetcher the order in which a pass opens row groups."""
        # Not in a forked child before its own reset: the prefetcher's lock and threads are the parent's.
        if self._process == os.getpid():
            self._ahead.follow(groups)
            if self._memory is not None:
                self._memory.check_files(begins=True)

    def read_batch(self, indices: Sequence[int]) -> Any:
        """Return a batch of these rows, transformed."""
        block: RowBlock | None = getattr(indices, "block", None)
        if block is None:
            batch = self._gathered(indices)
        elif self._memory is not None and self._memory.is_complete:
            batch = self._gathered(block.rows_of(indices.begin, len(indices)))  # type: ignore[attr-defined]
        else:
            batch = block.part(indices.begin, indices, self._gathered)  # type: ignore[attr-defined,arg-type]
        return batch if self.transform is None else self.transform(batch)

    def _gathered(self, indices: Sequence[int] | Indices) -> dict[str, Any]:
        """Return a batch of these rows, in their order, before the transform."""
        where = np.asarray(indices, np.int64)
        if self._memory is not None:
            self._memory.check_files()
            if self._memory.is_complete:
                return self._memory.gather(where)
        needed = places_of(np.searchsorted(self._ends, where, side="right"))
        places = [place for _, place in needed]
        rows = [where[place] - (self._ends[number] - self._groups[number].rows) for number, place in needed]
        groups = self._loaded([number for number, _ in needed])
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
        """Return a row's file, row group and number in the row group, in words."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        group = self._groups[number]
        inside = index - int(self._ends[number] - group.rows)
        row = inside if group.selected is None else int(group.selected[inside])
        return f"{self._files[group.file]}, row group {group.number}, row {row} of it"

    def _loaded(self, numbers: list[int]) -> list[list[Any]]:
        """Return row groups' arrays: the first thread that needs one reads it, and the window then keeps it."""
        arrays: list[list[Any]] = []
        for begin in range(0, len(numbers), self.window):
            some = numbers[begin : begin + self.window]
            open_groups = self._prepare(some)  # request them all before waiting for the first
            for waits in (False, True):  # threads that need the same row groups share them out, then wait for the rest
                for number, loading in zip(some, open_groups, strict=True):
                    self._load(number, loading, waits)
            arrays += [loading.arrays for loading in open_groups if loading.arrays is not None]
        return arrays

    def _load(self, number: int, loading: _Loading, waits: bool) -> None:
        """Read a row group's arrays if they are missing; without `waits`, not where another thread reads them."""
        if not loading.lock.acquire(blocking=waits):
            return
        try:
            coming = loading.coming
            if loading.arrays is not None or (isinstance(coming, ReadAhead) and coming.is_begun() and not waits):
                return
            loading.coming = None  # cleared first: after an error the next try refetches
            if isinstance(coming, ReadAhead):
                loading.arrays, coming = coming.arrays(), None
            if loading.arrays is None and self._memory is not None and self._memory.holds(number):
                loading.arrays = self._memory.part(number)  # closed meanwhile, since others were opened
            if loading.arrays is None:
                loading.arrays = self._read(number, coming)
        finally:
            loading.lock.release()

    def _prepare(self, numbers: list[int]) -> list[_Loading]:
        """Reserve places for the needed row groups, request the remote ones, and evict the least recently used."""
        if self._process != os.getpid():  # after a fork: another thread may have held the lock at that moment
            self._reset()
        prepared = []
        with self._lock:
            for number in numbers:
                loading = self._open.get(number)
                if loading is None:
                    loading = self._open[number] = _Loading()
                    loading.coming = self._ahead.take(number, self._is_here)
                    if loading.coming is None and isinstance(self._files[self._groups[number].file], RemoteFile):
                        loading.coming = self._begin(number)
                    while len(self._open) > 2 * self.window + 1:
                        self._open.popitem(last=False)
                else:
                    self._open.move_to_end(number)
                prepared.append(loading)
        return prepared

    def _is_here(self, number: int) -> bool:
        return number in self._open or (self._memory is not None and self._memory.holds(number))

    def _begin(self, number: int) -> PendingRead | ReadAhead:
        """Request a row group of a remote file, or let a thread read one of a local file."""
        group = self._groups[number]
        file = self._files[group.file]
        if isinstance(file, RemoteFile):
            return file.begin(group.number, self._names)
        self._pool = self._pool or Pool(1, finishes=True)
        size = _bytes_in(file.metadata.row_group(group.number), self._names)
        return ReadAhead(self._pool, functools.partial(self._read, number), size)

    def _read(self, number: int, coming: PendingRead | None = None) -> list[Any]:
        group = self._groups[number]
        file = self._files[group.file]
        if isinstance(file, RemoteFile):
            table = file.read(group.number, self._names, coming)
        else:
            table = file.read(group.number, self._names)
        if group.selected is not None:
            table = table.take(group.selected)
        where = f"{file}, row group {group.number}"
        if self._memory is not None:
            return self._memory.load(number, table, where)
        return [part.load(table, where) for part in self._parts]

    def _check_types(self, schema: Any, names: list[str]) -> None:
        """Raise HastenError if a file lacks a column, or has it with another type than the first file."""
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

    def _own_window(self) -> int:
        """Return how many row groups fit the budget, by the largest size in the footers; the same on all ranks."""
        return int(max(2, min(_MOST, _BUDGET // max(1, *self._group_sizes(self._names), 1))))

    def _group_sizes(self, names: Collection[str]) -> list[int]:
        """Return the bytes of these columns in each row group of each file."""
        return [
            _bytes_in(file.metadata.row_group(number), names)
            for file in self._files
            for number in range(file.metadata.num_row_groups)
        ]

    def _bytes_per_row(self) -> int:
        """Return the bytes of a row in memory; 0 if rows differ: images, texts, lists of other lengths."""
        sizes = [getattr(part, "row_bytes", 0) for part in self._parts]
        return sum(sizes) if all(sizes) else 0

    def _rows_at_once(self) -> int:
        """Return how many rows to read at once, with those of other batches; 0 if a batch is best read alone."""
        if not self._row_bytes:  # they take their time row by row
            return 0
        # Of each open row group a small part: threads that read far apart would keep more of them open than there may.
        return min(_BLOCK // self._row_bytes, self.window * int(np.median(self._sizes)) // 8)


class _Loading:
    """An open row group: its arrays once read and, until then, the pending read if it was begun."""

    __slots__ = ("arrays", "coming", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arrays: list[Any] | None = None
        self.coming: PendingRead | ReadAhead | None = None


def _bytes_in(footer: Any, names: Collection[str]) -> int:
    """Return the bytes of columns in a row group, by the footer."""
    columns = map(footer.column, range(footer.num_columns))
    return sum(
        int(column.total_uncompressed_size) for column in columns if column.path_in_schema.split(".")[0] in names
    )


def _forks() -> bool:
    """Return whether worker processes are forked, and so need nothing that can be pickled."""
    method = multiprocessing.get_start_method(allow_none=True)  # None: nothing has been started yet
    return method == "fork" or (method is None and sys.version_info < (3, 14))
