"""A file of numbers and fixed-size lists, in eight row groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np

COLUMNS = {"columns": ["id", "flag", "vector"], "stack": {"features": ["x", "y"]}}
ROWS = 2000
ROW = 8 + 4 + 4 + 1 + 4 * 300  # bytes in memory


def write_rows(folder: Path) -> Path:
    """Write the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = np.arange(ROWS)
    table = {
        "id": ids,
        "x": (ids * 0.5).astype(np.float32),
        "y": (ids * 2.0).astype(np.float32),
        "flag": ids % 2 == 0,
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 300).astype(np.int32)), 300),
    }
    path = folder / "a.parquet"
    pq.write_table(pa.table(table), path, row_group_size=250)
    return path
