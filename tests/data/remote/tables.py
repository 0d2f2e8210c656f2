"""Parquet files that a server of this machine gives, read from there and from the disk."""

import numpy as np

from hasten.data import ParquetDataset

ROWS, GROUP = 3000, 250


def write(folder, name, start, rows=ROWS // 2, group=GROUP):
    import pyarrow as pa  # here, because the fixtures are there for tests that need no pyarrow, too
    import pyarrow.parquet as pq

    draw = np.random.default_rng(start)
    columns = {
        "id": np.arange(start, start + rows),
        "unused": draw.random((rows,)),
        "x": draw.random(rows, np.float32),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(draw.random(rows * 16, np.float32)), 16),
        "text": [f"row {row} {draw.random()}" for row in range(start, start + rows)],
    }
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / name, row_group_size=group)


def afar(server, remote, columns=("id", "x", "vector"), **options):
    urls = [f"{server.url}/a.parquet", f"{server.url}/b.parquet"]
    return ParquetDataset(urls, list(columns), remote=remote, window=4, **options)


def near(folder, columns=("id", "x", "vector"), **options):
    return ParquetDataset(folder, list(columns), window=4, **options)


def rows_of(loader):
    return [
        (batch["id"].tolist(), batch["x"].tolist(), batch["vector"].sum(1).tolist() if "vector" in batch else [])
        for batch in loader
    ]


def used_bytes(folder, columns):
    """What the columns of all row groups and the footers take."""
    from pyarrow import parquet as pq

    total = 0
    for path in folder.glob("*.parquet"):
        metadata = pq.read_metadata(path)
        total += metadata.serialized_size + 8
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            chunks = map(group.column, range(group.num_columns))
            total += sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
    return total
