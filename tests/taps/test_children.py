"""Launchers and worker processes: each process that trains is heard, and none is disturbed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.evidence import read_evidence
from tests.taps.forks import command
from tests.taps.scripts import LISTEN, PYTHON, environment, execute, hastened, listened, plain, quick, write

RANKS = """
    import os, sys, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(32, 4))
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(sys.argv[1:], dist.get_world_size(), loss.item(), model.module.weight.sum().item())
    dist.destroy_process_group()
    sys.exit(int(sys.argv[1]) if dist.is_available() and os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.slow  # torchrun and its ranks import torch, one after the other
@pytest.mark.parametrize("launcher", [["torchrun"], ["-m", "torch.distributed.run"]], ids=["torchrun", "-m"])
def test_torchrun(tmp_path: Path, launcher: list[str]) -> None:
    write(tmp_path, "train.py", RANKS)
    path = f"{Path(PYTHON).parent}:{environment()['PATH']}"
    env = environment(PATH=path)
    arguments = ["--nproc-per-node", "2", "--master-port", "29617", "train.py", "0"]
    done = execute(*LISTEN, *launcher, *arguments, cwd=tmp_path, env=env)
    assert done.code == 0, done.err
    expected = plain(tmp_path, "-m", "torch.distributed.run", *arguments, env=env)
    assert done.out == expected.out
    evidence = read_evidence(tmp_path / "evidence.json")
    assert len(evidence.step_start) == 4
    assert evidence.flags.distributed == 2
    assert evidence.models[0].name == "DistributedDataParallel"


@pytest.mark.slow  # torchrun and its ranks import torch, one after the other
def test_a_rank_that_fails_fails_the_launch(tmp_path: Path) -> None:
    write(tmp_path, "train.py", RANKS)
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29618", "train.py", "3"]
    done = hastened(tmp_path, *arguments)
    assert done.code == plain(tmp_path, *arguments).code == 1
    assert "exitcode: 3" in done.err.replace(" ", "").replace("exitcode:3", "exitcode: 3")


@pytest.mark.slow  # spawned processes import torch once more
def test_training_in_a_spawned_process_and_in_a_fork(tmp_path: Path) -> None:
    """torch.multiprocessing.spawn's child trains, the parent does not: the evidence is the child's."""
    write(
        tmp_path,
        "train.py",
        """
        import sys
        import torch
        import torch.multiprocessing as mp
        from torch.utils.data import DataLoader, TensorDataset

        def train(rank, batches):
            torch.manual_seed(0)
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for (x,) in DataLoader(TensorDataset(torch.randn(batches, 2))):
                model(x).sum().backward()
                optimizer.step()
            print(rank, __name__, sys.argv, model.weight.sum().item(), flush=True)

        if __name__ == "__main__":
            if sys.argv[1] == "spawn":
                mp.spawn(train, args=(6,), nprocs=1)
            else:
                child = mp.get_context("fork").Process(target=train, args=(0, 7))
                child.start()
                child.join()
                sys.exit(child.exitcode)
        """,
    )
    for method, steps in (("spawn", 6), ("fork", 7)):
        (tmp_path / "evidence.json").unlink(missing_ok=True)
        done, evidence = listened(tmp_path, "train.py", method)
        assert done == plain(tmp_path, "train.py", method)
        assert len(evidence.step_start) == steps


def test_workers_that_are_spawned_get_what_the_script_gave_them(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        """
        import json, os, torch
        from torch.utils.data import DataLoader, Dataset, get_worker_info

        class Data(Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, i):
                return torch.tensor([i, get_worker_info().id, torch.initial_seed() % 1000])

        if __name__ == "__main__":
            torch.manual_seed(3)
            for context, workers in (("spawn", 1), ("fork", 2)):
                for batch in DataLoader(Data(), 2, num_workers=workers, multiprocessing_context=context):
                    print(batch.tolist())
        """,
    )
    done, evidence = listened(tmp_path, "train.py", env=quick())
    assert done == plain(tmp_path, "train.py", env=quick())
    assert len(done.out.splitlines()) == 6
    assert [loader.start_method for loader in evidence.loaders] == ["spawn", "fork"]
    assert evidence.step_start == ()


def test_what_a_plan_changes_reaches_children(tmp_path: Path) -> None:
    """The plan is installed in a spawned process that trains as it is in the script's own."""
    write(
        tmp_path,
        "train.py",
        """
        import json
        import torch
        import torch.multiprocessing as mp

        def train(rank):
            optimizer = torch.optim.Adam(torch.nn.Linear(2, 1).parameters())
            print(json.dumps([rank, "_init_group" in vars(optimizer)]), flush=True)

        if __name__ == "__main__":
            train(-1)
            mp.spawn(train, nprocs=1)
        """,
    )
    write(tmp_path, "hasten.toml", "[techniques]\nfused_optimizer = true\n")
    done = command(tmp_path, "run", "train.py")
    assert done.code == 0, done.err
    assert [json.loads(line) for line in done.out.splitlines()] == [[-1, True], [0, True]]
