"""`hasten convert`: what comes out is what went in, also behind a kill, and bad input is one clear message."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.data import DataLoader, ParquetDataset
from hasten.data.convert.kinds import source_of
from hasten.data.convert.write import Conversion
from hasten.errors import HastenError
from tests.taps.forks import command
from tests.taps.scripts import Done

pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")


def converted(source: Path | str, out: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows that a conversion gives."""
    found = source_of(str(source), options.pop("kind", "auto"), options.pop("shuffle", True), options.pop("text", ()))
    limits = {"group_bytes": None, "file_bytes": 1 << 28, "skip_bad": False} | options
    conversion = Conversion(found, out, **limits)
    conversion.run(lambda records: None)
    assert conversion.rows == sum(pq.read_metadata(file).num_rows for file in out.glob("*.parquet"))
    return [row for file in sorted(out.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def hasten(*arguments: str | Path) -> Done:
    return command(Path.cwd(), "convert", *arguments)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 images in two classes."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(120):
        (folder / ("cat", "dog")[number % 2]).mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("cat", "dog")[number % 2] / f"{number:03}.jpg")
    return folder


def test_images_keep_their_bytes_and_classes_and_are_mixed(photos: Path, tmp_path: Path) -> None:
    rows = converted(photos, tmp_path / "out")
    assert {row["file"]: row["image"] for row in rows} == {
        str(path.relative_to(photos)): path.read_bytes() for path in photos.rglob("*.jpg")
    }
    assert all(row["label"] == row["file"].startswith("dog") for row in rows)
    assert 0.2 < np.mean([row["label"] for row in rows[:60]]) < 0.8
    assert converted(photos, tmp_path / "again") == rows
    plain = converted(photos, tmp_path / "plain", shuffle=False)
    assert [row["file"] for row in plain] == sorted(row["file"] for row in rows)
    assert json.loads(pq.read_schema(tmp_path / "out" / "part-00000.parquet").metadata[b"classes"]) == ["cat", "dog"]


def test_what_was_converted_is_read_by_a_loader_in_many_row_groups(photos: Path, tmp_path: Path) -> None:
    converted(photos, tmp_path / "out", group_bytes=4000, file_bytes=30_000)
    data = ParquetDataset(tmp_path / "out", images=["image"])
    assert len(data.files) > 1
    assert sum(pq.ParquetFile(file).num_row_groups for file in data.files) > 16
    batches = list(DataLoader(data, 40, shuffle=True, seed=1))
    assert sorted(file for batch in batches for file in batch["file"]) == sorted(
        str(path.relative_to(photos)) for path in photos.rglob("*.jpg")
    )
    assert batches[0]["image"].shape == (40, 3, 16, 16)


def test_columns_of_csv_have_the_narrowest_type_of_all_their_rows(tmp_path: Path) -> None:
    rows: list[list[Any]] = [[n, n / 2, f"{n:05}", "true" if n % 2 else "false", f'a "{n}", b'] for n in range(70_000)]
    rows[60_000][0] = 0.25  # late, and a column of whole numbers no more
    rows[3][1] = ""
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["n", "half", "zip", "odd", "text"], *rows])
    read = converted(tmp_path / "t.csv", tmp_path / "out")
    assert [list(row.values()) for row in read] == [
        [float(n), None if half == "" else half, code, odd == "true", text] for n, half, code, odd, text in rows
    ]
    assert {row["n"] for row in converted(tmp_path / "t.csv", tmp_path / "kept", text=("n",))} >= {"7", "0.25"}


def test_lines_of_json_have_the_types_of_all_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"n": n, "tokens": [n, n + 1], "text": f"line {n}"} for n in range(12_000)]
    rows[0]["text"] = None
    rows[11_000] |= {"n": 0.5, "late": True}
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    read = converted(tmp_path / "t.jsonl", tmp_path / "out", group_bytes=1 << 16)
    assert read == [{**row, "late": row.get("late")} for row in rows]


def test_samples_of_webdataset_become_rows(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(image, "PNG")
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(3):
                for ending, data in (("png", image.getvalue()), ("cls", b"%d" % number), ("json", b'{"a": 1}')):
                    member = tarfile.TarInfo(f"train/{shard}{number}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    rows = converted(tmp_path, tmp_path / "out")
    assert [(row["__key__"], row["cls"], row["json"]) for row in rows] == [
        (f"train/{shard}{number}", number, '{"a": 1}') for shard in range(2) for number in range(3)
    ]
    assert all(row["image"] == image.getvalue() for row in rows)


def test_a_torch_dataset_is_read_sample_by_sample(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def train_set():\n"
        "    return TensorDataset(torch.arange(24.0).reshape(6, 2, 2), torch.arange(6))\n"
    )
    rows = converted(f"{tmp_path / 'data.py'}:train_set", tmp_path / "out", shuffle=False)
    assert rows == [{"x0": [4.0 * n, 4.0 * n + 1, 4.0 * n + 2, 4.0 * n + 3], "x1": n} for n in range(6)]
    assert ParquetDataset(tmp_path / "out")[5]["x0"].tolist() == [20.0, 21.0, 22.0, 23.0]


@pytest.mark.parametrize("kind", ["images", "csv", "jsonl"])
def test_a_conversion_that_is_killed_goes_on_and_gives_the_same_files(kind: str, photos: Path, tmp_path: Path) -> None:
    source = photos
    if kind != "images":
        source = tmp_path / f"t.{kind}"
        rows = [{"n": n, "text": "x" * 200} for n in range(30_000)]
        lines = ["n,text", *(f"{row['n']},{row['text']}" for row in rows)]
        source.write_text("\n".join(map(json.dumps, rows) if kind == "jsonl" else lines))
    limits = ["--group-size", "4kB", "--file-size", "8kB"] if kind == "images" else ["--file-size", "1MB"]
    assert hasten(source, tmp_path / "whole", *limits).code == 0
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert len(whole) > 4
    line = [sys.executable, "-m", "hasten", "convert", str(source), str(tmp_path / "out"), *limits]
    for files in (1, 3):
        running = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while len(list((tmp_path / "out").glob("*.parquet"))) < files and running.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        running.wait()
    (tmp_path / "out" / ".hasten-1-0123456789abcdef.tmp").write_text("half a file of a writer that was killed")
    done = hasten(source, tmp_path / "out", *limits)
    assert done.code == 0, done.err
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == whole
    assert "is finished" in hasten(source, tmp_path / "out", *limits).err


def test_bad_records_end_it_or_are_left_out_and_counted(photos: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    (mixed / "cat").mkdir(parents=True)
    for path in (photos / "cat").iterdir():
        (mixed / "cat" / path.name).write_bytes(path.read_bytes())
    (mixed / "cat" / "bad.jpg").write_text("no image")
    (mixed / "cat" / "empty.png").write_text("")
    done = hasten(mixed, tmp_path / "out")
    assert done.code == 2
    assert "it is" in done.err
    assert "--skip-bad" in done.err
    done = hasten(mixed, tmp_path / "skipped", "--skip-bad")
    assert done.code == 0, done.err
    assert "60 images" in done.out
    assert "2 bad records" in done.out
    assert "bad.jpg: it is no image" in done.err
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3\n4,5\n")
    with pytest.raises(HastenError, match=r"t.csv, row 3: it has 1 fields, the first line 2"):
        converted(tmp_path / "t.csv", tmp_path / "csv")
    assert converted(tmp_path / "t.csv", tmp_path / "csv-skipped", skip_bad=True) == [
        {"a": 1, "b": 2},
        {"a": 4, "b": 5},
    ]


WRONG = {
    "no such file": ("nowhere.csv", "no such file or folder: nowhere.csv"),
    "a URL": ("https://example.org/x.csv", "is a URL"),
    "an unknown ending": ("notes.md", "cannot tell what notes.md is"),
    "no images": ("empty", "no images in empty"),
    "an empty CSV": ("empty.csv", "empty.csv is empty"),
    "a CSV without rows": ("head.csv", "head.csv has no rows"),
    "two columns of a name": ("twice.csv", "two columns are called 'a'"),
    "not UTF-8": ("latin.csv", "latin.csv cannot be read as CSV"),
    "mixed JSON": ("mixed.jsonl", "'a' is not of one type"),
    "no JSON": ("bad.jsonl", "bad.jsonl, line 1: it is no JSON"),
    "a cut tar": ("cut.tar", "cut.tar cannot be read as a tar file"),
    "no such dataset": ("code.py:other", "code.py has no 'other'"),
    "a dataset that fails": ("code.py:fails", "ZeroDivisionError"),
    "a stream": ("code.py:stream", "not a dataset with a length"),
    "an empty dataset": ("code.py:empty", "is empty"),
    "samples of a strange kind": ("code.py:strange", "has a value 'x' of the type object"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_clear_message(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("notes.md").write_text("# notes")
    for name, text in {"empty": "", "head": "a,b\n", "twice": "a,a\n1,2\n"}.items():
        Path(f"{name}.csv").write_text(text)
    Path("latin.csv").write_bytes(b"a,b\n\xe9\xff,2\n")
    Path("mixed.jsonl").write_text('{"a": 1}\n{"a": "x"}\n')
    Path("bad.jsonl").write_text("nothing\n")
    Path("cut.tar").write_bytes(b"\0" * 100 + b"x" * 700)
    Path("code.py").write_text(
        "def fails(): return 1 / 0\ndef stream(): return iter(range(3))\nempty = []\nstrange = [object()]\n"
    )
    source, message = WRONG[what]
    with pytest.raises(HastenError) as raised:
        converted(source, tmp_path / "out")
    assert message in str(raised.value)
    assert raised.value.fix


def test_a_folder_of_something_else_is_left_as_it_is(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(HastenError, match="holds other files"):
        converted(photos, tmp_path / "mine")
    converted(photos, tmp_path / "out")
    with pytest.raises(HastenError, match="other options"):
        converted(photos, tmp_path / "out", file_bytes=1 << 20, group_bytes=1 << 19)
    with pytest.raises(HastenError, match="something else"):
        converted(photos / "cat", tmp_path / "out")
    holder = Conversion(source_of(str(photos), "auto", True, ()), tmp_path / "held", None, 1 << 20, False)
    with pytest.raises(HastenError, match="another process"):
        converted(photos, tmp_path / "held")
    holder.run(lambda records: None)
