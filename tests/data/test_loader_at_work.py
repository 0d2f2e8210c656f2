"""hasten.data.DataLoader where others drive it: hasten's Trainer, its commands, and trainings that are killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from hasten import Module, Trainer
from hasten.data import DataLoader
from hasten.data.position import Position
from hasten.errors import HastenError
from tests.data.loader_trainings import Keyed, Numbers
from tests.taps.scripts import PYTHON, execute, quick, write

pytestmark = pytest.mark.filterwarnings("ignore:.*worker")


class Rows(Numbers):
    def __getitem__(self, index):
        return super().__getitem__(index)[:1].float()


class Sees(Module):
    """Notes which samples each epoch trains on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.trainer.current_epoch, batch.flatten().int().tolist()))
        return self.layer(batch / 10).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(path, stop=None, resume=None, **loader):
    module = Sees()
    trainer = Trainer(
        max_epochs=3, max_steps=stop or -1, default_root_dir=path, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(module, DataLoader(Rows(14), batch_size=3, shuffle=True, seed=4, **loader), ckpt_path=resume)
    return trainer, module


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_training_goes_on_in_the_middle_of_an_epoch_with_other_workers(tmp_path, stop):
    _, whole = fitted(tmp_path)
    trainer, first = fitted(tmp_path, stop, num_workers=2)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    _, second = fitted(tmp_path, resume=tmp_path / "stop.ckpt", num_workers=1)
    assert first.seen + second.seen == whole.seen
    assert len(whole.seen) == 15


def test_positions_are_resumed_twice_and_count_what_was_consumed():
    def make():
        return Position(DataLoader(Numbers(20), batch_size=2, shuffle=True))

    position = make()
    whole = [batch.tolist() for batch in position.begin()]
    rows, state = [], make().state_dict(0)
    for taken in (3, 4, None):
        position = make()
        iterator = position.resume(state) or position.begin()
        rows += [batch.tolist() for _, batch in zip(range(taken or 99), iterator)]
        next(iterator, None)  # read ahead of the training: it was given, not consumed
        state = json.loads(json.dumps(position.state_dict(len(rows))))
    assert rows == whole


def test_a_place_that_another_loader_saved_is_refused():
    torchs, ours = Position(TorchDataLoader(Numbers(6))), Position(DataLoader(Numbers(6)))
    for saved, other in ((torchs, ours), (ours, torchs)):
        next(saved.begin())
        with pytest.raises(HastenError, match=r"cannot be gone on from|reads and writes its own states"):
            other.resume(saved.state_dict(1))


SCRIPT = """
import os, sys, torch
sys.path.insert(0, os.getcwd())
from hasten.data import DataLoader
from tests.data.loader_trainings import Numbers
torch.manual_seed(0)
model = torch.nn.Linear(5, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    for batch in DataLoader(Numbers(64), batch_size=4, shuffle=True, seed=epoch):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
print("WEIGHTS", model.weight.tolist())
"""


@pytest.mark.slow  # a run under each technique
def test_a_plan_changes_nothing_under_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plan = tmp_path / "plan.toml"
    plan.write_text("[techniques]\nloader_workers = 2\nbatched_fetch = true\n")
    plain, run = (
        subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100)
        for arguments in ([script], ["-m", "hasten", "run", "--plan", plan, script])
    )
    assert "WEIGHTS" in plain.stdout
    assert run.stdout == plain.stdout, run.stderr


KILLED = """
import os, sys, json, signal
sys.path.insert(0, os.getcwd())
from hasten.data import DataLoader
from tests.data.loader_trainings import Keyed
import hasten.files
folder, rank, ranks, workers, die = sys.argv[1], *map(int, sys.argv[2:])
if __name__ == "__main__":
    loader = DataLoader(Keyed(48), batch_size=2, shuffle=True, seed=6, num_workers=workers, rank=rank, world_size=ranks)
    path = os.path.join(folder, "state")
    if os.path.exists(path + "-before"):
        loader.load_state_dict(json.load(open(path + "-before")))
    done = loader.state_dict()["samples"]
    for number, batch in enumerate(loader):
        if number == die:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(os.path.join(folder, f"rows-{done}-{rank}"), "w") as file:
            json.dump(batch.tolist(), file)
        if rank == 0:
            hasten.files.write_whole(path, json.dumps(loader.state_dict()))
        done = loader.state_dict()["samples"]
"""


def killed(folder, runs):
    """Rows of an epoch in runs that are killed after some batches, each with other ranks and workers."""
    folder.mkdir(exist_ok=True)
    rows = {}
    for ranks, workers, die in runs:
        if (folder / "state").exists():
            shutil.copy(folder / "state", folder / "state-before")  # what all ranks go on from
        processes = [
            subprocess.Popen([sys.executable, "-c", KILLED, folder, *map(str, (rank, ranks, workers, die))])
            for rank in range(ranks)
        ]
        codes = [process.wait(100) for process in processes]
        assert codes == [-9 if die >= 0 else 0] * ranks
        for start in sorted({int(file.name.split("-")[1]) for file in folder.glob("rows-*")}):
            shares = [json.loads((folder / f"rows-{start}-{rank}").read_text()) for rank in range(ranks)]
            shares = [*shares[start % ranks :], *shares[: start % ranks]]
            rows[start] = [row for together in zip(*shares, strict=True) for row in together]
        for file in folder.glob("rows-*"):
            file.unlink()
        assert (folder / "state").stat().st_size < 2048
    return [row for start in sorted(rows) for row in rows[start]]


@pytest.mark.slow  # trainings of several ranks, killed and resumed
def test_killed_trainings_go_on_with_other_ranks_and_workers(tmp_path):
    whole = [row for batch in DataLoader(Keyed(48), batch_size=2, shuffle=True, seed=6) for row in batch.tolist()]
    assert killed(tmp_path / "one", [(1, 2, 3), (2, 0, 2), (1, 0, -1)]) == whole


@pytest.mark.slow  # fifty kills, with all numbers of ranks and workers
@pytest.mark.timeout(1200)
def test_killed_at_many_points_with_all_numbers_of_ranks_and_workers(tmp_path):
    whole = killed(tmp_path / "whole", [(1, 0, -1)])
    cells = [(ranks, workers) for ranks in (1, 2, 4) for workers in range(4)]
    for number, (ranks, workers) in enumerate(cells):
        other = cells[(number * 5 + 7) % len(cells)]
        runs = [(ranks, workers, 1 + number % 4), (*other, 1), (ranks, workers, -1)]
        assert killed(tmp_path / str(number), runs)[:48] == whole, runs  # what comes after fills up the last batch


def test_a_script_that_ends_while_threads_compute_ends_well(tmp_path):
    """Python ends a daemon thread that is in C++ by an exception that nobody may catch, and so aborted."""
    script = write(
        tmp_path,
        "train.py",
        """
        import time
        import torch
        from hasten.data import DataLoader

        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 100

            def __getitem__(self, index):
                square = torch.ones(900, 900)
                for _ in range(4 if index else 0):
                    square = square @ square
                return square[0]

        batches = iter(DataLoader(Slow(), 2, num_workers=2, workers="thread"))
        time.sleep(0.2)
        """,
    )
    done = execute(PYTHON, script, cwd=tmp_path, env=quick())
    assert (done.code, done.err) == (0, "")
