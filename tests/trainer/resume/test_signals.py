"""SIGTERM and Ctrl-C: the training saves, says where, ends with the code that shells expect, and goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from tests.trainer.resume.processes import ROOT, assert_same

TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


def signalled(nursery, spec, hook, nth, *numbers):
    process = nursery.start({**spec, "acts": [{"what": "signal", "hook": hook, "nth": nth, "numbers": numbers}]})
    return process.wait(), process.said()


PLACES = [
    ("on_train_batch_start", 6, {"flags": {"accumulate_grad_batches": 4}}),
    ("on_before_zero_grad", 9, {"data": {"workers": 2}}),
    ("on_train_batch_end", 15, {"module": {"scheduler": "plateau"}}),  # the last of an epoch
    ("on_validation_batch_end", 3, {"flags": {"val_check_interval": 0.5}, "callbacks": ["ema"]}),
    ("on_validation_end", 2, {"module": {"scheduler": "onecycle"}}),
    ("on_train_epoch_end", 1, {"module": {"scheduler": "step"}}),
    ("on_train_epoch_start", 2, {"data": {"kind": "stream"}}),
]


@pytest.mark.parametrize(
    ("hook", "nth", "more", "number"),
    [
        *((*PLACES[i], TERM) for i in (0, 2, 3)),
        (*PLACES[3], INT),
        # slow: places next to one that is tried always
        *(pytest.param(*PLACES[i], TERM, marks=pytest.mark.slow) for i in (1, 4, 5, 6)),
    ],
)
def test_saves_and_goes_on(nursery, tmp_path, hook, nth, more, number):
    whole = nursery.outcome({**more, "root": str(tmp_path / "whole")})
    spec = {**more, "root": str(tmp_path / "run"), "checkpoints": [{"every_n_epochs": 50}], "ckpt_path": "last"}
    code, said = signalled(nursery, spec, hook, nth, number)
    assert code == 128 + number, said
    (saved,) = (tmp_path / "run").glob("interrupted-*.ckpt")
    assert f"{signal.Signals(number).name}: saved {saved}" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / ".hasten.lock").exists()
    assert_same(whole, nursery.outcome(spec))


def test_a_second_ctrl_c_ends_at_once(nursery, tmp_path):
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{}]}
    code, said = signalled(nursery, spec, "on_train_batch_start", 3, INT, INT)
    assert code == 130
    assert "nothing was saved" in said
    assert not list((tmp_path / "run").glob("*.ckpt"))


def test_a_second_sigterm_changes_nothing(nursery, tmp_path):
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{}]}
    code, said = signalled(nursery, spec, "on_train_batch_start", 3, TERM, TERM)
    assert code == 143
    assert len(list((tmp_path / "run").glob("interrupted-*.ckpt"))) == 1, said


@pytest.mark.parametrize("number", [TERM, INT])
def test_without_checkpoints_it_says_that_nothing_was_saved(nursery, tmp_path, number):
    code, said = signalled(nursery, {"root": str(tmp_path / "run")}, "on_train_batch_start", 3, number)
    assert code == 128 + number
    assert "nothing was saved" in said
    assert not list((tmp_path / "run").iterdir())


def test_spoilt_weights_are_not_saved(nursery, tmp_path):
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{}], "module": {"lr": float("inf")}}
    code, said = signalled(nursery, spec, "on_train_batch_start", 3, TERM)
    assert code == 143
    assert not list((tmp_path / "run").glob("*.ckpt"))
    assert "not finite" in said
    assert "checkpoints are off" not in said


RANKS = """
    import os, sys, torch, hasten
    sys.path.insert(0, sys.argv[2])
    from tests.trainer.resume.trainings import Net, Drawing, Act, outcome
    from torch.utils.data import DataLoader
    from hasten.callbacks import ModelCheckpoint

    if __name__ == "__main__":
        torch.set_num_threads(1)
        root, _, end, path, every, run = sys.argv[1:]
        hasten.seed_everything(3)
        file = f"{root}/pid-{run}-" + os.environ.get("LOCAL_RANK", "0")
        say = Act("say", "on_train_batch_end", 5, file=file)
        trainer = hasten.Trainer(
            max_epochs=int(end), default_root_dir=root, strategy="ddp", devices=2, accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=int(every),
            callbacks=[ModelCheckpoint(dirpath=root, every_n_epochs=1000), say],
        )
        module = Net()
        trainer.fit(module, DataLoader(Drawing(64), batch_size=4, shuffle=True), DataLoader(Drawing(16), batch_size=4),
                    ckpt_path=None if path == "-" else path)
        if trainer.is_global_zero:
            torch.save(outcome(trainer, module), f"{root}/out.pt")
"""


class Ranks:
    def __init__(self, tmp_path):
        self.script, self.root = tmp_path / "ranks.py", tmp_path / "run"
        tmp_path.mkdir(exist_ok=True)
        self.script.write_text(textwrap.dedent(RANKS))
        self.root.mkdir()
        self.runs = 0

    def start(self, epochs, path="-", every=1):
        self.runs += 1
        arguments = [self.root, ROOT, epochs, path, every, self.runs]
        self.process = subprocess.Popen(
            [sys.executable, self.script, *map(str, arguments)], stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        return self

    def pid(self, rank):
        file = self.root / f"pid-{self.runs}-{rank}"
        end = time.monotonic() + 60
        while not (file.exists() and file.read_text()):
            if time.monotonic() > end or self.process.poll() is not None:
                self.process.kill()
                pytest.fail(f"rank {rank} did not begin:\n{self.process.communicate()[1]}")
            time.sleep(0.01)
        return int(file.read_text())

    def ended(self):
        try:
            _, said = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, said


# slow: two ranks each; Ctrl-C is tried in one process above, another rank here
@pytest.mark.parametrize(
    ("rank", "number", "every"),
    [(1, TERM, 4), *(pytest.param(0, number, 1, marks=pytest.mark.slow) for number in (INT, TERM))],
)
def test_ranks_stop_together(tmp_path, rank, number, every):
    ranks = Ranks(tmp_path).start(100_000, every=every)
    pids = [ranks.pid(0), ranks.pid(1)]
    os.kill(pids[rank], number)
    code, said = ranks.ended()
    assert code == 128 + number, said
    (saved,) = ranks.root.glob("*.ckpt")
    assert said.count(f"saved {saved}") == 1
    assert "Traceback" not in said
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow  # two ranks, killed and resumed
def test_ranks_go_on_exactly(tmp_path):
    whole, ranks = Ranks(tmp_path / "whole"), Ranks(tmp_path / "stopped")
    assert whole.start(40).ended()[0] == 0
    ranks.start(40)
    os.kill(ranks.pid(1), TERM)
    assert ranks.ended()[0] == 143
    code, said = ranks.start(40, "last").ended()
    assert code == 0, said
    assert_same(*(torch.load(one.root / "out.pt", weights_only=False) for one in (whole, ranks)))
