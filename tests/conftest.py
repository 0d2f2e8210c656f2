"""Tests on machines that are shared: one thread each; Hypothesis has no deadlines and draws the same."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import settings

# Read when torch is imported, here and in what tests start. With a thread for each core in each worker of pytest-xdist,
# every operation of torch waits until the last of its threads had its turn: test_same_weights.py took 130 s for 3 s of
# CPU. Tests of threads ask for more of them themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where there are more: they otherwise spin while they wait, which takes four times the CPU of the tests themselves.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Pythons that tests start import torch without garbage collections: 1.8 s of CPU in place of 3.0, with the first
# optimizer. Not those that shall start as a person's do, in the environment of `tests.taps.scripts`.
_QUICK = str(Path(__file__).with_name("quick_start"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_QUICK, os.environ.get("PYTHONPATH")]))

gc.disable()  # while tests are collected: all of it stays

settings.register_profile("same", deadline=None, derandomize=True, max_examples=60)  # `make fuzz` draws more
settings.register_profile("fuzz", deadline=None)
settings.load_profile("same")

# Their tests wait for many seconds each and compute little: searches, time-outs, trainings that sleep.
WAITING = (
    "cli/test_tune.py",
    "online/test_online_search.py",
    "online/test_auto.py",
    "cli/test_target.py",
    "trainer/test_tuning.py",
    "cli/test_bench_loader.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each process of pytest-xdist import the tests from another room on.

    In a fresh clone pytest rewrites each file of tests when it is imported, which is most of the CPU of collecting, and
    keeps what it has rewritten: so each process finds what the others have done, and none does it all.
    """
    worker = getattr(session.config, "workerinput", None)
    here = Path(__file__).parent
    if worker is None or [Path(session.config.invocation_params.dir, one) for one in session.config.args] != [here]:
        return
    rooms = sorted(path for path in here.iterdir() if path.is_dir() or path.match("test_*.py"))
    files = [len(list(room.rglob("test_*.py"))) if room.is_dir() else 1 for room in rooms]
    number, workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    first = next(at for at in range(len(rooms)) if sum(files[: at + 1]) * workers > number * sum(files))
    session.config.args = [str(room) for room in rooms[first:] + rooms[:first] if files[rooms.index(room)]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take `--part`: the slow tests are hours, more than a person can let run at once."""
    help = "of N parts of the chosen tests, run the K-th: `-m slow --part 2/8`"
    parser.addoption("--part", metavar="K/N", type=_part, help=help)


def _part(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part, such as 2/8")
    return int(number), int(of)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave out what is not of this part, and deal the rest."""
    if hasattr(config, "workerinput"):  # the same order in each process, whichever room it began with
        items.sort(key=lambda item: item.path)
    yield  # to `-m` and `-k`
    if part := config.getoption("part"):
        number, of = part
        kept = items[number - 1 :: of]  # neighbours are much alike: each part gets some of them
        config.hook.pytest_deselected(items=[item for place, item in enumerate(items) if place % of != number - 1])
        items[:] = kept
    _deal(config, items)


def _deal(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let one in three processes of pytest-xdist begin with what waits, while the others compute.

    At the end, where their names would put most of them, nothing would run beside the last; and in all processes at
    once they leave half of the CPU unused for more than a minute. xdist's `worksteal` first gives each process an
    equal number of neighbours, in the order that is made here.
    """
    here = Path(__file__).parent
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    lanes = max(1, workers // 3)
    files = [here / name for name in WAITING]
    others = iter([item for item in items if item.path not in files])
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        share = (len(items) - len(dealt)) // (workers - worker)
        first = [item for item in items if worker < lanes and item.path in files[worker::lanes]]
        dealt += [*first, *islice(others, max(0, share - len(first)))]
    items[:] = [*dealt, *others]


def pytest_collection_finish() -> None:
    """Leave what was collected and imported out of garbage collections, here and in what is forked from here."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def without_lightning() -> Iterator[None]:
    """A test that imports Lightning here spoils those after it: a Trainer has its defaults from then on."""
    before = "lightning.pytorch" in sys.modules
    yield
    assert before or "lightning.pytorch" not in sys.modules, "tests of Lightning belong in tests/trainer/lightning"
