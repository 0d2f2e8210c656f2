"""Plans which bytes of a Parquet file to request for the columns of a row group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

Span = tuple[int, int]  # first byte, and end (exclusive)

WASTE = 0.05  # unneeded bytes between columns that may be fetched too, as a share of the needed bytes
PART = 8 << 20  # most bytes of a request: larger spans are split into parallel requests


def spans_of(metadata: Any, group: int, columns: Iterable[str]) -> list[Span]:
    """Return the spans of a row group's columns, from the file's footer, in file order.

    Args:
        metadata: pyarrow's FileMetaData.
        group: Number of the row group.
        columns: Names as `read_row_group` takes them: of a column, or the first part of a nested column's path.
    """
    names = tuple(columns)
    prefixes = tuple(f"{name}." for name in names)
    row_group = metadata.row_group(group)
    spans = []
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        path = column.path_in_schema
        if path in names or path.startswith(prefixes):
            start = column.data_page_offset
            if (
                column.has_dictionary_page and column.dictionary_page_offset
            ):  # the dictionary page comes before the data
                start = min(start, column.dictionary_page_offset)
            spans.append((start, start + column.total_compressed_size))
    return sorted(span for span in spans if span[1] > span[0])


def merged(spans: Sequence[Span], waste: float = WASTE) -> list[Span]:
    """Merge spans across the narrowest gaps between them, to need fewer requests; return the result, sorted.

    Args:
        spans: The spans, sorted.
        waste: The most bytes of all closed gaps together, as a share of the spans' bytes.
    """
    if not spans:
        return []
    waste_left = waste * sum(end - start for start, end in spans)
    between = enumerate(itertools.pairwise(spans))
    gaps = sorted((after[0] - before[1], number) for number, (before, after) in between)
    closed = set()
    for gap, number in gaps:
        waste_left -= max(0, gap)
        if waste_left < 0:
            break
        closed.add(number)
    joined = [spans[0]]
    for number, (start, end) in enumerate(spans[1:]):
        if number in closed:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def requests(spans: Sequence[Span], part: int = PART) -> list[Span]:
    """Split spans into requests of equal size, at most `part` bytes each."""
    cut = []
    for start, end in spans:
        count = -(-(end - start) // part)
        size = -(-(end - start) // count)
        cut += [(first, min(first + size, end)) for first in range(start, end, size)]
    return cut
