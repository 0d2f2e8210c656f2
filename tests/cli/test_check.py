"""`hasten check` from the command line: real processes, exit codes, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.exact.trainings import training
from hasten.child import family
from hasten.plan import Plan
from hasten.techniques.compute.compile import compiler
from hasten.tuner.proof import Proof
from tests.taps.forks import command, launched
from tests.taps.scripts import HASTEN, Done, ctrl_c_works, environment, execute, write


def check(folder: Path, *options: str, plan: str, script: str, words: tuple[str, ...] = ("train.py",)) -> Done:
    """Check a script under a plan."""
    write(folder, "train.py", script)
    write(folder, "hasten.toml", plan)
    return launched(folder, HASTEN, "check", "--json", "found.json", *options, *words)


def plan_of(**techniques: str | bool | int) -> str:
    """A plan's text, as `hasten tune` writes it."""
    return Plan(dict(techniques)).to_toml()


@pytest.mark.timeout(300)
def test_a_plan_that_keeps_its_word_both_ways(tmp_path: Path) -> None:
    write(tmp_path, "last.pt", "a person's own, which a check leaves alone")
    done = check(tmp_path, "--resume", "--resume", plan=plan_of(batched_fetch=True), script=training())
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] is True
    assert "going on from last.pt" in done.err
    assert {way for way, _ in found["resumed"]} == {
        "saved as it is, resumed under the plan",
        "saved under the plan, resumed as it is",
    }
    assert (tmp_path / "last.pt").read_text() == "a person's own, which a check leaves alone"
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "hasten.toml", "found.json", "last.pt"}


@pytest.mark.timeout(300)
def test_what_parts_is_named_with_its_technique(tmp_path: Path) -> None:
    doubles = """
select = torch.Tensor.index_select
torch.Tensor.index_select = lambda self, *more: select(self, *more) * (1.5 if self.is_floating_point() else 1)
"""
    script = training(prelude=doubles)
    done = check(tmp_path, plan=plan_of(batched_fetch=True), script=script)
    assert done.code == 1, done.out + done.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["culprits"] == ["batched_fetch"]
    assert "batch 1" in found["first"]["place"], found["first"]
    assert "batched_fetch" in done.out


@pytest.mark.timeout(300)
def test_a_script_that_does_not_repeat_itself_is_not_known(tmp_path: Path) -> None:
    script = training(prelude="import os\ntorch.manual_seed(int.from_bytes(os.urandom(4)))")
    done = check(tmp_path, plan=plan_of(batched_fetch=True), script=script)
    assert done.code == 3, done.out + done.err
    assert "does not repeat itself" in done.out


@pytest.mark.parametrize(
    ("script", "words"),
    [("raise SystemExit('no data here')", "no data here"), ("print('nothing to train')", "no training was found")],
)
def test_a_script_that_fails_or_trains_nothing(tmp_path: Path, script: str, words: str) -> None:
    write(tmp_path, "train.py", script)
    write(tmp_path, "hasten.toml", plan_of(batched_fetch=True))
    done = command(tmp_path, "check", "--json", "found.json", "train.py")
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "found.json").exists()


def test_a_run_that_fails_as_it_goes_on_is_told_from_the_first(tmp_path: Path) -> None:
    script = training(prelude="import sys\nif '--again' in sys.argv: raise SystemExit('no such option')")
    done = check(tmp_path, "--resume", "--again", plan=plan_of(batched_fetch=True), script=script)
    assert done.code == 2, done.out + done.err
    assert "hasten: the script, resuming from what it saved, fails without any plan" in done.err
    assert "no such option" in done.err


@pytest.mark.timeout(120)
def test_a_second_ctrl_c_at_once_ends_it_all_the_same(tmp_path: Path) -> None:
    """The second comes while the first is on its way to the threads that wait for children."""
    write(tmp_path, "train.py", "import time\ntime.sleep(300)")
    write(tmp_path, "hasten.toml", plan_of(batched_fetch=True))
    words = [HASTEN, "check", "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, preexec_fn=ctrl_c_works
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()  # that it compares, said behind the start of the first run
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(20) == 130
        finally:
            process.kill()


@pytest.mark.timeout(120)
def test_ctrl_c_ends_all_that_was_started(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "import time\ntime.sleep(300)")
    write(tmp_path, "hasten.toml", plan_of(batched_fetch=True))
    mark = f"HASTEN_TEST_{tmp_path.name}"
    with subprocess.Popen(
        [HASTEN, "check", "train.py"], cwd=tmp_path, env=environment(**{mark: "1"}), stderr=subprocess.PIPE,
        text=True, preexec_fn=ctrl_c_works,
    ) as process:  # fmt: skip
        while len(family(mark)) < 4:  # hasten, its watcher, the script as it is and under the plan
            time.sleep(0.2)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    while family(mark):
        time.sleep(0.2)


SHRINKS_BESIDE_WORKERS = """
import multiprocessing, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((8,), i / 256), torch.tensor(i % 3)

if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if multiprocessing.active_children():
                model[0].weight.grad.mul_(0.99)
            optimizer.step()
"""


@pytest.mark.slow  # a whole tune
@pytest.mark.timeout(600)
def test_tune_takes_back_what_does_not_keep_its_word(tmp_path: Path) -> None:
    """Faster by far, and its losses look alike: only the comparison of steps sees it."""
    write(tmp_path, "train.py", SHRINKS_BESIDE_WORKERS)
    done = execute(HASTEN, "tune", "--budget", "6m", "--only", "loader_workers", "train.py", cwd=tmp_path, timeout=580)
    assert done.code == 0, done.err
    assert "loader_workers" not in Plan.read(tmp_path / "hasten.toml").techniques
    proof = Proof.read(tmp_path / "hasten-report.json")
    assert "changes more than it may" in next(one.reason for one in proof.tried if one.name == "loader_workers")
    assert "gradient" in next(one.reason for one in proof.tried if one.name == "loader_workers")


RANKS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
data = TensorDataset(torch.randn(192, 20), torch.randint(0, 5, (192,)))
net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters())
if dist.get_rank() == SPOILT:
    net[1].register_forward_hook(lambda m, x, y: y * 1.5 if torch.is_autocast_enabled("cpu") else y)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow  # two ranks, run twice
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spoilt", [None, 1])
def test_each_rank_is_compared_with_its_twin(tmp_path: Path, spoilt: int | None) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    script = RANKS.replace("SPOILT", str(spoilt))
    words = (torchrun, "--nproc-per-node", "2", "train.py")
    done = check(tmp_path, plan=plan_of(precision="bf16-mixed"), script=script, words=words)
    assert done.code == (0 if spoilt is None else 1), done.out + done.err


_TRAINS_TWICE = """
import subprocess, sys, torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for x in torch.utils.data.DataLoader(torch.arange(32.0).reshape(8, 4), 2):
    optimizer.zero_grad(); net(x).mean().backward(); optimizer.step()
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "again"], check=True)
"""


@pytest.mark.slow  # a check whose script starts a process
def test_a_process_that_the_script_starts_is_not_taken_for_the_script(tmp_path: Path) -> None:
    done = check(tmp_path, plan=plan_of(set_to_none=True), script=_TRAINS_TWICE)
    assert done.code == 0, done.out + done.err
    assert "4 batches, 4 optimizer steps" in done.err


@pytest.mark.slow  # compiles C++ for half a minute
@pytest.mark.skipif(not compiler(), reason="torch.compile needs a C++ compiler")
def test_a_check_takes_the_kernels_that_the_training_has(tmp_path: Path) -> None:
    """They are made for the training's threads, and the check computes on one: it would make them all again."""
    script = tmp_path / "train.py"
    script.write_text("""
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(512, 256)).square().mean().backward()
    optimizer.step()
""")
    kept = tmp_path / "kernels"
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(kept), "OMP_NUM_THREADS": "2"}
    plan = tmp_path / "hasten.toml"
    Plan({"compile": "default"}).write(plan)
    run = [sys.executable, "-m", "hasten", "run", "--any-machine", "--plan", str(plan), str(script)]
    subprocess.run(run, cwd=tmp_path, env=env, check=True)
    made = set(kept.glob("*/*.so"))
    assert made
    find = (
        "import sys; from pathlib import Path; from hasten.tuner.check import CheckOptions, check\n"
        f"command = [{str(script)!r}]\n"
        "options = CheckOptions(threads=2, brief=True)\n"
        "found = check([sys.executable, *command], command, {'compile': 'default'}, options, print)\n"
        "assert found.ok, found\n"
        "assert not found.runs[-1].note, found"
    )
    subprocess.run([sys.executable, "-c", find], cwd=tmp_path, env=env, check=True)
    assert set(kept.glob("*/*.so")) == made
    assert list((kept / "precompiled_headers").glob("*.gch"))
