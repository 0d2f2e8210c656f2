"""`hasten.data.ParquetDataset`: rows of Parquet files as tensors, for `hasten.data.DataLoader`."""

from __future__ import annotations

import glob
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset

from hasten.data.parquet_columns import parts_of
from hasten.data.parquet_images import ImageError
from hasten.data.parquet_order import LaneOrder
from hasten.data.permutation import Indices
from hasten.errors import HastenError

_BUDGET = 256 << 20  # bytes of row groups that are open at a time, as far as `window` is not given
_MOST = 16


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
        paths: A file, a folder of `*.parquet`, a pattern, or a list of them; read in sorted order.
        columns: Which ones; None: all.
        images: Columns of encoded images (bytes, or Hugging Face's {bytes, path}) that are decoded.
        stack: New name -> columns of one type that become one 2-D tensor.
        ragged: "pad" lists to the longest of the batch, or "packed".
        padding: The value they are padded with.
        filters: As pyarrow's: `[("label", "<", 5)]`. Row groups are left out by their statistics, then rows.
        window: Row groups open at a time in a shuffled epoch, and so how far rows are mixed; None: up to 16 within
            256 MB. The same for all ranks; where these divide it, each reads row groups of its own.
        transform: Called with each batch. Draw from `hasten.data.sample_rng()`.

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
    ) -> None:
        if ragged not in ("pad", "packed"):
            raise HastenError(f"ragged={ragged!r} must be 'pad' or 'packed'")
        if window is not None and window < 1:
            raise HastenError(f"window={window} must be at least 1")
        stack = {title: list(names) for title, names in (stack or {}).items()}
        self.files = _files(paths)
        self.transform = transform
        self._metadata = [_metadata(file) for file in self.files]
        self._stamps = [_stamp(file) for file in self.files]
        schema = self._metadata[0].schema.to_arrow_schema()
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
            raise HastenError(f"nothing to read in {self.files[0]}{' and others' * (len(self.files) > 1)}: {why}")
        self.window = window or self._own_window()
        self.fingerprint = repr(
            ([(file.name, stamp[0]) for file, stamp in zip(self.files, self._stamps, strict=True)],
             self._names, self._sizes.tolist(), self.window, repr(filters))
        )  # fmt: skip
        self._reset()

    def _reset(self) -> None:
        self._open: OrderedDict[int, _Loading] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_lock")}

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
        return LaneOrder(self._sizes, self.window, seed, epoch)

    def read_batch(self, indices: Sequence[int]) -> Any:
        """Return the batch of these rows."""
        batch = self._gathered(indices)
        return batch if self.transform is None else self.transform(batch)

    def _gathered(self, indices: Sequence[int]) -> dict[str, Any]:
        where = np.asarray(indices, np.int64)
        numbers = np.searchsorted(self._ends, where, side="right")
        places, rows, groups = [], [], []
        for number in np.unique(numbers).tolist():
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
        return f"{self.files[group.file]}, row group {group.number}, row {row} of it"

    def _loaded(self, number: int) -> list[Any]:
        """A row group's arrays: read once by the first thread that needs them, and kept while the window is there."""
        if self._process != os.getpid():  # forked: another thread may have held the lock
            self._reset()
        with self._lock:
            loading = self._open.get(number)
            if loading is None:
                loading = self._open[number] = _Loading()
                while len(self._open) > 2 * self.window + 1:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(number)
        with loading.lock:
            if loading.arrays is None:
                loading.arrays = self._read(self._groups[number])
        return loading.arrays

    def _read(self, group: _Group) -> list[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self.files[group.file]
        where = f"{file}, row group {group.number}"
        if _stamp(file) != self._stamps[group.file]:
            raise HastenError(
                f"{file} was changed or replaced while it is read", "begin again with the files as they are"
            )
        try:
            with pq.ParquetFile(file, metadata=self._metadata[group.file]) as opened:
                table = opened.read_row_group(group.number, columns=self._names, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise HastenError(f"cannot read {where}: {error}", "the file may be damaged; write it again") from error
        if group.kept is not None:
            table = table.take(group.kept)
        return [part.load(table, where) for part in self._parts]

    def _check_types(self, schema: Any, names: list[str]) -> None:
        """Raise where a file lacks a column, or has it with another type than the first file."""
        for file, metadata in zip(self.files, self._metadata, strict=True):
            own = schema if metadata is self._metadata[0] else metadata.schema.to_arrow_schema()
            for name in names:
                if name not in own.names:
                    raise HastenError(f"{file} has no column {name!r}", f"it has {', '.join(map(repr, own.names))}")
                if own.field(name).type != schema.field(name).type:
                    raise HastenError(
                        f"column {name!r} is {schema.field(name).type} in {self.files[0]} and {own.field(name).type} "
                        f"in {file}",
                        "write the files with one schema",
                    )

    def _kept_groups(self, filters: Any) -> list[_Group]:
        counts = [[data.row_group(number).num_rows for number in range(data.num_row_groups)] for data in self._metadata]
        if filters is None:
            return [_Group(file, n, rows) for file, own in enumerate(counts) for n, rows in enumerate(own) if rows]
        import pyarrow as pa
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq
        from pyarrow.fs import LocalFileSystem

        try:
            condition = filters if isinstance(filters, ds.Expression) else pq.filters_to_expression(filters)
            groups = []
            for file, path in enumerate(self.files):
                fragment = ds.ParquetFileFormat().make_fragment(str(path), filesystem=LocalFileSystem())
                for part in fragment.split_by_row_group(filter=condition):
                    number = part.row_groups[0].id
                    kept = _conditional(part, condition, counts[file][number])
                    if len(kept):
                        groups.append(_Group(file, number, counts[file][number], kept))
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise HastenError(f"filters={filters!r} cannot be applied: {error}") from error
        return groups

    def _own_window(self) -> int:
        """As many groups as fit the budget, by what their footers say of their size; the same on all ranks."""
        sizes = [
            sum(group.column(number).total_uncompressed_size for number in range(group.num_columns)
                if group.column(number).path_in_schema.split(".")[0] in self._names)
            for data in self._metadata for group in map(data.row_group, range(data.num_row_groups))
        ]  # fmt: skip
        return int(max(2, min(_MOST, _BUDGET // max(1, *sizes, 1))))


class _Loading:
    """A row group's arrays, once they are read."""

    __slots__ = ("arrays", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.arrays: list[Any] | None = None


def _conditional(part: Any, condition: Any, rows: int) -> Indices:
    """The numbers of a row group's rows that pass."""
    import pyarrow as pa

    names = [name for name in part.physical_schema.names if name in str(condition)]
    table = part.to_table(columns=names).append_column("_hasten_row", pa.array(np.arange(rows)))
    kept: Indices = table.filter(condition).column("_hasten_row").to_numpy()
    return kept


def _files(paths: Any) -> list[Path]:
    """The files that are meant, sorted within each thing that was given."""
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        text = os.fspath(path)
        if "://" in text:
            raise HastenError(
                f"{text} is a URL: ParquetDataset reads local files", "copy the files to a local disk first"
            )
        if Path(text).is_dir():
            here = sorted(Path(text).glob("*.parquet"))
        else:
            here = [Path(text)] if Path(text).exists() else sorted(map(Path, glob.glob(text, recursive=True)))  # noqa: PTH207
        if not here:
            raise HastenError(f"no Parquet file at {text}", "give a file, a folder with *.parquet, or a pattern")
        files += here
    if not files:
        raise HastenError("ParquetDataset was given no path")
    return files


def _metadata(file: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise HastenError(
            "ParquetDataset needs pyarrow, which is not installed", "pip install 'hasten[data]'"
        ) from None
    try:
        return pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise HastenError(
            f"cannot read {file} as Parquet: {error}", "check the file, and that you may read it"
        ) from None


def _stamp(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise HastenError(f"{file} cannot be read any more: {error.strerror}") from None
    return stat.st_size, stat.st_mtime_ns
