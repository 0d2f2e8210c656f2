"""What stands in the way of real scripts under a limit, where no technique can help: one message each."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import HastenError
from hasten.batch.attempt import Attempts
from hasten.batch.attempt_progress import read_progress, rise_of
from hasten.batch.trouble import torch_needs
from hasten.memory_search.limit import Limit, limit_of
from hasten.memory_search.search import SearchResult, find_plan
from hasten.memory_search.words import as_json, lines
from tests.taps.scripts import HASTEN, execute, write

MB = 10**6

WORKERS = """
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    class Copied(Dataset):
        whole = None

        def __len__(self):
            return 96

        def __getitem__(self, index):
            if self.whole is None and get_worker_info():  # each worker reads a copy of its own
                self.whole = torch.ones(64 * 2**20)
            return torch.ones(16)

    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for epoch in range(2):
        for x in DataLoader(Copied(), 8, num_workers=2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""
LEAKS = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    kept = []
    for epoch in range(2):
        for (x,) in DataLoader(TensorDataset(torch.ones(96, 16)), 8):
            loss = model(x).square()
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
            kept.append(torch.ones(2**21))  # 8 MiB a step
"""
LOADS = """
    import torch

    data = torch.ones(128 * 2**20)
    model = torch.nn.Linear(16, 1)
    for x in data[:1600].view(100, 16):
        model(x).sum().backward()
"""


def climbed(folder: Path, script: str, limit: Limit) -> SearchResult:
    """Try a script as it is, without techniques: it fits, or it is said why not."""
    (folder / "scratch").mkdir()
    command = [sys.executable, str(write(folder, "train.py", script))]
    attempts = Attempts(command, ("train.py",), folder / "scratch", limit.room)
    return find_plan(attempts, limit, [], lambda line: None)


def test_a_limit_below_what_torch_takes_is_said_with_what_that_is(tmp_path: Path) -> None:
    write(tmp_path, "train.py", LEAKS)
    ran = execute(HASTEN, "tune", "--memory", "60MB", "train.py", cwd=tmp_path)
    assert ran.code == 2
    assert "60 MB is less than `import torch` takes here: " in ran.err
    assert "allow more: --memory " in ran.err
    assert not (tmp_path / "hasten.toml").exists()


def test_workers_that_hold_the_memory_are_named(tmp_path: Path) -> None:
    with pytest.raises(HastenError, match=r"worker processes of its loaders hold \d+ of \d+ MB: give") as raised:
        climbed(tmp_path, WORKERS, limit_of(torch_needs() + 300 * MB, on_gpu=False))
    assert "does not fit into" in str(raised.value)
    assert "before the first forward" not in str(raised.value)


def test_what_a_script_loads_before_it_trains_is_named(tmp_path: Path) -> None:
    with pytest.raises(HastenError, match="it ran out before the first forward: the script's own data and model"):
        climbed(tmp_path, LOADS, limit_of(torch_needs() + 300 * MB, on_gpu=False))


def test_a_training_that_fits_and_leaks_is_said_to_run_out_later(tmp_path: Path) -> None:
    found = climbed(tmp_path, LEAKS, limit_of(8 << 30, on_gpu=False))
    assert found.chosen.plan == {}
    assert 6 * MB < found.plain.attempt.grows < 12 * MB
    page = lines(found, ("train.py",), "hasten.toml")
    assert any(line.startswith("BUT memory rises by ") and "which fills what is left in about" in line for line in page)
    assert as_json(found, ("train.py",))["rises_bytes_a_step"] == round(found.plain.attempt.grows)


def test_an_attempt_that_left_no_course_never_got_to_torch(tmp_path: Path) -> None:
    assert read_progress(tmp_path).stage == "start"


@given(st.integers(2 << 20, 1 << 30), st.integers(0, 1000), st.integers(24, 60))
def test_a_steady_rise_is_measured_and_noise_is_not(each: int, seed: int, steps: int) -> None:
    draw = random.Random(seed)
    noise = [round(0.2 * each * draw.random()) for _ in range(steps)]
    rising = [each * step + more for step, more in enumerate(noise)]
    assert rise_of(rising) == pytest.approx(each, rel=0.1)
    assert rise_of([each + 5 * more for more in noise]) == 0
    assert rise_of([min(one, rising[steps // 2 - 1]) for one in rising]) == 0  # a cache that a first pass fills
    assert rise_of([each * (step // 5) for step in range(steps)]) == 0  # a jump now and then
