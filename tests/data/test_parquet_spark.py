"""A folder as Spark writes it is read right: names, hidden files, partitions, INT96 times, empty parts.

Spark needs Java, so pyarrow writes the files here, with the options that give Spark's layout: Parquet 1.0, snappy, all
columns nullable, lists of three levels, times as INT96, no schema of Arrow's in the footer.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.data import DataLoader, ParquetDataset
from hasten.data.parquet_partitions import Partitions
from hasten.errors import HastenError
from tests.data.loader_trainings import ranks_loaders

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

UUID = "6f1e2a0c-5a2b-4bbd-9c1e-0d3c9f7b8a11"
BEGIN = dt.datetime(2024, 2, 29, 12, 30, 15, 250_000)
OPTIONS: dict[str, Any] = {
    "compression": "snappy",
    "version": "1.0",
    "data_page_version": "1.0",
    "use_deprecated_int96_timestamps": True,
    "store_schema": False,
}


def part(folder: Path, number: int, ids: range, group: int = 10, **columns: Any) -> Path:
    """Write one part file, with the checksum file that Hadoop puts beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "id": pa.array(ids, pa.int64()),
        "x": pa.array([row / 2 for row in ids], pa.float64()),
        "at": pa.array([BEGIN + dt.timedelta(seconds=row) for row in ids], pa.timestamp("us")),
        "day": pa.array([dt.date(2024, 1, 1) + dt.timedelta(days=row) for row in ids], pa.date32()),
        "name": pa.array([f"row {row}" for row in ids], pa.string()),
        "ok": pa.array([row % 3 == 0 for row in ids], pa.bool_()),
        "tokens": pa.array([list(range(row % 4)) for row in ids], pa.list_(pa.int32())),
        **columns,
    }
    path = folder / f"part-{number:05}-{UUID}.c000.snappy.parquet"
    table = pa.table(rows).replace_schema_metadata({"org.apache.spark.version": "3.5.1"})
    pq.write_table(table, path, row_group_size=group, **OPTIONS)
    (folder / f".{path.name}.crc").write_bytes(b"crc\0\0\0\2\0")
    return path


def finished(root: Path) -> Path:
    """What Spark leaves beside the parts; and a part of a task that died."""
    (root / "_SUCCESS").touch()
    (root / "._SUCCESS.crc").write_bytes(b"crc\0")
    died = root / "_temporary" / "0" / "_temporary" / "attempt_0"
    died.mkdir(parents=True)
    (died / f"part-00007-{UUID}.c000.snappy.parquet").write_bytes(b"PAR1")
    (root / f"._part-00000-{UUID}.snappy.parquet").write_bytes(b"\0\5\26\7")  # macOS writes such beside copied files
    return root


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """`df.write.parquet("train.parquet")`: a folder of that name; one task had no rows."""
    root = tmp_path / "train.parquet"
    part(root, 0, range(45), group=10)
    part(root, 1, range(0))
    part(root, 2, range(45, 100), group=20)
    return finished(root)


@pytest.fixture
def partitioned(tmp_path: Path) -> Path:
    """`df.write.partitionBy("label", "city").parquet(...)`: one task writes a file of the same name in each folder."""
    root = tmp_path / "train"
    for label, city, begin in ((0, "Köln%3A1", 0), (0, "01234", 30), (1, "Köln%3A1", 60), (10, "01234", 75)):
        part(root / f"label={label}" / f"city={city}", 0, range(begin, begin + (30 if begin < 60 else 15)))
    return finished(root)


def rows_of(batches: Any) -> dict[int, dict[str, Any]]:
    """Each row by its id."""
    found: dict[int, dict[str, Any]] = {}
    for batch in batches:
        for place, row in enumerate(batch["id"].tolist()):
            assert row not in found
            found[row] = {name: values[place] for name, values in batch.items()}
    return found


@pytest.mark.parametrize("given_as", ["folder", "pattern", "files", "a pattern of folders"])
def test_each_row_of_the_parts_once_and_nothing_else(plain: Path, given_as: str) -> None:
    paths: dict[str, Any] = {
        "folder": plain,
        "pattern": f"{plain}/part-*.parquet",
        "files": sorted(plain.glob("part-*.parquet")),
        "a pattern of folders": f"{plain.parent}/*.parquet",
    }
    data = ParquetDataset(paths[given_as])
    assert [Path(file).name[:10] for file in data.files] == ["part-00000", "part-00001", "part-00002"]
    rows = rows_of(DataLoader(data, batch_size=7, shuffle=True, seed=1))
    assert sorted(rows) == list(range(100))
    begin = int(BEGIN.replace(tzinfo=dt.UTC).timestamp() * 1000) * 1_000_000
    for row, values in rows.items():
        assert values["x"].item() == row / 2
        assert values["at"].item() == begin + row * 1_000_000_000  # INT96 is read as nanoseconds, whole
        assert values["day"].item() == (dt.date(2024, 1, 1) - dt.date(1970, 1, 1)).days + row
        assert values["name"] == f"row {row}"
        assert values["ok"].item() == (row % 3 == 0)
        length = values["tokens_lengths"].item()
        assert values["tokens"][:length].tolist() == list(range(row % 4))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_partition_folders_are_columns(partitioned: Path, ranks: int, workers: int) -> None:
    data: Any = ParquetDataset(partitioned, columns=["id", "label", "city"])
    assert len(data) == 90
    loaders = ranks_loaders(data, ranks, batch_size=8, shuffle=True, num_workers=workers, seed=2, drop_last=False)
    batches = [batch for loader in loaders for batch in loader]
    assert all(batch["label"].dtype == torch.int64 for batch in batches)
    rows = {row: (values["label"].item(), values["city"]) for row, values in rows_of(batches).items()}
    assert rows == {
        row: (0 if row < 60 else 1 if row < 75 else 10, "Köln:1" if row < 30 or 60 <= row < 75 else "01234")
        for row in range(90)
    }


def test_a_state_of_partitions_goes_on_exactly(partitioned: Path) -> None:
    def loader() -> Any:
        return DataLoader(ParquetDataset(partitioned, ["id", "label"]), batch_size=8, shuffle=True, seed=2)

    first = loader()
    passing = iter(first)
    begun = [next(passing)["id"].tolist() for _ in range(4)]
    other = loader()
    other.load_state_dict(first.state_dict())
    assert begun + [batch["id"].tolist() for batch in other] == [batch["id"].tolist() for batch in loader()]


def test_filters_leave_out_whole_partitions(partitioned: Path) -> None:
    """Those that the folders' names leave out are not opened to be looked through: their pages may be damaged."""
    for damaged in (partitioned / "label=0").rglob("part-*.parquet"):
        text = damaged.read_bytes()
        damaged.write_bytes(text[:4] + bytes(64) + text[68:])  # the footer stays
    data = ParquetDataset(partitioned, ["id"], filters=[("label", ">", 0), ("id", ">=", 70)])
    assert sorted(rows_of(DataLoader(data, batch_size=4))) == list(range(70, 90))
    only = ParquetDataset(partitioned, ["city"], filters=[("label", "=", 1)])
    assert [batch["city"] for batch in DataLoader(only, batch_size=15)] == [["Köln:1"] * 15]


@pytest.mark.parametrize("column", ["first", "last"])
def test_a_time_that_nanoseconds_do_not_hold_is_refused(tmp_path: Path, column: str) -> None:
    """9999-12-31 stands for "no end" in many tables; pyarrow reads 1816-03-29."""
    end = {"first": dt.datetime(1, 1, 1), "last": dt.datetime(9999, 12, 31)}[column]
    until = pa.array([BEGIN, None, end], pa.timestamp("us"))
    part(tmp_path, 0, range(3), until=until)
    with pytest.raises(HastenError, match=r"'until' has times before 1677-09-22 or after 2262-04-11.*row group 0"):
        next(iter(DataLoader(ParquetDataset(tmp_path, ["until"]), batch_size=3)))
    assert next(iter(DataLoader(ParquetDataset(tmp_path, ["id"]), batch_size=3)))["id"].tolist() == [0, 1, 2]


def test_microseconds_hold_every_time(tmp_path: Path) -> None:
    """spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS, as the refusal advises."""
    table = pa.table({"until": pa.array([dt.datetime(9999, 12, 31)], pa.timestamp("us", "UTC"))})
    pq.write_table(table, tmp_path / f"part-00000-{UUID}.snappy.parquet", **OPTIONS | {"version": "2.6"} | {
        "use_deprecated_int96_timestamps": False})  # fmt: skip
    batch = next(iter(DataLoader(ParquetDataset(tmp_path), batch_size=1)))
    assert batch["until"].item() == (dt.datetime(9999, 12, 31) - dt.datetime(1970, 1, 1)).days * 86_400_000_000


def test_a_missing_partition_value(tmp_path: Path) -> None:
    part(tmp_path / "city=__HIVE_DEFAULT_PARTITION__" / "label=0", 0, range(2))
    part(tmp_path / "city=Ulm" / "label=__HIVE_DEFAULT_PARTITION__", 0, range(2, 4))
    assert next(iter(DataLoader(ParquetDataset(tmp_path, ["city"]), batch_size=4)))["city"] == [
        "Ulm",
        "Ulm",
        None,
        None,
    ]
    with pytest.raises(HastenError, match=r"column 'label' has 2 nulls .*city=Ulm"):
        next(iter(DataLoader(ParquetDataset(tmp_path, ["label"]), batch_size=4)))


def test_layouts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    part(tmp_path / "a" / "label=0", 0, range(3))
    part(tmp_path / "a", 1, range(3, 6))
    with pytest.raises(HastenError, match=r"part-00001.* lies in no folder key=value, and .* in label="):
        ParquetDataset(tmp_path / "a")
    part(tmp_path / "b" / "id=0", 0, range(3))
    with pytest.raises(HastenError, match=r"has a column 'id', and lies in a folder id="):
        ParquetDataset(tmp_path / "b")
    part(tmp_path / "c" / "test.parquet", 0, range(3))
    with pytest.raises(HastenError, match=r"test\.parquet is a folder, not a file"):
        ParquetDataset(tmp_path / "c")
    part(tmp_path / "d", 0, range(0))
    with pytest.raises(HastenError, match="their files have no rows"):
        ParquetDataset(finished(tmp_path / "d"))
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "_SUCCESS").touch()
    with pytest.raises(HastenError, match="no Parquet file at"):
        ParquetDataset(tmp_path / "e")


TEXTS = st.one_of(st.integers(-(10**20), 10**20).map(str), st.floats().map(str), st.text(), st.none())


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_partitions_values_are_all_kept(texts: list[str | None]) -> None:
    """Whatever folders are called: a number only where all are, and none that would be written another way."""
    partitions = Partitions((Path(str(number)), {"key": text}) for number, text in enumerate(texts))
    for text in texts:
        (value,) = set(map(str, partitions.added(pa.table({}), {"key": text}, 3).column("key").to_pylist()))
        kind = partitions.types["key"]
        assert (value == "None") if text is None else kind != pa.string() or value == text
        assert kind != pa.int64() or text is None or value == text
        assert kind != pa.float64() or text is None or float(value) == float(text) or value == "nan"
