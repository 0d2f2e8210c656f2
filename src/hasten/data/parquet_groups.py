"""Reads row groups of Parquet files, local or remote, as pyarrow Tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.errors import HastenError

_MOST_MICROSECONDS = (2**63 - 1) // 1000  # what 64 bits hold in nanoseconds: 1677-09-21 to 2262-04-11


def read_group(source: Callable[[], Any], metadata: Any, group: int, columns: list[str], name: str) -> Any:
    """Return columns of a row group as a pyarrow Table.

    Args:
        source: Returns what pyarrow opens: a path, or an open file.
        metadata: The file's footer.
        group: Number of the row group.
        columns: Names.
        name: Name of the file, for messages.

    Raises:
        HastenError: The row group cannot be read, or has timestamps that pyarrow would read as other times.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source(), metadata=metadata) as opened:
            table = opened.read_row_group(group, columns=columns, use_threads=False)
        # pyarrow reads INT96 as nanoseconds and wraps around on overflow, so read these columns again in microseconds.
        if old := _old_times(metadata, columns):
            with pq.ParquetFile(source(), metadata=metadata, coerce_int96_timestamp_unit="us") as opened:
                _refuse_overflow(opened.read_row_group(group, columns=old, use_threads=False), name, group)
    except (OSError, pa.ArrowException) as error:
        raise HastenError(
            f"cannot read {name}, row group {group}: {error}", "the file may be damaged; write it again"
        ) from error
    return table


def _old_times(metadata: Any, columns: list[str]) -> list[str]:
    """Return the columns whose timestamps are INT96, as Spark and Hive write them by default."""
    kinds = (metadata.schema.column(number) for number in range(metadata.num_columns))
    return [kind.path for kind in kinds if kind.physical_type == "INT96" and kind.path in columns]


def _refuse_overflow(table: Any, name: str, group: int) -> None:
    """Raise HastenError for times that overflow nanoseconds: pyarrow would silently read 9999-12-31 as 1816-03-29."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for column in table.column_names:
        ends = pc.min_max(table.column(column).cast(pa.int64()))
        if any(end is not None and abs(end) > _MOST_MICROSECONDS for end in ends.as_py().values()):
            raise HastenError(
                f"column {column!r} has times before 1677-09-22 or after 2262-04-11 in {name}, row group {group}: "
                "INT96 is read as nanoseconds, and these do not fit",
                "write it with spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS, or leave the column out",
            )
