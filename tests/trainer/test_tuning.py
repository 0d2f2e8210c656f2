"""`Trainer(plan="auto")`: real fits that are tuned while they go on, and repeated from what was written down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.errors import HastenError
from hasten.plan import Plan
from hasten.techniques import CATALOGUE
from hasten.techniques.base import Choices, Effect, Liveness, Resource, Technique
from hasten.trainer.tuning import Tuning
from tests.taps.forks import launched
from tests.taps.scripts import PYTHON, environment
from tests.trainer.trainings import Regression, loader, quiet


class Images(hasten.Module):
    """Has something for most techniques that can be switched in a fit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(576, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def images(samples: int = 160) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(0, 5, (samples,), generator=generator)
    )
    return DataLoader(data, batch_size=16, shuffle=True)


def tuned(folder: Path, *callbacks: Any, seconds: float = 6.0, plan: Any = "auto", **flags: Any) -> hasten.Trainer:
    """A Trainer whose search takes seconds, not a minute, and that takes no fit for too short."""
    trainer = quiet(plan=plan, default_root_dir=str(folder), callbacks=list(callbacks), **{"max_epochs": -1, **flags})
    tuning = tuning_of(trainer)
    tuning.seconds, tuning.least_seconds = seconds, 0.0
    return trainer


def tuning_of(trainer: hasten.Trainer) -> Tuning:
    return next(one for one in trainer.callbacks if isinstance(one, Tuning))


def switched(folder: Path) -> list[dict[str, Any]]:
    """The lines of the schedule."""
    file = folder / "hasten-auto.schedule"
    return [json.loads(line) for line in file.read_text().splitlines()[1:]] if file.exists() else []


class Stop(hasten.callbacks.Callback):
    """Ends a fit some steps after it was switched so often, has settled, or is left alone."""

    def __init__(self, folder: Path, switches: int, then: int = 30) -> None:
        self.folder, self.switches, self.left = folder, switches, then
        self.until = time.monotonic() + 60

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        settled = (self.folder / "hasten-auto.toml").exists() or tuning_of(trainer).recorder is None
        if settled or len(switched(self.folder)) >= self.switches or time.monotonic() > self.until:
            self.left -= 1
            trainer.should_stop |= self.left <= 0


def weights(module: Any) -> list[Any]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_a_fit_that_is_repeated_from_its_schedule_gives_the_same_weights(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    module = Images()
    trainer = tuned(tmp_path, Stop(tmp_path, 5))
    trainer.fit(module, images(), images(32))
    switches = switched(tmp_path)
    assert any(len(one["on"]) > 2 for one in switches)
    assert torch.get_float32_matmul_precision() == "highest", "what comes after the fit is not tuned"
    again = Images()
    repeated = quiet(plan=tmp_path / "hasten-auto.schedule", max_epochs=-1, max_steps=trainer.global_step)
    repeated.fit(again, images(), images(32))
    assert repeated.global_step == trainer.global_step
    assert all(map(torch.equal, weights(again), weights(module)))


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: float) -> dict[str, float]:
    """Leave nothing in the catalogue but a technique by which a step sleeps so much longer; what is on."""
    on: dict[str, float] = {}

    class Planted(Technique):
        effect, relieves, liveness = Effect.ROUNDING, Resource.COMPUTE, Liveness.STEP

        @classmethod
        def settings(cls, evidence: Any) -> Choices:
            return Choices((True,), "planted")

        def on(self) -> None:
            super().on()
            on[self.name] = change

        def off(self) -> None:
            super().off()
            on.pop(self.name, None)

    Planted.name = name
    for other in list(CATALOGUE):
        monkeypatch.delitem(CATALOGUE, other)
    monkeypatch.setitem(CATALOGUE, name, Planted)
    return on


class Sleepy(Regression):
    """Sleeps in each step, for as long as what is on has it."""

    def __init__(self, on: dict[str, float]) -> None:
        super().__init__()
        self.on, self.at_the_end = on, None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02 + sum(self.on.values()))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.at_the_end = set(self.on)


@pytest.mark.parametrize(("change", "kept"), [(-0.015, {"helps"}), (0.03, set())])
def test_what_helps_stays_on_to_the_end_of_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, change: float, kept: set[str]
) -> None:
    module = Sleepy(planted(monkeypatch, "helps", change))
    tuned(tmp_path, Stop(tmp_path, 10_000), seconds=8.0).fit(module, loader(400))
    assert set(Plan.read(tmp_path / "hasten-auto.toml").techniques) == kept
    assert module.at_the_end == kept
    assert not module.on, "off behind the fit"
    assert "auto: settled after" in capsys.readouterr().err


class Raises(hasten.callbacks.Callback):
    """Ends a fit while something is on, and fails as it is told of the end."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.on:
            raise ValueError("the first")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        raise KeyboardInterrupt("the second")


def test_nothing_stays_on_where_a_callback_fails_as_it_is_told_of_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Sleepy(planted(monkeypatch, "helps", -0.015))
    (tmp_path / "hasten-auto.toml").write_text('[hasten]\nby = "hasten run --auto"\n')
    trainer = tuned(tmp_path, seconds=8.0)
    trainer.callbacks.insert(0, Raises())
    second = pytest.warns(UserWarning, match="while ending: KeyboardInterrupt: the second")
    with second, pytest.raises(ValueError, match="the first"):
        trainer.fit(module, loader(400))
    assert not module.on
    assert tuning_of(trainer).recorder is None


def test_what_a_flag_sets_is_not_switched(tmp_path: Path) -> None:
    trainer = tuned(tmp_path, Stop(tmp_path, 3), precision="bf16-mixed", fused_optimizer=False)
    trainer.fit(Images(), images())
    names = {name for one in switched(tmp_path) for name in one["on"]}
    assert names
    assert not names & {"precision", "fused_optimizer"}
    with pytest.raises(HastenError, match="a flag sets it"):
        quiet(plan=tmp_path / "hasten-auto.schedule", batched_fetch=True, matmul_precision="medium")


def test_short_and_deterministic_fits_are_left_alone(tmp_path: Path, capsys: Any) -> None:
    alone = quiet(plan="auto", default_root_dir=str(tmp_path), max_epochs=12)
    module = Images()
    alone.fit(module, images())
    assert "auto: the run is left alone: only" in capsys.readouterr().err
    plain = Images()
    quiet(max_epochs=12).fit(plain, images())
    assert all(map(torch.equal, weights(module), weights(plain)))
    try:
        tuned(tmp_path, max_epochs=12, deterministic=True).fit(Images(), images())
    finally:
        torch.use_deterministic_algorithms(False)
    assert "left alone: the script asks for deterministic algorithms" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, torch, hasten
from pathlib import Path
from hasten.callbacks import Callback, ModelCheckpoint
from tests.trainer.test_tuning import Images, images, tuned
torch.set_num_threads(1)
class Tell(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print("step", trainer.global_step, flush=True)
saves = ModelCheckpoint(dirpath="saved", save_last=True, every_n_train_steps=10, save_top_k=0)
tuned(Path("."), saves, Tell(), enable_checkpointing=True, background_saves=False).fit(Images(), images())
"""


class Begin(hasten.callbacks.Callback):
    """Notes where a fit begins."""

    step = -1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.step = trainer.global_step


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_a_fit_that_is_ended_goes_on_from_its_last_checkpoint(tmp_path: Path, by: signal.Signals) -> None:
    """As one without "auto" would; Ctrl-C saves one as it ends.

    A process of its own, not a fork: the search tries two threads, and a fork may have none but its own.
    """
    pipe, env = subprocess.PIPE, environment(PYTHONPATH=str(Path(__file__).parents[2]))
    with subprocess.Popen(
        [PYTHON, "-c", KILLED],
        cwd=tmp_path,
        env=env,
        stdout=pipe,
        stderr=pipe,
        text=True,
        # A shell's background jobs ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        last = 0
        for line in process.stdout:
            last = int(line.split()[1])
            if last >= 15 and len(switched(tmp_path)) >= 3:
                os.kill(process.pid, by)
                break
        last = max([last, *(int(line.split()[1]) for line in process.stdout)])
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode != 0
    saved = max((tmp_path / "saved").rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    module = Images()
    begin = Begin()
    goes_on = quiet(max_epochs=-1, max_steps=last + 15, callbacks=[begin])
    goes_on.fit(module, images(), ckpt_path=str(saved))
    assert goes_on.global_step == last + 15
    assert all(torch.isfinite(one).all() for one in weights(module))
    assert begin.step > last - 11, said
    assert {path.name for path in tmp_path.iterdir()} <= {
        "train.py", "saved", "hasten-auto.schedule", "hasten-auto.toml", "__pycache__",
    }  # fmt: skip


RANKS = """
import hashlib, os, torch
from pathlib import Path
from tests.trainer.test_tuning import Images, images, tuned
torch.set_num_threads(1)
module = Images()
tuned(Path("."), max_steps=300, devices=2, strategy="ddp").fit(module, images())
kept = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
Path(f"rank{os.environ['RANK']}").write_text(hashlib.sha256(kept).hexdigest())
"""


def test_ranks_of_a_fit_are_switched_together(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    done = launched(tmp_path, *launch, PYTHONPATH=str(Path(__file__).parents[2]), GLOO_SOCKET_IFNAME="lo")
    assert done.code == 0, done.err
    assert "left alone" not in done.err
    assert any(len(one["on"]) > 2 for one in switched(tmp_path))
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text(), "one optimizer fused, one not"
