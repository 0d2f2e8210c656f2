"""Small trainings full of things that a resume may get wrong; what a spec (plain values) asks for is run here."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hasten
from hasten.callbacks import EMA, EarlyStopping, ModelCheckpoint, NaNWatch
from hasten.data import rng
from hasten.trainer.callbacks import Callback


class Drawing(Dataset):
    """Samples with noise from the process-wide generators, in whatever process they are fetched. Some are bad."""

    def __init__(self, size, breaks="", at=-1):
        self.size, self.breaks, self.at = size, breaks, at

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i == self.at:
            if self.breaks == "raise":
                raise ValueError("sample 77 is broken")
            if self.breaks == "hang":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(8, generator=generator) + 0.1 * torch.randn(8) + 0.1 * random.random()
        return x, (x.sum() > 0).long()


class Stream(IterableDataset):
    """Of unknown length, with noise."""

    def __init__(self, size):
        self.data = Drawing(size)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.data[i] for i in range(first, len(self.data), step))


class Net(hasten.Module):
    """Steps listed in `nan_at` have a loss of NaN, in `inf_at` infinite gradients, in `huge_at` want 4 EB of memory."""

    def __init__(self, scheduler=None, manual=None, dropout=0.3, nan_at=(), inf_at=(), huge_at=(), lr=0.01, ballast=0):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(16, 2),
        )
        self.other = torch.nn.Linear(8, 2)
        self.scheduler, self.manual, self.nan_at, self.lr = scheduler, manual, set(nan_at), lr
        self.inf_at, self.huge_at = set(inf_at), set(huge_at)
        if ballast:  # makes its checkpoints large
            self.register_buffer("ballast", torch.zeros(ballast))
        self.automatic_optimization = not manual

    def _loss(self, batch, net):
        parts = batch if isinstance(batch, list) and isinstance(batch[0], list) else [batch]
        return sum(F.cross_entropy(net(x), y) for x, y in parts)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch, self.net)
        if self.manual:
            return self._by_hand(batch, batch_idx, loss)
        loss = loss + self._loss(batch, self.other)
        if self.trainer.global_step in self.nan_at:
            loss = loss * float("nan")
        if self.trainer.global_step in self.inf_at:  # fine forward
            loss.register_hook(lambda gradient: gradient * float("inf"))
        if self.trainer.global_step in self.huge_at:
            torch.empty(1 << 62, dtype=torch.uint8)
        self.log("l", loss, on_step=True, on_epoch=True)
        return loss

    def _by_hand(self, batch, batch_idx, loss):
        first, second = self.optimizers()
        every = self.manual
        self.manual_backward(loss / every)
        self.manual_backward(self._loss(batch, self.other))
        if (batch_idx + 1) % every == 0:
            first.step()
            first.zero_grad()
            self.lr_schedulers().step()
        second.step()
        second.zero_grad()
        self.log("l", loss, on_step=True, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch, self.net))
        self.log("noise", torch.rand(()))

    def configure_optimizers(self):
        if self.manual:
            first = torch.optim.AdamW(self.net.parameters(), lr=self.lr)
            second = torch.optim.SGD(self.other.parameters(), lr=self.lr, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.95)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        if self.scheduler == "plateau":
            made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "monitor": "l_epoch"}}
        if self.scheduler == "onecycle":
            made = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=500)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}
        if self.scheduler == "step":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        return optimizer


class Act(Callback):
    """Do something the n-th time that a hook is called: be killed, get a signal, save."""

    def __init__(self, what, hook, nth, **options):
        self.what, self.nth, self.options, self.count = what, nth, options, 0
        setattr(self, hook, self._called)

    @property
    def state_key(self):
        return f"{self.what}{id(self)}"

    def _called(self, trainer, *_, **__):
        if trainer.sanity_checking:
            return
        self.count += 1
        if self.what == "save" and self.count % self.nth == 0:
            path = Path(self.options["folder"]) / f"by-hand-{trainer.global_step}-{trainer.total_batches}.ckpt"
            trainer.save_checkpoint(path)
        elif self.count == self.nth:
            if self.what == "kill":
                if self.options.get("settle", True):
                    trainer.checkpointing.saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "signal":
                for number in self.options["numbers"]:
                    os.kill(os.getpid(), number)
            elif self.what == "say":  # and wait for whatever is to happen to this process
                Path(self.options["file"]).write_text(str(os.getpid()))
                time.sleep(self.options.get("wait", 0))
            elif self.what == "hang":  # in native code, where no handler of Python's runs
                Path(self.options["file"]).write_text(str(os.getpid()))
                mutex = ctypes.create_string_buffer(64)
                for _ in range(2):
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
            elif self.what == "grow":  # until somebody puts an end to it
                kept = []
                while True:
                    kept.append(b"x" * (1 << 22))
            elif self.what == "raise":
                raise RuntimeError("the training itself failed")


class Heard(Callback):
    """What callbacks are told about an error."""

    def __init__(self, file):
        self.file = Path(file)

    def on_exception(self, trainer, module, exception):
        self.file.write_text(f"{type(exception).__name__}: {exception}")


def loaders(data):
    data = {"size": 120, "batch": 8, "workers": 0, "kind": "map", **data}
    common = {"num_workers": data["workers"]}
    more = {"persistent_workers": data.get("stay", False)} if data["workers"] else {}
    train = Drawing(data["size"], data.get("breaks", ""), data.get("at", -1))
    if data["kind"] == "stream":
        return DataLoader(Stream(data["size"]), batch_size=data["batch"], **common, **more), validation(data)
    first = DataLoader(train, batch_size=data["batch"], shuffle=data.get("shuffle", True), **common, **more)
    if data["kind"] == "two":
        return [first, DataLoader(Drawing(40), batch_size=data["batch"], shuffle=True, **common)], validation(data)
    return first, validation(data)


def validation(data):
    stays = {"num_workers": 1, "persistent_workers": True} if data.get("val_stays") else {}
    return DataLoader(Drawing(32), batch_size=16, **stays)


def run(spec):
    """Train as the spec says; with `out`, leave there all that two equal trainings have in common."""
    os.environ.update(spec.get("env", {}))
    torch.set_num_threads(1)
    hasten.seed_everything(3)
    if spec.get("dumps_on"):  # the stack of all threads, as many scripts have it
        faulthandler.register(spec["dumps_on"])
    root = spec["root"]
    module = Net(**spec.get("module", {}))
    named = {"ema": lambda: EMA(decay=0.9), "early": lambda: EarlyStopping("noise", patience=1),
             "skip": lambda: NaNWatch("skip"), "stop": lambda: NaNWatch("stop")}  # fmt: skip
    callbacks = [named[name]() for name in spec.get("callbacks", ())]
    callbacks += [Act(**{"folder": root, **act}) for act in spec.get("acts", ())]
    if spec.get("heard"):
        callbacks.append(Heard(spec["heard"]))
    for checkpoint in spec.get("checkpoints", ()):
        if seconds := checkpoint.get("seconds"):
            checkpoint = {"train_time_interval": timedelta(seconds=seconds)}
        callbacks.append(ModelCheckpoint(**{"dirpath": root, "save_top_k": -1, **checkpoint}))
    flags = {
        "max_epochs": 3, "default_root_dir": root, "enable_progress_bar": False, "enable_model_summary": False,
        "logger": False, "enable_checkpointing": bool(spec.get("checkpoints")), **spec.get("flags", {}),
    }  # fmt: skip
    trainer = hasten.Trainer(callbacks=callbacks, **flags)
    train, val = loaders(spec.get("data", {}))
    trainer.fit(module, train, val if spec.get("validates", True) else None, ckpt_path=spec.get("ckpt_path"))
    if spec.get("save_after"):
        trainer.save_checkpoint(spec["save_after"])
    if spec.get("out"):
        torch.save(outcome(trainer, module), spec["out"])


def outcome(trainer, module):
    early = trainer.early_stopping_callback
    averages = [callback._average for callback in trainer.callbacks if isinstance(callback, EMA)]
    return {
        "weights": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "metrics": {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()},
        "techniques": {one.name: one.state_dict() for one in trainer.run.techniques},
        "steps": (trainer.global_step, trainer.current_epoch, trainer.total_batches, trainer.logged_steps),
        "early": early and early.state_dict(),
        "averages": averages,
        "rng": rng.digest(),
    }
