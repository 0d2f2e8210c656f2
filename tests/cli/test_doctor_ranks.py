"""`hasten doctor` on a training of several ranks that torchrun starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.doctor.verdict.diagnosis import read_diagnosis
from tests.taps.scripts import HASTEN, execute, write


@pytest.mark.slow  # torchrun and its ranks import torch, one after the other
def test_torchrun(tmp_path: Path) -> None:
    """All ranks end when rank 0 has enough, and the launcher does not call it a failure; a slow rank is waited for."""
    write(
        tmp_path,
        "train.py",
        """
        import time
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, TensorDataset

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            for (x,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                time.sleep(0.04 * dist.get_rank())
                loss.backward()
                optimizer.step()
        """,
    )
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29631", "train.py"]
    done = execute(HASTEN, "doctor", "--steps", "40", "--json", "d.json", *arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    diagnosis = read_diagnosis(tmp_path / "d.json")
    assert diagnosis.steps == 40
    assert diagnosis.verdict.resource == "network"
    assert 0.6 * diagnosis.step < diagnosis.phases["sync"] < diagnosis.step
    assert diagnosis.phases["sync"] > 5 * diagnosis.phases["backward"]
    assert sum(diagnosis.phases.values()) == pytest.approx(diagnosis.step)


@pytest.mark.slow  # a doctor's run of two ranks
def test_a_process_group_that_is_gone_at_the_end_is_not_forgotten(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        dist.destroy_process_group()
        """,
    )
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29633", "train.py"]
    done = execute(HASTEN, "doctor", "--json", "d.json", *arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    diagnosis = read_diagnosis(tmp_path / "d.json")
    assert diagnosis.phases["sync"] > 0
    assert any("ranks other than 0 of 2" in line for line in diagnosis.unseen)
