"""Chooses row groups of Parquet files, and rows in them, by filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hasten.data.parquet_files import LocalFile, together
from hasten.data.permutation import Indices
from hasten.data.remote.files import RemoteFile
from hasten.errors import HastenError

_FILTERING = 8  # threads that read row groups to filter their rows


class Group:
    """A row group: its file, its number in the file, its row count, and the rows that pass the filters (None: all)."""

    __slots__ = ("file", "number", "rows", "selected")

    def __init__(self, file: int, number: int, rows: int, selected: Indices | None = None) -> None:
        self.file = file
        self.number = number
        self.selected = selected
        self.rows = rows if selected is None else len(selected)


def kept_groups(files: Sequence[LocalFile | RemoteFile], filters: Any) -> list[Group]:
    """Return the row groups that have rows left after filtering, in file order.

    Raises:
        HastenError: The filters cannot be applied.
    """
    counts = [
        [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)] for file in files
    ]
    if filters is None:
        return [Group(file, n, rows) for file, sizes in enumerate(counts) for n, rows in enumerate(sizes) if rows]
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    def filtered(candidate: tuple[int, int, list[str]]) -> Group:
        file, number, names = candidate
        table = files[file].read(number, names)
        return Group(file, number, counts[file][number], _passing(table, condition))

    try:
        condition = filters if isinstance(filters, ds.Expression) else pq.filters_to_expression(filters)
        possible = []
        for number, file in enumerate(files):
            footer = pa.BufferOutputStream()
            # pyarrow prunes row groups of a fragment, and the footer alone has the statistics that this needs: a
            # remote file is not read for it.
            file.metadata.write_metadata_file(footer)
            fragment = ds.ParquetFileFormat().make_fragment(
                pa.BufferReader(footer.getvalue()), partition_expression=file.guarantee()
            )
            for part in fragment.split_by_row_group(filter=condition, schema=file.schema):
                # pyarrow does not list an expression's columns, so look for their names in its text. An extra
                # match (column "a" in "label") costs only time.
                names = [name for name in file.schema.names if name in str(condition)]
                possible.append((number, part.row_groups[0].id, names))
        return [group for group in together(filtered, possible, _FILTERING) if group.rows]
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise HastenError(f"filters={filters!r} cannot be applied: {error}") from error


def _passing(table: Any, condition: Any) -> Indices:
    """Return the numbers of the rows that pass a filter."""
    import pyarrow as pa

    kept: Indices = (
        table.append_column("_hasten_row", pa.array(np.arange(table.num_rows)))
        .filter(condition)
        .column("_hasten_row")
        .to_numpy()
    )
    return kept
