"""The search in one process, on real small trainings with planted techniques, measured by the clock of `waiting.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hasten.evidence import read_evidence
from hasten.online.course import Course
from hasten.online.options import Candidate, OnlineOptions
from hasten.taps.config import TrialOptions
from hasten.tuner import online_search as module
from hasten.tuner.online_search import OnlineSearch
from hasten.tuner.search_state import SearchState
from hasten.tuner.trial import Trials
from tests.online import planted
from tests.online.searching import TRAIN, Searched
from tests.taps.scripts import PYTHON, write

pytestmark = pytest.mark.timeout(400)  # several processes each, on a machine that others may load
STARTUP = 15.0  # seconds, also of a process on a machine that others load
Search = Callable[..., Searched]


@pytest.fixture
def search(tmp_path: Path, plant: None, monkeypatch: pytest.MonkeyPatch) -> Search:
    """Search in a script: `search(script, names of techniques)`; it ends once nothing is doubtful any more."""

    def run(
        text: str,
        names: tuple[str, ...],
        seconds: float = 150.0,
        batches: int = 50,
        validation_share: float = 0.0,
        chosen: frozenset[int] = frozenset(),
    ) -> Searched:
        write(tmp_path, "work/train.py", text)
        (tmp_path / "scratch").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        planted.site(tmp_path / "site", waiting=True)
        start = time.monotonic()
        trials = Trials([PYTHON, "train.py"], ("train.py",), tmp_path / "scratch",
                        TrialOptions("", batches=batches), start + 900)  # fmt: skip
        candidates = tuple(Candidate(name, True) for name in names)
        options = OnlineOptions(candidates, "", start + seconds, start + seconds + 2, block_seconds=0.1,
                              validation_share=validation_share, total_steps=10**6)  # fmt: skip
        course = Course(candidates, validation_share=validation_share)
        found, said, told = SearchState(course, chosen=chosen), [], []
        ok = OnlineSearch(trials, found, options, STARTUP, said.append, told.append).search()
        assert list((tmp_path / "scratch").iterdir()) == []
        children = psutil.Process().children(recursive=True)
        # Another test's child that ended and was never waited for has no command line.
        assert not [one for one in children if one.status() != psutil.STATUS_ZOMBIE and "train.py" in one.cmdline()]
        return Searched(ok, found, said, told)

    return run


# -- what it finds -----------------------------------------------------------------------------------------------------


def test_what_helps_is_chosen_what_harms_is_not(search: Search) -> None:
    """Steps of 12 ms that become 3.5 ms; and the claim says so, of blocks that were plain or the plan and no other."""
    done = search(TRAIN + "train(10 ** 6)", ("helps", "helps_little", "harms", "rounds_and_harms"))
    assert done.ok, done.said
    assert done.names == {"helps", "helps_little"}
    assert done.out == {}
    assert done.told == done.found.blocks
    assert [block.part for block in done.found.blocks[:4]] == ["baseline", "baseline", "all on", "all on"]
    assert all(block.on == () for block in done.blocks("baseline", "plain"))
    assert {block.on for block in done.blocks("plan")} == {(0, 1)}
    claim = done.found.claim()
    assert claim is not None
    assert 2.0 < claim.ratio < 4.5
    assert claim.low > 1.5
    for block in done.found.blocks:
        assert block.steps >= 4 or block.seconds >= 0.4
        if not block.trouble:
            waits = 0.012 - 0.006 * (0 in block.on) - 0.0025 * (1 in block.on) + 0.006 * len({2, 3} & set(block.on))
            assert block.step_seconds >= waits, block  # none of its steps was under another set
    estimates = done.found.course.estimates(done.found.chosen)
    assert estimates[0].helps > 0.9
    assert max(estimates[2].helps, estimates[3].helps) < 0.5


def test_a_claim_that_a_process_began_is_ended_by_the_next(search: Search) -> None:
    """Of the same set, though it would choose another: else there would be pairs of two plans, and too few of each."""
    done = search(TRAIN + "train(10 ** 6)", ("helps", "harms"), chosen=frozenset({1}))
    assert done.ok, done.said
    assert {(block.part, block.on) for block in done.found.blocks} == {("plain", ()), ("plan", (1,))}
    assert done.names == {"harms"}


@pytest.mark.slow  # a search to the end of its time
def test_where_nothing_helps_nothing_is_chosen(search: Search) -> None:
    done = search(TRAIN + "train(10 ** 6)", ("harms", "rounds_and_harms"), 30.0)
    assert done.ok
    assert done.names == set()
    assert done.found.claim() is None
    assert done.blocks("plain", "plan") == []


def test_what_a_script_does_behind_its_training_is_waited_for_once(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains for 200 steps, and tests what it has trained; later processes know, and end with the last step."""
    monkeypatch.setattr(module, "_RESTARTS", 3)
    ran: list[tuple[int, int, bool]] = []
    run = module._Process.run

    def listened(process: module._Process, folder: Path, startup: float) -> None:
        run(process, folder, startup)
        ended = read_evidence(folder / "evidence.json").ended
        ran.append((process._options.last_step, process._options.total_steps, ended == "complete"))

    monkeypatch.setattr(module._Process, "run", listened)
    train = "for _ in range(200): step(torch.randn(4, 4))\n"
    done = search(TRAIN + train + "wait(3.0)", ("helps", "harms"), seconds=100.0)
    assert done.ok
    assert ran[0] == (0, 10**6, False)
    assert set(ran[1:]) == {(199, 199, True)}, "a step lies between two of the optimizer's"  # one or two, as it settles
    assert done.names == {"helps"}


@pytest.mark.slow  # a search in several processes each
@pytest.mark.parametrize(("steps", "names"), [(300, {"helps"}), (1500, {"helps", "compiles"})])
def test_what_is_compiled_in_a_script_that_ends_soon(search: Search, steps: int, names: set[str]) -> None:
    """Steps wait for nothing when compiled: a block of them needs 300 or so, and is asked in vain once at the most."""
    # Where others have the CPU, compiling is only tried with minutes to spare; it takes none of them here.
    done = search(TRAIN + f"for _ in range({steps}): step(torch.randn(4, 4))", ("helps", "compiles"), seconds=900.0)
    assert done.names == names
    assert done.found.claim() is not None
    assert ("compiles" in done.out) == ("compiles" not in names), done.out
    assert len(done.said) < 8


# -- what goes wrong ---------------------------------------------------------------------------------------------------

TROUBLE = {
    "cannot_be_switched_on": "RuntimeError: planted: not on this machine",
    "fails_in_a_pass": "RuntimeError: planted: not with this loader",
    "dies_when_switched_on": "it crashed",
    "crashes_in_a_block": "it crashed: RuntimeError: planted: in the middle of it",
    "hangs_in_a_block": "it hung",
    "turns_to_nan": "the loss turned to NaN",
}


@pytest.mark.parametrize("name", [
    # slow: a search in several processes each
    pytest.param(name, marks=() if name == "cannot_be_switched_on" else pytest.mark.slow) for name in TROUBLE
])  # fmt: skip
def test_what_breaks_is_off_for_good_and_the_rest_is_found(
    search: Search, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET", 8.0)
    done = search(TRAIN + "train(10 ** 6)", ("helps", name, "harms"))
    assert done.ok, done.said
    assert set(done.out) == {name}
    assert TROUBLE[name] in done.out[name]
    assert done.names == {"helps"}
    claim = done.found.claim()
    assert claim is not None
    assert 1.4 < claim.ratio < 2.6
    assert all(1 in block.on for block in done.found.blocks if block.trouble)
    if TROUBLE[name].startswith("RuntimeError"):
        assert not any(1 in block.on for block in done.found.blocks if not block.trouble), "it never was on"


def test_what_leaves_the_training_alone_is_asked_no_more(search: Search) -> None:
    """It does nothing, whatever a block in which it was on had for a pace; that block counts as one without it."""
    done = search(TRAIN + "train(10 ** 6)", ("leaves_alone", "helps"), 40.0)
    assert done.ok, done.said
    assert done.out == {"leaves_alone": "it leaves this training alone: planted: not with this model"}
    assert done.names == {"helps"}
    assert not any(0 in block.on for block in done.found.blocks)


def test_a_cache_that_the_training_is_too_short_to_fill_is_asked_once(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of 0.6 s, started again and again: the second would fill the cache each time, and tell nothing."""
    monkeypatch.setattr(module, "_RESTARTS", 3)
    monkeypatch.setattr(module, "_LEAST_BLOCKS", 1)
    done = search(TRAIN + "train(2, DataLoader(TensorDataset(torch.randn(200, 4)), batch_size=4))",
                  ("sample_cache", "helps"), seconds=100.0)  # fmt: skip
    assert "before its cache is full" in done.out["sample_cache"]
    filling = [number for number, block in enumerate(done.found.blocks) if block.trouble]
    assert filling, "no block was in the pass that fills"
    processes = [number for number, block in enumerate(done.found.blocks) if block.part == "baseline"]
    assert max(filling) < processes[-1]
    assert done.names == {"helps"}


@pytest.mark.slow  # waits until a search's time is out
def test_a_process_whose_time_is_out_is_ended(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner than it would count as hung; nothing is blamed that may have been slow, nor chosen that was never seen."""
    monkeypatch.setattr(module, "_OVERTIME", 1.0)
    done = search(TRAIN + "train(10 ** 6)", ("hangs_in_a_block",), 15.0)
    assert done.ok
    assert (done.out, done.names) == ({}, set())


@pytest.mark.slow  # three processes of a search
def test_two_that_break_are_both_found(search: Search) -> None:
    done = search(TRAIN + "train(10 ** 6)", ("crashes_in_a_block", "helps", "turns_to_nan", "helps_little"), 300.0)
    assert done.ok, done.said
    assert set(done.out) == {"crashes_in_a_block", "turns_to_nan"}
    assert done.names == {"helps", "helps_little"}


# -- scripts -----------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "two loaders in turn": """
other = DataLoader(TensorDataset(torch.randn(100, 4)), batch_size=4)
for _ in range(10 ** 6):
    train(1)
    train(1, other)
""",
    "two loaders at once": """
other = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4)
for _ in range(10 ** 6):
    for (x,), (y,) in zip(loader, other):
        step(x + y)
""",
    "two optimizers": """
second = torch.optim.SGD(model.parameters(), lr=0.001)
for _ in range(10 ** 6):
    for (x,) in loader:
        step(x)
        step(x, second)
""",
    "no loader": "while True: step(torch.randn(4, 4))",
    "another batch size midway": """
for epoch in range(10 ** 6):
    train(1, DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4 if epoch % 2 else 8))
""",
    "validation after each epoch": """
held_out = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
def validate(epoch):
    model.eval()
    with torch.no_grad():
        for (x,) in held_out: model(x)
    model.train()
train(10 ** 6, then=validate)
""",
    "short epochs": "train(10 ** 6, DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4))",
    "workers of its own": """
if __name__ == "__main__":
    train(10 ** 6, DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4, num_workers=1))
""",
    "a loop in a thread": """
import threading
thread = threading.Thread(target=train, args=(10 ** 6,))
thread.start()
thread.join()
""",
}


SLOW_TO_VALIDATE = """
held_out = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
compiled = False
def validate(epoch):
    global compiled
    model.eval()
    with torch.no_grad():
        for (x,) in held_out:
            model(x)
            if not compiled and "compiles" in getattr(torch, "waits", ()):
                wait(0.5)
    compiled = compiled or "compiles" in getattr(torch, "waits", ())
    model.train()
train(10 ** 6, DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4), validate)
"""


def test_a_validation_that_compiles_says_nothing_of_the_technique(search: Search) -> None:
    """Its kernels are compiled once: the first pass of validation takes a hundred times as long, and no other."""
    # Where others have the CPU, compiling is only tried with minutes to spare; it takes none of them here.
    done = search(TRAIN + SLOW_TO_VALIDATE, ("compiles",), seconds=330.0, validation_share=0.4)
    assert done.names == {"compiles"}
    paces = [block.pace for block in done.found.course.validation.blocks if block.on]
    assert paces
    assert max(paces) < math.log(0.1)


@pytest.mark.parametrize("script", [
    # slow: a search each
    pytest.param(text, id=name, marks=() if name == "two optimizers" else pytest.mark.slow)
    for name, text in SCRIPTS.items()
])  # fmt: skip
def test_scripts_of_other_kinds_are_tuned_warm(search: Search, script: str) -> None:
    done = search(TRAIN + script, ("helps", "harms"))
    assert done.ok, done.said
    assert done.names == {"helps"}
    claim = done.found.claim()
    assert claim is not None
    assert 1.4 < claim.ratio < 2.6


ENDS = {
    "it ends at once": "train(1, [(torch.randn(4, 4),)] * 3)",
    "it trains in a process that it forks": """
import os
if os.fork() == 0:
    train(2)
    os._exit(0)
os.wait()
""",
    "it trains in a process that it starts": """
import multiprocessing
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=train, args=(2,))
    process.start()
    process.join()
""",
}


@pytest.mark.parametrize("script", [
    # slow: a search each
    pytest.param(text, id=name, marks=() if "forks" in name else pytest.mark.slow) for name, text in ENDS.items()
])  # fmt: skip
def test_what_cannot_be_tuned_in_one_process_is_known(search: Search, script: str) -> None:
    done = search(TRAIN + script, ("helps", "harms"))
    assert not done.ok
    assert done.out == {}, "nothing is blamed for it"


@pytest.mark.slow  # several processes of a search
def test_a_script_that_counts_its_batches_is_searched_on_in_further_processes(search: Search) -> None:
    """Its epoch has 100 batches and it says so; whole epochs, and another process once it has ended."""
    counts = "for _ in range(3):\n    for i, (x,) in enumerate(loader): step(x)\n    assert i == 99"
    done = search(TRAIN + counts, ("helps", "harms"), seconds=60.0, batches=1000)
    assert done.ok, done.said
    assert done.out == {}
    assert done.names == {"helps"}


def test_our_loader_counts_through_passes_that_are_cut_short(search: Search) -> None:
    """50 batches of 100, and the same again: the script, and its loader's state, see one pass of 100."""
    counts = """
import hasten.data
loader = hasten.data.DataLoader(TensorDataset(torch.randn(400, 4)), 4, shuffle=True, seed=1)
for epoch in range(10 ** 6):
    for number, (x,) in enumerate(loader, 1):
        step(x)
        state = loader.state_dict()
        if (state["epoch"], state["samples"]) != (epoch, 4 * number):
            raise ValueError(f"{state} after batch {number} of epoch {epoch}")
"""
    done = search(TRAIN + counts, ("helps",), 40.0)
    assert done.ok, done.said
    assert not done.out, done.out
    assert done.found.blocks
    assert not any("crashed" in line for line in done.said), done.said
