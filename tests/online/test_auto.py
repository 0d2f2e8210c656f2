"""Real runs that are tuned while they go on: what helps stays on, what harms does not, and nothing is put at risk."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hasten.online.options import AutoOptions
from hasten.online.switches import read_schedule
from hasten.plan import Plan
from hasten.taps.config import RunConfig, environment
from tests.online.neighbours import neighbours
from tests.taps.forks import forked, launched
from tests.taps.scripts import HASTEN, PYTHON, Done
from tests.taps.scripts import environment as bare

# A step sleeps, for as long as the techniques that are on have it; nothing else is in the catalogue. `plants.py` in the
# tests here: a fork has torch already, so that its session looks into the catalogue before the script's first line.
PLANTED = """
import os, time
from hasten.techniques import CATALOGUE
from hasten.techniques.base import Choices, Effect, Liveness, Resource, Technique
CATALOGUE.clear()
changes = {}
def planted(name, change, liveness=Liveness.STEP):
    class Planted(Technique):
        effect, relieves = Effect.ROUNDING, Resource.COMPUTE
        @classmethod
        def settings(cls, evidence):
            return Choices((True,), "planted")
        def on(self):
            super().on()
            changes[name] = change
        def off(self):
            super().off()
            changes.pop(name, None)
    Planted.name, Planted.liveness = name, liveness
    CATALOGUE[name] = Planted
"""
TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
class Model(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02 + sum(change for change in changes.values() if isinstance(change, float)))
        return super().forward(x)
model = Model(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(BATCHES * 4, 4)), batch_size=4)
until = time.monotonic() + 60
left = STEPS
while left:
    for (x,) in loader:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if "spoils" in changes:
            loss = changes["spoils"](loss)
        loss.backward()
        optimizer.step()
        if os.path.exists("hasten-auto.toml") == SETTLES or time.monotonic() > until:
            left -= 1
            if not left:
                break
print("on at the end:", sorted(changes))
"""


def script(
    folder: Path, *planted: str, steps: int = 20, settles: bool = True, batches: int = 50, first: str = ""
) -> None:
    """Write a training with these techniques in the catalogue; it ends so many steps after the plan is there."""
    train = TRAIN.replace("STEPS", str(steps)).replace("SETTLES", str(settles)).replace("BATCHES", str(batches))
    (folder / "plants.py").write_text("\n".join([PLANTED, *planted]))
    (folder / "train.py").write_text("\n".join(["from plants import changes, os, time", first, train]))


def options(folder: Path, seconds: float = 8.0, epochs: int | None = None) -> AutoOptions:
    """A search that takes seconds, not a minute."""
    plan, schedule = folder / "hasten-auto.toml", folder / "hasten-auto.schedule"
    return AutoOptions(str(plan), str(schedule), epochs, plan_shown_as=plan.name, most_seconds=seconds)


def tuned(folder: Path, seconds: float = 8.0, epochs: int | None = None, **variables: str) -> Done:
    """Run the script as `hasten run --auto` does, with these environment variables too."""
    config = RunConfig(command=("train.py",), auto=options(folder, seconds, epochs))
    return forked(folder, "train.py", config=config, before=f"import os, plants; os.environ.update({variables})")


def schedule(folder: Path) -> list[set[str]]:
    """What was on after each switch; this process does not know the planted techniques, so that JSON is read."""
    lines = (folder / "hasten-auto.schedule").read_text().splitlines()
    return [set(json.loads(line)["on"]) for line in lines[1:]]


def test_what_helps_stays_on_and_what_harms_does_not(tmp_path: Path) -> None:
    script(tmp_path, "planted('helps', -0.015)", "planted('harms', 0.03)")
    done = tuned(tmp_path)
    assert (done.code, done.out) == (0, "on at the end: ['helps']\n"), done.err
    assert re.search(r"settled after \d+ steps: helps = true: \d.\d\dx as fast", done.err)
    plan = Plan.read(tmp_path / "hasten-auto.toml")
    assert plan.techniques == {"helps": True}
    assert plan.made["proven"] == "no"
    switched = schedule(tmp_path)
    assert {"helps", "harms"} in switched
    assert switched[-1] == {"helps"}


def test_beside_busy_neighbours_the_figure_says_so(tmp_path: Path) -> None:
    script(tmp_path, "planted('helps', -0.015)")
    with neighbours(tmp_path / "busy"):
        done = tuned(tmp_path, 4.0)
    assert done.code == 0, done.err
    assert "x as fast as without while others took much of the CPU; the plan is in" in done.err
    assert Plan.read(tmp_path / "hasten-auto.toml").made["speedup"].endswith("x while others took much of the CPU")


def test_where_nothing_helps_everything_is_off_again(tmp_path: Path) -> None:
    script(tmp_path, "planted('harms', 0.03)")
    done = tuned(tmp_path)
    assert (done.code, done.out) == (0, "on at the end: []\n"), done.err
    assert "nothing helps here" in done.err
    assert Plan.read(tmp_path / "hasten-auto.toml").techniques == {}
    assert schedule(tmp_path)[-1] == set()


def test_what_comes_with_a_pass_is_measured_in_the_first_that_begins(tmp_path: Path) -> None:
    """The first pass outlasts the search."""
    script(tmp_path, "planted('helps', -0.015, Liveness.PASS)", steps=350, batches=250)
    done = tuned(tmp_path, 1.0)
    assert (done.code, done.out) == (0, "on at the end: ['helps']\n"), done.err
    assert "nothing helps here" in done.err
    assert re.search(r"changed its mind after \d+ steps: helps = true", done.err)
    assert Plan.read(tmp_path / "hasten-auto.toml").techniques == {"helps": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lambda loss: loss * float('nan')", "the loss turned to NaN or infinity"),
        ("lambda loss: loss + 1000", "the loss rose to 10"),
    ],
)
def test_what_spoils_the_loss_is_off_for_good(tmp_path: Path, change: str, said: str) -> None:
    script(tmp_path, "planted('helps', -0.015)", f"planted('spoils', {change})", steps=80, settles=False)
    done = tuned(tmp_path)
    assert (done.code, done.out) == (0, "on at the end: []\n"), done.err
    assert "everything is switched off, and the training continues unchanged: " + said in done.err
    assert not (tmp_path / "hasten-auto.toml").exists()
    assert "spoils" in schedule(tmp_path)[0]
    assert schedule(tmp_path)[-1] == set()


COMPILES = "planted('compiles', {change}, Liveness.LAST)"
LONG = 10_000  # epochs of 50 steps of 10 ms: long enough for compiling to pay, however busy the machine


def test_compiling_comes_last_and_stays_if_it_helps(tmp_path: Path) -> None:
    script(tmp_path, "planted('helps', -0.01)", COMPILES.format(change=-0.006), steps=400)
    done = tuned(tmp_path, 4.0, LONG)
    assert (done.code, done.out) == (0, "on at the end: ['compiles', 'helps']\n"), done.err
    assert re.search(r"settled after \d+ steps: helps = true: ", done.err)
    assert re.search(
        r"changed its mind after \d+ steps: (helps = true, compiles|compiles = true, helps) = true", done.err
    )
    assert Plan.read(tmp_path / "hasten-auto.toml").techniques == {"helps": True, "compiles": True}
    first = next(place for place, on in enumerate(schedule(tmp_path)) if "compiles" in on)
    assert {"helps"} in schedule(tmp_path)[:first]  # the search was over
    assert {"compiles"} not in schedule(tmp_path)


def test_compiling_that_makes_steps_slower_is_off_again(tmp_path: Path) -> None:
    script(tmp_path, "planted('helps', -0.01)", COMPILES.format(change=0.006), steps=400)
    done = tuned(tmp_path, 4.0, LONG)
    assert (done.code, done.out) == (0, "on at the end: ['helps']\n"), done.err
    assert {"compiles", "helps"} in schedule(tmp_path)
    assert Plan.read(tmp_path / "hasten-auto.toml").techniques == {"helps": True}


@pytest.mark.parametrize("epochs", [None, 80])
def test_nothing_is_compiled_where_it_may_not_pay(tmp_path: Path, epochs: int | None) -> None:
    """The training's length is not known, or it is over in a minute or so."""
    script(tmp_path, "planted('helps', -0.012)", COMPILES.format(change=-0.006), steps=100)
    done = tuned(tmp_path, 8.0, epochs)
    assert (done.code, done.out) == (0, "on at the end: ['helps']\n"), done.err
    assert not any("compiles" in on for on in schedule(tmp_path))


def test_a_technique_that_fails_is_left_out(tmp_path: Path) -> None:
    broken = "planted('breaks', 1.0)\nCATALOGUE['breaks'].on = lambda self: 1 / 0"
    script(tmp_path, "planted('helps', -0.015)", broken)
    done = tuned(tmp_path)
    assert (done.code, done.out) == (0, "on at the end: ['helps']\n"), done.err
    assert Plan.read(tmp_path / "hasten-auto.toml").techniques == {"helps": True}


# Another training, in a thread: what is switched between two steps of one would come within a step of the other.
BESIDE = """
import threading, torch
stepped = threading.Event()
def beside():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(6, 2), batch_size=3)
    while True:
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            stepped.set()
            time.sleep(0.02)
threading.Thread(target=beside, daemon=True).start()
assert stepped.wait(60)
"""
# A thread draws the batches, a few ahead: where it begins a step, another one is half done.
AHEAD = """
import queue, threading, torch.utils.data
Plain = torch.utils.data.DataLoader
class Ahead:
    def __init__(self, *args, **named):
        self.loader = Plain(*args, **named)
    def __iter__(self):
        drawn = queue.Queue(2)
        def draw():
            for batch in self.loader:
                drawn.put(batch)
            drawn.put(None)
        threading.Thread(target=draw, daemon=True).start()
        return iter(drawn.get, None)
torch.utils.data.DataLoader = Ahead
"""
ALONE = {
    "deterministic": (
        "import torch; torch.use_deterministic_algorithms(True)",
        {},
        "the script asks for deterministic algorithms",
    ),
    "threads": (BESIDE, {}, "its steps are the work of several threads"),
    "threads that draw": (AHEAD, {}, "its steps are the work of several threads"),
    "ranks": ("", {"WORLD_SIZE": "2", "RANK": "0"}, "it trains in 2 processes"),
}


@pytest.mark.parametrize("why", ALONE)
def test_a_run_that_is_left_alone_is_not_touched(tmp_path: Path, why: str) -> None:
    first, variables, said = ALONE[why]
    script(tmp_path, "planted('helps', -0.015)", steps=30, settles=False, first=first)
    done = tuned(tmp_path, **variables)
    assert (done.code, done.out) == (0, "on at the end: []\n"), done.err
    assert f"hasten: auto: the run is left alone: {said}" in " ".join(done.err.split()), done.err
    assert done.err.count("hasten:") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"plants.py", "train.py"}


def test_a_short_training_is_left_alone(tmp_path: Path) -> None:
    script(tmp_path, "planted('helps', -0.015)", steps=30, settles=False)
    done = tuned(tmp_path, epochs=3)
    assert re.search(r"left alone: only \d s of training are left", done.err), done.err
    assert {path.name for path in tmp_path.iterdir()} == {"plants.py", "train.py"}


def test_a_killed_run_leaves_whole_files(tmp_path: Path) -> None:
    script(tmp_path, "planted('helps', -0.015)", steps=3000)
    config = RunConfig(command=("train.py",), auto=options(tmp_path, 3.0))
    env = environment(config, bare())
    with subprocess.Popen([PYTHON, "train.py"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "hasten-auto.toml").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert {"helps"} in schedule(tmp_path)
    Plan.read(tmp_path / "hasten-auto.toml")
    written = {path.name for path in tmp_path.iterdir()} - {"plants.py", "train.py"}
    assert written == {"hasten-auto.schedule", "hasten-auto.toml"}


# The catalogue as it is installed, without what tests of `check` plant in it.
AS_IT_COMES = """
from hasten.techniques import CATALOGUE
from tests.check import planted
for technique in planted.TECHNIQUES:
    del CATALOGUE[technique.name]
"""

# Techniques of the catalogue that round otherwise, at one thread.
ROUNDS = """
import hashlib, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(576, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
data = TensorDataset(torch.randn(320, 3, 8, 8), torch.randint(0, 5, (320,)))
for epoch in range(60):
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
torch.save(model.state_dict(), sys.argv[1])
"""


def test_a_replay_gives_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ROUNDS)
    config = RunConfig(command=("train.py",), auto=options(tmp_path, 1.5))
    auto = forked(tmp_path, "train.py", "auto.pt", config=config, before=AS_IT_COMES)
    again = launched(tmp_path, HASTEN, "run", "--replay", "hasten-auto.schedule", "train.py", "a.pt")
    assert (auto.code, again.code, again.err) == (0, 0, ""), (auto.err, again.err)
    switched = read_schedule(tmp_path / "hasten-auto.schedule")
    assert len(switched) >= 2, "how many a second and a half holds is the machine's"
    assert any(one.passes for one in switched)
    assert again.out == auto.out
    assert forked(tmp_path, "train.py", "plain.pt").out != auto.out


def test_a_replay_switches_beyond_the_steps_that_are_kept(tmp_path: Path) -> None:
    """Of a run that rests, 1,024 steps are kept; one that is repeated counts them all."""
    (tmp_path / "train.py").write_text(COUNTS)
    lines = [
        {"step": step, "passes": step // 7, "on": on} for step, on in ((3, ON), (1100, {}), (1500, ON), (2099, {}))
    ]
    head = {"schema": "hasten-schedule/1", "command": ["train.py"]}
    (tmp_path / "s.schedule").write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    config = RunConfig(command=("train.py",), auto=AutoOptions("", str(tmp_path / "s.schedule"), replay=True))
    done = forked(tmp_path, "train.py", config=config)
    assert (done.code, done.err) == (0, ""), done.err
    assert json.loads(done.out) == [3, 1100, 1500, 2099]


ON = {"matmul_precision": "medium"}
COUNTS = """
import json
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(7, 2)), batch_size=1)
step, before, switched = 0, "highest", []
for epoch in range(301):
    for (x,) in loader:
        if (now := torch.get_float32_matmul_precision()) != before:
            switched.append(step)
            before = now
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        step += 1
print(json.dumps(switched))
"""


# Goes on from what it saved itself, and saves as it ends.
RESUMES = ROUNDS.replace("for epoch in range(25):", """
import os
start = 0
if os.path.exists(sys.argv[1]):
    saved = torch.load(sys.argv[1])
    start = saved["epoch"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
for epoch in range(start, start + int(sys.argv[2])):""").replace(
    "torch.save(model.state_dict(), sys.argv[1])",
    """saved = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save({**saved, "random": torch.get_rng_state()}, sys.argv[1])""",
)  # fmt: skip


def test_a_run_that_goes_on_from_its_own_checkpoint_can_be_repeated(tmp_path: Path) -> None:
    """The checkpoint is plain: it holds nothing of what was on, and each run has a schedule of its own."""
    (tmp_path / "train.py").write_text(RESUMES)
    first = resumed(tmp_path, "first", "a.pt")
    shutil.copy(tmp_path / "a.pt", tmp_path / "again.pt")
    second = resumed(tmp_path, "second", "a.pt")
    again = resumed(tmp_path, "second", "again.pt", replay=True)
    assert [done.code for done in (first, second, again)] == [0, 0, 0], (first.err, second.err, again.err)
    assert read_schedule(tmp_path / "second.schedule")
    assert again.out == second.out != first.out


def resumed(folder: Path, name: str, checkpoint: str, replay: bool = False) -> Done:
    """Train 40 epochs on, from the checkpoint if there is one: long enough to switch on a crowded machine too."""
    plan, schedule = folder / f"{name}.toml", folder / f"{name}.schedule"
    auto = AutoOptions(str(plan), str(schedule), most_seconds=4.0, replay=replay)
    config = RunConfig(command=("train.py",), auto=auto)
    return forked(folder, "train.py", checkpoint, "40", config=config, before=AS_IT_COMES)
