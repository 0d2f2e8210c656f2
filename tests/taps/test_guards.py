"""What must not happen to a person's training, files and devices, whatever the plan says."""

from __future__ import annotations

import os
import random
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from hasten.taps.config import RunConfig, TrialOptions
from hasten.taps.config import environment as trial_environment
from hasten.techniques.data.probe import probe
from tests.taps.forks import command, forked, listened_in_fork
from tests.taps.scripts import HASTEN, PYTHON, environment, execute, listened, write


class RarelyFlipped(Dataset[torch.Tensor]):
    """Augments one sample in twenty, by Python's or torch's random numbers."""

    def __init__(self, by_torch: bool) -> None:
        self.by_torch = by_torch

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = float(torch.rand(())) if self.by_torch else random.random()
        return torch.full((4,), -1.0 if drawn < 0.05 else 1.0) * index


def test_a_rare_augmentation_is_not_taken_for_repeatable() -> None:
    for by_torch in (False, True):
        assert probe(DataLoader(RarelyFlipped(by_torch))).repeatable is False


TWO_PHASES = """
    import torch
    torch.manual_seed(0)
    backbone, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    x = torch.randn(16, 4)
    def step():
        loss = head(backbone(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for _ in range(5):
        step()
    backbone.eval()  # as for a frozen BatchNorm: the backbone goes on training
    before = backbone.weight.detach().clone()
    for _ in range(5):
        step()
    print("moved", bool((backbone.weight - before).abs().max() > 1e-3))
"""


def test_a_model_that_goes_on_training_in_eval_mode_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TWO_PHASES)
    done = forked(tmp_path, "train.py", config=RunConfig({"no_grad_validation": True}, command=("train.py",)))
    assert (done.code, done.out) == (0, "moved True\n"), done.err
    assert "does not act from here on: Linear: a backward goes through it in eval mode" in done.err


COLLECTS = """
    import gc, sys
    gc.disable()
    import torch
    print("enabled", gc.isenabled(), "torch is frozen", gc.get_freeze_count() > 50_000)
    gc.enable()
    class Cycle:
        def __init__(self): self.me = self
        def __del__(self): print("collected")
    Cycle()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    import torch._dynamo  # as a torch.compile does
    print("enabled", gc.isenabled(), "imported", "torch._dynamo" in sys.modules)
    gc.collect()
    print("over")
"""


def test_imports_leave_the_garbage_collector_as_the_script_has_it(tmp_path: Path) -> None:
    """What the script made before torch._dynamo is imported, which happens late if at all, can still be collected."""
    write(tmp_path, "train.py", COLLECTS)
    done, _ = listened(tmp_path, "train.py")
    assert (done.code, done.err) == (0, "")
    said = done.out.splitlines()
    assert said.pop(0) == "enabled False torch is frozen True"
    assert said.pop() == "over"
    assert sorted(said) == ["collected", "enabled True imported True"]  # which comes first is up to the collector


READS_A_GLOBAL = """
    import torch
    from torch.utils.data import DataLoader, Dataset
    size = 4
    class Data(Dataset):
        def __len__(self): return 8
        def __getitem__(self, index): return torch.full((2,), float(size * index))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = DataLoader(Data(), batch_size=4)
    for size in (4, 8):
        total = 0.0
        for batch in loader:
            total += float(batch.sum())
            model(batch).sum().backward()
            optimizer.step()
        print(size, total)
"""


def test_a_cache_sees_a_global_change(tmp_path: Path) -> None:
    write(tmp_path, "train.py", READS_A_GLOBAL)
    expected = forked(tmp_path, "train.py")
    done = forked(tmp_path, "train.py", config=RunConfig({"sample_cache": "samples"}, command=("train.py",)))
    assert done.out == expected.out


SCRIPTED = """
    import torch
    import torch.nn.functional as F
    @torch.jit.script
    def distance(a, b):
        return F.l1_loss(a, b)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.criterion = torch.nn.MSELoss()
        def forward(self, x):
            return self.criterion(self.layer(x), x)
    model = torch.jit.script(Model())
    model(torch.ones(3, 2)).backward()
    print(float(distance(torch.ones(2), torch.zeros(2))))
"""


def test_listening_leaves_torchscript_alone(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SCRIPTED)
    done, _ = listened_in_fork(tmp_path, "train.py")
    assert (done.code, done.out) == (0, "1.0\n"), done.err


def test_evidence_can_go_into_a_pipe_and_the_pipe_stays_one(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TWO_PHASES)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    done = execute(HASTEN, "run", "--no-plan", "--evidence", "pipe", "train.py", cwd=tmp_path)
    reader.join(30)
    assert done.code == 0, done.err
    assert '"hasten-evidence/1"' in read[0]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_trial_leaves_a_disk_in_memory_alone(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="hasten-test-"))
    try:
        (folder / "ck.pt").write_text("mine")
        write(folder, "train.py", "import torch; torch.save([1], 'ck.pt'); open('/dev/null', 'w').write('x')")
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        config = RunConfig({}, str(scratch / "e.json"), ("train.py",), TrialOptions(str(scratch)), quiet=True)
        done = execute(PYTHON, "train.py", cwd=folder, env=trial_environment(config, environment()))
        assert done.code == 0, done.err
        assert (folder / "ck.pt").read_text() == "mine"
    finally:
        shutil.rmtree(folder)


def test_tune_does_not_write_its_plan_over_something_else(tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "import torch\n")
    done = command(tmp_path, "tune", "--out", "train.py", "train.py")
    assert done.code == 2
    assert "is not a plan" in done.err
    assert script.read_text() == "import torch\n"
