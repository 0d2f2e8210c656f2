"""Which bytes of a Parquet file hold the columns of a row group, and in which requests to ask for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

Span = tuple[int, int]  # first byte, and the one after the last

WASTE = 0.05  # bytes between columns that may be fetched with them, as a part of what is needed
PART = 8 << 20  # bytes of one request: larger spans are fetched in several at a time


def spans_of(metadata: Any, group: int, columns: Iterable[str]) -> list[Span]:
    """Return where the columns of a row group lie, by the file's footer, in the order of the file.

    Args:
        metadata: pyarrow's FileMetaData.
        group: Number of the row group.
        columns: Names as `read_row_group` takes them: of a column, or of what a nested column begins with.
    """
    wanted = tuple(columns)
    prefixes = tuple(f"{name}." for name in wanted)
    row_group = metadata.row_group(group)
    spans = []
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        path = column.path_in_schema
        if path in wanted or path.startswith(prefixes):
            start = column.data_page_offset
            if (
                column.has_dictionary_page and column.dictionary_page_offset
            ):  # it lies before the data, where there is one
                start = min(start, column.dictionary_page_offset)
            spans.append((start, start + column.total_compressed_size))
    return sorted(span for span in spans if span[1] > span[0])


def merged(spans: Sequence[Span], waste: float = WASTE) -> list[Span]:
    """Return sorted spans with the narrowest gaps between them closed, as long as those add up to little.

    Args:
        spans: In order.
        waste: What all closed gaps may add up to, as a part of the spans' bytes.
    """
    if not spans:
        return []
    left = waste * sum(end - start for start, end in spans)
    between = enumerate(itertools.pairwise(spans))
    gaps = sorted((after[0] - before[1], number) for number, (before, after) in between)
    closed = set()
    for gap, number in gaps:
        left -= max(0, gap)
        if left < 0:
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
    """Return the spans cut into parts of equal size, at most `part` bytes each."""
    cut = []
    for start, end in spans:
        count = -(-(end - start) // part)
        size = -(-(end - start) // count)
        cut += [(first, min(first + size, end)) for first in range(start, end, size)]
    return cut
