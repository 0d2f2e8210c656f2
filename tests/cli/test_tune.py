"""`hasten tune` from end to end, on small scripts and with techniques that are planted to help or to harm."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hasten.child import family
from hasten.plan import Plan
from hasten.techniques import CATALOGUE
from hasten.tuner.proof import Answer, Proof
from tests.online import planted
from tests.taps.scripts import HASTEN, Done, ctrl_c_works, environment, execute, write

pytestmark = pytest.mark.timeout(600)  # many processes each, on a machine that others may load

SLOW = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        sum(range(60_000))  # an image that is decoded: what a cache saves, and one can see that nothing else happens
        return torch.full((8,), i / 64), torch.tensor(i % 3)

if __name__ == "__main__":
    epochs = int(sys.argv[sys.argv.index("--epochs") + 1])
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), "last.pt")
        print("epoch", epoch, flush=True)
"""

# Each step waits for as long as the planted techniques say.
WAITS = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(5)
class Net(torch.nn.Linear):
    def forward(self, x):
        time.sleep(max(0.0, sum(getattr(torch, "waits", {"script": 0.012}).values())))
        return super().forward(x)
model = Net(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4, shuffle=True)
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
def train(epochs):
    for epoch in range(epochs):
        for (x,) in loader:
            step(x)
        print("epoch", epoch, flush=True)
"""
REPORT = ["hasten-report.html", "hasten-report.json", "hasten.toml", "train.py"]


class Tuning:
    """A folder in which a script is tuned, with planted techniques.

    Attributes:
        folder: It.
        scratch: What stands for /tmp. Its path is short: workers' sockets lie below it.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder / "work", scratch
        for one in (self.folder, folder / "site"):
            one.mkdir()
        self.env = environment(PYTHONPATH=planted.site(folder / "site"), TMPDIR=str(self.scratch))

    def tune(self, text: str, *options: str, timeout: float = 400) -> Done:
        """Tune to the end."""
        write(self.folder, "train.py", text)
        return execute(*self._command(options), cwd=self.folder, env=self.env, timeout=timeout)

    @contextmanager
    def started(self, text: str, *options: str) -> Iterator[subprocess.Popen[str]]:
        """A tune that goes on; whatever becomes of it, it is ended."""
        write(self.folder, "train.py", text)
        with subprocess.Popen(
            self._command(options), cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, preexec_fn=ctrl_c_works,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def _command(self, options: tuple[str, ...]) -> list[str]:
        return [HASTEN, "tune", "--no-memory", *options, "train.py"]

    def files(self) -> list[str]:
        """What lies in the folder."""
        return sorted(path.name for path in self.folder.iterdir())

    def plan(self) -> Plan:
        """The plan that was written."""
        return Plan.read(self.folder / "hasten.toml")

    def proof(self) -> Proof:
        """The report that was written."""
        return Proof.read(self.folder / "hasten-report.json")

    def page(self) -> str:
        """The page that was written."""
        return (self.folder / "hasten-report.html").read_text()

    def leaves_nothing(self) -> None:
        """No process that has these temporary files, and none of them."""
        end = time.monotonic() + 30
        while self._processes() or list(self.scratch.glob("hasten-*")):
            assert time.monotonic() < end, (self._processes(), list(self.scratch.iterdir()))
            time.sleep(0.1)

    def _processes(self) -> list[int]:
        return family(f"TMPDIR={self.scratch}")


@pytest.fixture
def tuning(tmp_path: Path) -> Iterator[Tuning]:
    """A folder to tune in."""
    with tempfile.TemporaryDirectory(prefix="ht", ignore_cleanup_errors=True) as scratch:
        yield Tuning(tmp_path, Path(scratch))


def only(*names: str) -> list[str]:
    """The options that restrict a tune to these techniques."""
    return [word for name in names for word in ("--only", name)]


def is_consistent(tuning: Tuning, out: str) -> None:
    """Plan, report, page and terminal say the same, and nothing that was not measured."""
    proof, plan = tuning.proof(), tuning.plan()
    assert plan.techniques.keys() <= CATALOGUE.keys() | {"helps"}
    assert {kept.name: kept.setting for kept in proof.techniques} == plan.techniques
    assert proof.speedup.low <= proof.speedup.ratio <= proof.speedup.high
    named = {one.name for one in (*proof.tried, *proof.skipped)}
    unnamed = set(CATALOGUE) - named
    assert all(any(line.startswith(name) for line in proof.would_ask) for name in unnamed), unnamed
    assert all(one.reason for one in proof.skipped)
    if plan.techniques:
        ratio = f"{proof.speedup.ratio:.2f}x"
        assert ratio in out
        assert ratio in tuning.page()
        assert plan.made["speedup"].startswith(ratio)
        assert plan.made["proven"] == str(proof.proven)
        assert plan.made["parity"] == str(proof.parity.answer)
    if "pairs of blocks" in proof.speedup_how:
        claim = [block for block in proof.blocks if block.part == "claim" and not block.trouble]
        on = {tuple(sorted(block.on)) for block in claim}
        assert on == {(), tuple(sorted(plan.techniques))}, "the claim is of the script as it is and of the plan"
        before, after = (sum(proof.phases[side].values()) for side in ("baseline", "plan"))
        assert before / after == pytest.approx(proof.speedup.ratio, rel=0.25)
    if not proof.pairs:
        assert proof.proven is not Answer.HOLDS
        assert proof.parity.answer is Answer.NOT_KNOWN or not plan.techniques


def test_it_finds_what_helps_and_leaves_what_harms(tuning: Tuning) -> None:
    done = tuning.tune(WAITS + "train(1000)", "--budget", "60s", "--seeds", "1", *only("helps", "harms"))
    assert done.code == 0, done.err
    assert tuning.files() == REPORT
    is_consistent(tuning, done.out)
    proof = tuning.proof()
    assert tuning.plan().techniques == {"helps": True}
    assert proof.warm
    assert 1.4 < proof.speedup.ratio < 2.6
    assert proof.command == ("train.py",)
    assert [one.outcome for one in proof.tried] == ["kept", "lost"]
    # Where others load the machine, fewer blocks are clear.
    assert proof.tried[1].reason in ("steps are slower with it here", "no gain was seen, and a loss is not certain")
    assert "Traceback" not in done.err
    assert "<script src" not in tuning.page()
    tuning.leaves_nothing()


@pytest.mark.slow  # a whole tune
def test_twenty_seconds_say_the_best_that_they_can(tuning: Tuning) -> None:
    done = tuning.tune(WAITS + "train(1000)", "--budget", "20s", *only("helps", "harms"))
    if done.code:  # on a machine so busy that the start alone takes longer, that is what is said
        assert "s before it trains" in done.err or "did not come to train" in done.err, done.err
        return
    is_consistent(tuning, done.out)
    assert "too short" not in done.err
    assert tuning.plan().techniques in ({}, {"helps": True})
    proof = tuning.proof()
    assert {one.name for one in proof.tried} <= {"helps", "harms"}
    if proof.blocks:  # the script as it is may take longer alone
        assert proof.used_seconds <= proof.budget_seconds


@pytest.mark.slow  # a whole tune, and a run
def test_tune_and_run(tuning: Tuning) -> None:
    """Samples that are dear to make are kept; `run` works under the plan."""
    names = only("sample_cache", "loader_workers", "batched_fetch", "cpu_threads", "set_to_none")
    write(tuning.folder, "train.py", SLOW)
    done = execute(HASTEN, "tune", "--no-memory", "--budget", "2m", "--seeds", "2", *names,
                   "train.py", "--epochs", "30", cwd=tuning.folder, env=tuning.env, timeout=500)  # fmt: skip
    assert done.code == 0, done.err
    is_consistent(tuning, done.out)
    assert "not done" not in done.err, done.err
    assert {"sample_cache", "loader_workers"} & set(tuning.plan().techniques), done.err
    proof = tuning.proof()
    assert proof.speedup.low > 1.0
    assert proof.command == ("train.py", "--epochs", "30")
    if proof.pairs:  # a busy machine has no time for them
        assert proof.full_run is not None
        assert proof.full_run.epochs == 30
    run = execute(HASTEN, "run", "train.py", "--epochs", "2", cwd=tuning.folder)
    assert (run.code, run.out) == (0, "epoch 0\nepoch 1\n")
    assert (tuning.folder / "last.pt").is_file()


# -- scripts of other kinds --------------------------------------------------------------------------------------------

OTHERS = {
    "it ends at once": ("train(1)", False),
    "it trains in a fork": ("import os\nif os.fork() == 0:\n    train(3)\n    os._exit(0)\nos.wait()", False),
    "it trains in a process": (
        (
            "import multiprocessing\nif __name__ == '__main__':\n"
            "    process = multiprocessing.get_context('fork').Process(target=train, args=(3,))\n"
            "    process.start()\n    process.join()"
        ),
        False,
    ),
    "it counts its batches": (
        "for _ in range(3):\n    for i, (x,) in enumerate(loader):\n        step(x)\n    assert i == 99",
        True,
    ),
    "OneCycleLR counts its steps": (
        (
            "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=300)\n"
            "for _ in range(3):\n    for (x,) in loader:\n        step(x)\n        schedule.step()"
        ),
        True,
    ),
}


@pytest.mark.slow  # a whole tune of each kind
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_scripts_of_other_kinds(tuning: Tuning, other: tuple[str, bool]) -> None:
    """It finds what helps; where it could not in one process, it says what it did instead."""
    text, warm = other
    done = tuning.tune(WAITS + text, "--budget", "100s", "--seeds", "1", *only("helps", "harms"))
    assert done.code == 0, done.err
    is_consistent(tuning, done.out)
    assert tuning.plan().techniques == {"helps": True}, done.err
    proof = tuning.proof()
    assert proof.warm is warm, done.err
    if not warm:
        assert any("a process of its own" in note for note in proof.notes)
        assert "asking in processes of their own" in done.err
    tuning.leaves_nothing()


@pytest.mark.slow  # a whole tune, a process a question
def test_processes_of_their_own_when_asked(tuning: Tuning) -> None:
    done = tuning.tune(
        WAITS + "train(1000)", "--processes", "--budget", "100s", "--seeds", "1", *only("helps", "crashes_in_a_block")
    )
    assert done.code == 0, done.err
    is_consistent(tuning, done.out)
    proof = tuning.proof()
    assert not proof.warm
    assert tuning.plan().techniques == {"helps": True}
    assert any("crashes_in_a_block" in note and "planted: in the middle of it" in note for note in proof.notes)


# -- stopped -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a tune until something is chosen
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_once_something_is_chosen(tuning: Tuning, number: signal.Signals) -> None:
    """The best so far is kept and called not proven; what was not looked at is not known."""
    with tuning.started(WAITS + "train(1000)", "--budget", "5m", *only("helps", "harms")) as process:
        said = until(process, "chosen: helps")
        process.send_signal(number)
        out, rest = process.communicate(timeout=100)
    assert process.returncode == 130, said + rest
    assert "keeping the best so far" in rest
    assert "Traceback" not in rest
    is_consistent(tuning, out)
    proof = tuning.proof()
    assert tuning.plan().techniques == {"helps": True}
    assert any("Ctrl-C" in note for note in proof.notes)
    assert proof.parity.answer is Answer.NOT_KNOWN
    assert proof.proven is Answer.NOT_KNOWN
    for shown in (out, tuning.page()):
        assert "does not hold" not in shown
        assert "not proven" in shown
    tuning.leaves_nothing()


@pytest.mark.slow  # a tune until its later phases
@pytest.mark.parametrize(
    ("line", "names"),
    # Of one technique a busy machine is soon sure, too: then most of the five minutes is left for pairs of processes.
    [("best so far", ("helps", "harms")), ("step by step", ("helps",)), ("fresh processes:", ("helps",))],
)
def test_stopped_in_other_phases(tuning: Tuning, line: str, names: tuple[str, ...]) -> None:
    """In the search, in the check, and between pairs of fresh processes."""
    with tuning.started(WAITS + "train(1000)", "--budget", "5m", *only(*names)) as process:
        said = until(process, line)
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=100)
    assert process.returncode == 130, said + rest
    assert "Traceback" not in rest
    is_consistent(tuning, out)
    assert "does not hold" not in out + tuning.page()
    assert set(tuning.plan().techniques) <= {"helps"}
    tuning.leaves_nothing()


@pytest.mark.slow  # two whole tunes
@pytest.mark.timeout(600)
def test_the_next_tune_goes_on_from_what_the_last_one_learned(tuning: Tuning) -> None:
    write(tuning.folder, "train.py", WAITS + "train(1000)")

    def tune(*options: str) -> Done:
        command = [HASTEN, "tune", "--seeds", "1", *only("helps", "harms"), *options, "train.py"]
        return execute(*command, cwd=tuning.folder, env=tuning.env, timeout=280)

    first = tune("--budget", "90s")
    assert first.code == 0, first.err
    (kept,) = (tuning.folder / ".hasten").iterdir()
    before = kept.read_text()
    assert str(tuning.folder) not in before
    again = tune("--budget", "60s")
    assert again.code == 0, again.err
    assert f"learned (.hasten/{kept.name})" in again.err
    assert tuning.plan().techniques == {"helps": True}
    assert any(kept.name in note for note in tuning.proof().notes)
    assert kept.read_text() != before
    write(tuning.folder, "train.py", WAITS + "train(1001)")
    changed = tune("--budget", "60s")
    assert "train.py changed: " in changed.err


@pytest.mark.slow  # a tune until it trains
@pytest.mark.timeout(300)
def test_killed_it_leaves_nothing_behind(tuning: Tuning) -> None:
    with tuning.started(WAITS + "train(1000)", "--budget", "5m", *only("helps", "harms")) as process:
        until(process, "best so far")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        tuning.leaves_nothing()
    assert tuning.files() == ["train.py"]


def test_ctrl_c_before_there_is_anything_to_keep(tuning: Tuning) -> None:
    """One line, no traceback, nothing written, and the exit code of Ctrl-C."""
    with tuning.started("import time\nprint('waiting', flush=True)\ntime.sleep(600)") as process:
        until(process, "running the script as it is")
        process.send_signal(signal.SIGINT)
        _out, rest = process.communicate(timeout=100)
    assert process.returncode not in (0, None)
    assert "Traceback" not in rest
    assert tuning.files() == ["train.py"]
    tuning.leaves_nothing()


def until(process: subprocess.Popen[str], words: str) -> str:
    """What it says until it says this."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return "".join(said)
    raise AssertionError("".join(said))
