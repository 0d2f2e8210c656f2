"""Real scripts that do not fit a limit, and train within it under the plan that the ladder finds."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hasten import Plan
from hasten.batch.attempt import Attempts
from hasten.memory_search.limit import limit_in_force, limit_of
from tests.taps.forked_pythons import forked_pythons
from tests.taps.scripts import HASTEN, Done, environment, execute, write

MB = 10**6

# Most of its memory are activations: 6 blocks of 2 x 38 MB, beside weights of 13 kB. Blocks of this size go back to
# the kernel when they are freed, so peaks do not depend on what the C library keeps.
DEEP = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            self.head = nn.Linear(16, 1)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = 589824
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loader = DataLoader([torch.randn(rows, 8)], batch_size=None)
    for epoch in range(4):
        for x in loader:
            loss = model(x.repeat(1, 2)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.9f}")
    torch.save(model.state_dict(), "model.pt")
"""

# Most of its memory are weights, gradients and the optimizer's state: 32 matrices of 4 MB.
WIDE = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = [part for _ in range(32) for part in (nn.Linear(1024, 1024), nn.Tanh())]
    model = nn.Sequential(*parts, nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for epoch in range(2):
        for (x,) in DataLoader(TensorDataset(torch.randn(48, 1024)), 8):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.9f}")
    torch.save(model.state_dict(), "model.pt")
"""


# Blocks of two widths: a wide one holds four times as much as a narrow one.
UNEVEN = DEEP.replace("Block() for _ in range(6)", "Block(kind) for kind in (16, 64, 16, 64, 16, 64)").replace(
    """        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
""",
    """        def __init__(self, wide):
            super().__init__()
            self.up, self.down = nn.Linear(16, wide), nn.Linear(wide, 16)
""",
)


def limited(data: int, *command: str, cwd: Path, timeout: float = 300) -> Done:
    """What a command does under `ulimit -d`."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))

    ended = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, preexec_fn=lower
    )
    return Done(ended.returncode, ended.stdout, ended.stderr)


def weights(folder: Path) -> bytes:
    return (folder / "model.pt").read_bytes()


def test_an_attempt_sets_its_own_bounds_and_an_allocation_beyond_them_is_its_result(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    path = write(tmp_path, "train.py", DEEP)
    bounds = {"RLIMIT_DATA": 780 * MB}
    attempts = Attempts([sys.executable, str(path)], ("train.py",), tmp_path / "scratch", 8 << 30, bounds=bounds)
    plain = attempts.run()
    assert plain.outcome == "out of memory"
    assert "can't allocate memory" in plain.reason
    under = attempts.run(plan={"activation_checkpointing": 6})
    assert under.outcome == "ok", under.reason
    assert under.evidence is not None
    assert under.evidence.installed["activation_checkpointing"] == "6 x block"
    assert [one.path for one in under.blocks] == [f"blocks.{place}" for place in range(6)]
    assert {one.bytes for one in under.blocks} == {589824 * 16 * 4}  # what tanh returns; the rest are inputs
    assert all(one.seconds > 0 for one in under.blocks)
    assert plain.blocks == ()


SWALLOWS = """
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.utils.data.DataLoader(torch.randn(400, 64), batch_size=10):
        try:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except Exception:
            continue
"""


def test_a_technique_whose_steps_fail_in_a_script_that_swallows_it_is_a_failed_attempt(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    path = write(tmp_path, "train.py", SWALLOWS)
    attempts = Attempts([sys.executable, str(path)], ("train.py",), tmp_path / "scratch", 8 << 30)
    with forked_pythons():  # no memory is measured
        under = attempts.run(plan={"optimizer_in_backward": True})
    assert under.outcome == "failed"
    assert under.reason.startswith("hasten: optimizer_in_backward: the script looks at a gradient")


def test_the_limit_that_stands_is_the_least_of_machine_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_in_force(on_gpu=False).bounds == {}
    kinds = {resource.RLIMIT_AS: 3 << 30, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (kinds[kind], resource.RLIM_INFINITY))
    found = limit_in_force(on_gpu=False)
    assert found.bounds == {"RLIMIT_AS": round(0.95 * (3 << 30))}
    assert "ulimit -v" in found.words
    assert limit_of(1000, on_gpu=True).bounds == {"gpu": 950}
    assert limit_of(1000, on_gpu=False).room == 950


@pytest.mark.slow  # about ten trials, each a process that imports torch
@pytest.mark.timeout(600)
def test_a_script_that_runs_out_of_memory_trains_under_the_plan_that_tune_finds_by_itself(tmp_path: Path) -> None:
    write(tmp_path, "train.py", DEEP)
    plain = execute(sys.executable, "train.py", cwd=tmp_path)
    assert plain.code == 0, plain.err
    reference = weights(tmp_path)
    (tmp_path / "model.pt").unlink()
    data = 880 * MB
    assert "can't allocate memory" in limited(data, sys.executable, "train.py", cwd=tmp_path).err
    tuned = limited(
        data, HASTEN, "tune", "--budget", "4m", "--only", "activation_checkpointing", "train.py", cwd=tmp_path
    )
    assert tuned.code == 0, tuned.err
    assert "looking for a plan under which it fits" in tuned.err
    assert "Not checked here" in tuned.out
    plan = Plan.read(tmp_path / "hasten.toml").techniques
    assert set(plan) == {"activation_checkpointing"}
    ran = limited(data, HASTEN, "run", "train.py", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.out == plain.out
    assert weights(tmp_path) == reference


@pytest.mark.slow  # about eight trials, each a process that imports torch
@pytest.mark.timeout(600)
def test_of_uneven_blocks_those_are_computed_again_that_the_knapsack_names(tmp_path: Path) -> None:
    write(tmp_path, "train.py", UNEVEN)
    plain = execute(sys.executable, "train.py", cwd=tmp_path)
    assert plain.code == 0, plain.err
    reference = weights(tmp_path)
    line = ["--budget", "4m", "--only", "activation_checkpointing", "train.py"]
    ran = execute(HASTEN, "tune", "--memory", "8GiB", *line, cwd=tmp_path, timeout=300)
    assert "as it is" in ran.out
    whole = json.loads((tmp_path / "hasten-memory.json").read_text())["peak_bytes"]
    line = ["--memory", str(int((whole - 283 * MB) / 0.95)), *line]
    ran = execute(HASTEN, "tune", *line, cwd=tmp_path, timeout=300)
    assert ran.code == 0, ran.err
    figures = json.loads((tmp_path / "hasten-memory.json").read_text())
    assert figures["peak_bytes"] <= whole - 283 * MB
    named = Plan.read(tmp_path / "hasten.toml").techniques["activation_checkpointing"]
    # A wide one holds 151 MB, a narrow one 38: all three narrow ones and a wide one are 264, and the last is free.
    assert named == "blocks.1,blocks.3", ran.out
    again = execute(HASTEN, "run", "train.py", cwd=tmp_path)
    assert (again.out, weights(tmp_path)) == (plain.out, reference), again.err


@pytest.mark.slow  # about eight trials, each a process that imports torch
@pytest.mark.timeout(600)
def test_a_limit_that_is_named_gets_the_optimizer_in_the_backward_and_the_same_bits(tmp_path: Path) -> None:
    write(tmp_path, "train.py", WIDE)
    plain = execute(sys.executable, "train.py", cwd=tmp_path)
    reference = weights(tmp_path)
    ran = execute(HASTEN, "tune", "--memory", "8GiB", "train.py", cwd=tmp_path, timeout=300)
    assert "fits into 8.59 GB as it is" in ran.out
    whole = json.loads((tmp_path / "hasten-memory.json").read_text())["peak_bytes"]
    line = ["--memory", str(int((whole - 60 * MB) / 0.95)), "--budget", "4m", "--only", "optimizer_in_backward"]
    ran = execute(HASTEN, "tune", *line, "train.py", cwd=tmp_path, timeout=300)
    assert ran.code == 0, ran.err
    assert Plan.read(tmp_path / "hasten.toml").techniques == {"optimizer_in_backward": True}
    figures = json.loads((tmp_path / "hasten-memory.json").read_text())
    assert figures["peak_bytes"] <= whole - 60 * MB
    again = execute(HASTEN, "run", "train.py", cwd=tmp_path)
    assert (again.out, weights(tmp_path)) == (plain.out, reference), again.err
