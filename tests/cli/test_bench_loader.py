"""`hasten bench-loader`: how fast a script's own loader goes, and what is said where there is none."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.doctor import flame
from hasten.doctor.verdict.diagnosis import SCHEMA
from tests.report.test_html import Page, drawings
from tests.taps.forks import command, launched
from tests.taps.scripts import HASTEN, Done, ctrl_c_works, environment, execute, write
from tests.tuner.evidence import evidence

IMAGES = """
import os, sys, time
import numpy as np, torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        image = Image.open(f"images/{i % 8}.jpg").convert("RGB")
        return torch.from_numpy(np.asarray(image)[:8, :8].copy()).float().flatten(), i % 10

def main():
    os.makedirs("images", exist_ok=True)
    for i in range(8):
        noise = np.random.RandomState(i).randint(0, 255, (200, 200, 3), dtype=np.uint8)
        Image.fromarray(noise).save(f"images/{i}.jpg")
    data = Images()
    valid = DataLoader(data, 50)
    train = DataLoader(data, batch_size=8, shuffle=True, num_workers=1)
    model = nn.Linear(192, 10)
    with torch.no_grad():
        for x, y in valid:
            model(x)
            break
    for x, y in train:
        nn.functional.cross_entropy(model(x), y).backward()
        print("a step was made")
        open("steps", "a").write("one\\n")

if __name__ == "__main__":
    main()
"""

BAD = """
import os, sqlite3, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
kind = sys.argv[1]

class Data(Dataset):
    drawn = 0

    def __init__(self):
        if kind == "sqlite":
            self.database = sqlite3.connect(":memory:")
        if kind == "lambda":
            self.function = lambda x: x

    def __len__(self):
        return 640

    def __getitem__(self, i):
        self.drawn += 1
        if kind == "late" and self.drawn > 8:  # the first batch is trained on; each pass of the bench begins behind it
            raise KeyError("no image 40")  # late
        if kind == "early":
            raise KeyError("no image at all")  # early
        if kind == "slow":
            time.sleep(0.002)
        return torch.zeros(4), 0

class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(640):
            time.sleep(0.0005)
            yield torch.zeros(4), 0

if __name__ == "__main__":
    model = nn.Linear(4, 2)
    if kind == "nothing":
        print("nothing to do")
        sys.exit()
    if kind == "by hand":
        for _ in range(30):
            model(torch.zeros(8, 4)).sum().backward()  # by hand
        sys.exit()
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"} if kind == "lambda" else {}
    loader = DataLoader(Stream() if kind == "stream" else Data(), 8, **spawned)  # built
    if kind == "ranks":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        if kind != "idle":
            loss.backward()
"""


def bench(folder: Path, *arguments: str, seconds: int = 2) -> Done:
    return launched(folder, HASTEN, "bench-loader", "--seconds", str(seconds), *arguments)


def benched(folder: Path) -> dict:
    """What the diagnosis says of the loader."""
    return json.loads((folder / "b.json").read_text())["loader_bench"]


@dataclasses.dataclass(frozen=True)
class Benched:
    folder: Path
    done: Done
    found: dict
    page: str


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """A bench of a loader of JPEGs, with evidence of a training that waited."""
    folder = tmp_path_factory.mktemp("images")
    write(folder, "train.py", IMAGES)
    phases = (0.006, *(0.0,) * 7, 0.004)  # it waited for data for 60 % of steps of 10 ms
    heard = evidence([[0.01] * 60])
    dataclasses.replace(heard, step_phases=(phases,) * 60).write(folder / "e.json")
    line = ("--evidence", "e.json", "--json", "b.json", "--html", "b.html", "train.py")
    done = execute(HASTEN, "bench-loader", "--seconds", "6", *line, cwd=folder)
    assert done.code == 0, done.err
    return Benched(folder, done, json.loads((folder / "b.json").read_text()), (folder / "b.html").read_text())


@pytest.mark.slow  # sets times against each other
def test_it_measures_the_training_loader_by_workers(images: Benched) -> None:
    assert images.found["schema"] == SCHEMA
    found = images.found["loader_bench"]
    assert found["ended"] == "finished"
    # The one that is trained on, not the one that is iterated first.
    assert (found["loader"]["dataset"], found["loader"]["batch_size"], found["loader"]["num_workers"]) == (
        "Images",
        8,
        1,
    )
    counts = [rate["workers"] for rate in found["rates"]]
    assert counts[:3] == [0, 1, 2]
    for rate in found["rates"]:
        assert rate["error"] == ""
        assert rate["samples_per_s"] == pytest.approx(8 * rate["batches_per_s"])
        assert 0 < rate["low"] <= rate["samples_per_s"] <= rate["high"]
        assert rate["first_batch"] > 0
        assert rate["epoch_start"] > 0
    stages = found["stages"]
    assert stages["decoder"] == "PIL"
    assert stages["decode"] > max(stages[name] for name in ("read", "transform", "collate", "other"))


def test_the_script_does_not_train_and_leaves_nothing(images: Benched) -> None:
    assert "a step was made" not in images.done.out + images.done.err
    assert sorted(os.listdir(images.folder)) == ["b.html", "b.json", "e.json", "train.py"]


@pytest.mark.slow  # sets times against each other
def test_it_says_what_was_found_in_one_line(images: Benched) -> None:
    said = " ".join(images.done.out.split())
    assert re.search(
        r"(workers? gives? \d|No number of workers).*alone can feed [\d,]+ samples/s; decoding is \d+ %", said
    )
    assert "the training took 800 samples/s with 0 workers and waited 60 % of its step for data" in said
    assert "decoding (PIL)" in said
    assert "yours" in said
    assert "restarts its workers" in said


def test_the_flame_graph_is_of_a_worker_and_does_nothing(images: Benched) -> None:
    found = images.found["loader_bench"]
    if not found["flame"]:
        assert "py-spy" in found["flame_note"]  # a machine that does not let it look says so
        pytest.skip(found["flame_note"])
    assert "__getitem__ (train.py:" in found["flame"]
    assert "bench.py" not in found["flame"]
    graph = next(one for one in drawings(images.page) if one.findtext("title") == "Flame graph")
    assert "__getitem__" in "".join(graph.itertext())


def test_the_page_needs_nothing_from_elsewhere(images: Benched) -> None:
    page = Page(images.page)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "default-src 'none'" in images.page
    assert "decoding (PIL)" in page.text


@pytest.mark.parametrize(
    ("kind", "says", "mark"),
    [
        # slow: a run each
        pytest.param("nothing", "without building a DataLoader", "", marks=pytest.mark.slow),
        ("early", "ended before its first training step: KeyError: 'no image at all'", "# early"),
        pytest.param("by hand", "without drawing from a DataLoader", "# by hand", marks=pytest.mark.slow),
        ("idle", "without a training step on a DataLoader's batch", "# built"),
    ],
)
def test_where_there_is_no_loader_to_measure(tmp_path: Path, kind: str, says: str, mark: str) -> None:
    script = write(tmp_path, "train.py", BAD)
    done = bench(tmp_path, "train.py", kind)
    assert done.code == 2
    assert says in done.err
    assert not mark or f"{script}:{_line(script, mark)}" in done.err
    assert "Traceback" not in done.err.partition("\n")[0]


def test_a_loader_that_only_its_loop_holds(tmp_path: Path) -> None:
    """`for batch in DataLoader(...)`: the iterator lives on, the loader does not."""
    write(
        tmp_path,
        "train.py",
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        model = torch.nn.Linear(4, 1)
        for (rows,) in DataLoader(TensorDataset(torch.zeros(640, 4)), 8):
            model(rows).sum().backward()
        """,
    )
    done = bench(tmp_path, "--no-flame", "--json", "b.json", "train.py", seconds=1)
    assert done.code == 0, done.err
    assert benched(tmp_path)["loader"]["dataset"] == "TensorDataset"


def test_a_dataset_that_fails_later(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", BAD)
    done = bench(tmp_path, "--no-flame", "train.py", "late", seconds=20)  # enough for 40 samples on a crowded machine
    assert done.code == 1, done.out
    said = "".join(done.out.split())
    assert f"returns no batches: KeyError: 'no image 40' (train.py:{_line(script, '# late')})".replace(" ", "") in said


def _line(script: Path, mark: str) -> int:
    return next(n for n, line in enumerate(script.read_text().splitlines(), 1) if mark in line)


def test_ctrl_c_shows_what_was_measured(tmp_path: Path) -> None:
    write(tmp_path, "train.py", BAD)
    line = [HASTEN, "bench-loader", "--seconds", "40", "--json", "b.json", "train.py", "slow"]
    with subprocess.Popen(
        line,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ctrl_c_works,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for told in process.stderr:
            if "0 workers:" in told:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by Ctrl-C" in out
    found = benched(tmp_path)
    assert found["ended"] == "stopped"
    assert next(rate["workers"] for rate in found["rates"]) == 0
    assert not _running(tmp_path)


def _running(folder: Path) -> list[str]:
    """Processes that were started in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(place / "cwd") == str(folder):
                found.append((place / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow  # spawned workers import torch once more
@pytest.mark.parametrize(
    ("kind", "says", "counts"),
    [
        ("stream", "does not ask which worker it is in", [0, 1]),
        ("sqlite", "holds an open sqlite3.Connection (.database)", [0]),
    ],
)
def test_datasets_that_workers_cannot_share(tmp_path: Path, kind: str, says: str, counts: list[int]) -> None:
    write(tmp_path, "train.py", BAD)
    done = bench(tmp_path, "--no-flame", "--json", "b.json", "train.py", kind)
    assert done.code == 0, done.err
    assert says in " ".join(done.out.split())
    assert [rate["workers"] for rate in benched(tmp_path)["rates"]] == counts


@pytest.mark.slow  # spawned workers import torch once more
def test_a_dataset_that_cannot_be_sent_to_a_worker(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", BAD)
    done = bench(tmp_path, "train.py", "lambda")
    assert done.code == 2
    assert "pickle local object" in done.err
    assert f"{script}:" in done.err
    assert "keep lambdas and open files out of it" in done.err


@pytest.mark.slow  # two ranks of torchrun
def test_of_several_ranks_one_measures(tmp_path: Path) -> None:
    write(tmp_path, "train.py", BAD)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    done = bench(tmp_path, "--no-flame", "--json", "b.json", torchrun, "--nproc-per-node", "2", "train.py", "ranks")
    assert done.code == 0, done.err
    rates = benched(tmp_path)["rates"]
    assert len({rate["workers"] for rate in rates}) == len(rates) >= 3
    time.sleep(0.5)
    assert not _running(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "no such script"),
        (["--seconds", "0", "train.py"], "--seconds 0"),
        (["--html", "nowhere/b.html", "train.py"], "cannot write the report nowhere/b.html: no such folder"),
        (["--evidence", "none.json", "train.py"], "no evidence at none.json"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], says: str) -> None:
    write(tmp_path, "train.py", BAD)
    done = command(tmp_path, "bench-loader", *arguments)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err


def test_without_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert flame.record(os.getpid(), 1, tmp_path / "out") == (
        "",
        "no flame graph: py-spy is not there; pip install 'hasten[flame]'",
    )
    spy = tmp_path / "py-spy"
    spy.write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1\n"
    )
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    stacks, note = flame.record(os.getpid(), 1, tmp_path / "out")
    assert stacks == ""
    assert "SYS_PTRACE" in note
