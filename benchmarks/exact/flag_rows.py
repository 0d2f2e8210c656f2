"""Flags of the Trainer in pairs: a training that stops in the middle and goes on ends as one that did not stop."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hasten
from benchmarks.exact.cover import cover
from benchmarks.exact.step_rows import Half, largest_gap
from benchmarks.exact.trainer_rows import MODULES, OF_GRADIENTS, OPTIMIZERS, TrainerRow, callbacks_of, more
from hasten.trainer.checkpoint import read

VALUES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16-mixed", "64-true", "bf16-true"),
    "limit_train_batches": (7,),
    "limit_val_batches": (1, 0),
    "overfit_batches": (5,),
    "reload_dataloaders_every_n_epochs": (1,),
    "val_check_interval": (3, 0.5),
    "check_val_every_n_epoch": (2,),
    "num_sanity_val_steps": (0,),
    "inference_mode": (False,),
    "accumulate_grad_batches": (2, {0: 2, 1: 1}),
    "microbatch": (3,),
    "optimizer_in_backward": (True,),
    "gradient_clip_val": (0.5,),
    "gradient_clip_algorithm": ("value",),
    "callbacks": ("EMA",),
    "checkpoint_format": ("torch",),
    "background_saves": (False,),
    "seed": (7,),
    "deterministic": (True,),
    "detect_anomaly": (True,),
    "profiler": ("simple",),
    "log_every_n_steps": (1,),
    "sync_batchnorm": (True,),
    "benchmark": (True,),
    "channels_last": (True,),
    "fused_optimizer": (True,),
    "matmul_precision": ("medium",),
    "batched_fetch": (True,),
    "activation_checkpointing": ("sqrt",),
    "plan": ({"loader_workers": 1}, {"sample_cache": "samples"}),
}
"""What each flag may be here. One that is not named in a row has its default."""
IN_NO_ROW = {
    "accelerator": "the machine of these rows has a CPU alone",
    "devices": "several processes: `tests/trainer/strategies`",
    "strategy": "several processes: `tests/trainer/strategies`",
    "num_nodes": "several machines: `tests/trainer/strategies`",
    "use_distributed_sampler": "several processes: `tests/trainer/strategies`",
    "max_epochs": "when a training ends, not how a step is computed: `tests/trainer/test_limits.py`",
    "min_epochs": "as `max_epochs`",
    "max_steps": "as `max_epochs`",
    "min_steps": "as `max_epochs`",
    "max_time": "as `max_epochs`",
    "limit_test_batches": "not of `fit`",
    "limit_predict_batches": "not of `fit`",
    "fast_dev_run": "sets limits, and saves nothing to go on from",
    "barebones": "saves nothing to go on from",
    "enable_checkpointing": "each row saves by itself",
    "logger": "what is written, not what is computed",
    "enable_progress_bar": "as `logger`",
    "enable_model_summary": "as `logger`",
    "enable_autolog_hparams": "as `logger`",
    "default_root_dir": "as `logger`",
    "compile": "compiles for minutes: in the rows of techniques above",
    "device_prefetch": "needs a GPU",
    "activation_offload": "needs a GPU",
    "host_embeddings": "needs a GPU",
    "fp8": "needs a GPU and torchao",
    "chunked_loss": "acts on millions of logits: in the rows for memory above",
}
"""The flags that meet no other here, and why."""
_COMPARED = ("state_dict", "optimizer_states", "callbacks")


@dataclass(frozen=True)
class FlagRow:
    """A module, its optimizer, and flags."""

    module: str
    optimizer: str
    flags: dict[str, Any] = field(hash=False)

    def features(self) -> list[str]:
        """What can meet in pairs: each value of each flag."""
        return [f"module {self.module}", f"optimizer {self.optimizer}", *self._flags()]

    @property
    def training(self) -> str:
        """This row in a few words."""
        return ", ".join([self.module, self.optimizer, *(f"`{flag}`" for flag in self._flags())])

    def compare(self) -> dict[str, Any]:
        """Train two epochs, and the second of them once more from the checkpoint between them."""
        with tempfile.TemporaryDirectory(prefix="hx", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            whole, rest = self._fit(folder, "whole"), self._fit(folder, "rest", "whole half")
        off = largest_gap(whole, rest, _COMPARED)
        ends = [[end[name] for name in ("global_step", "epoch", "lr_schedulers")] for end in (whole, rest)]
        kept = off == 0 and ends[0] == ends[1]
        return {"ok": kept, "plan": [], "steps": whole["global_step"], "off": {"gone on with": off}}

    def _flags(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.flags.items()]

    def _fit(self, folder: Path, name: str, goes_on: str = "") -> Mapping[str, Any]:
        """Train, saving in the middle; return the checkpoint of the end."""
        module, train, held_out = TrainerRow(self.module, self.optimizer, {}, {}).fit(samples=64)
        plan = hasten.Plan(self.flags["plan"]) if "plan" in self.flags else None
        callbacks: list[Any] = [Half(folder / f"{name} half.ckpt"), *callbacks_of(self.flags)]
        flags = {name: value for name, value in self.flags.items() if name not in ("plan", "callbacks")}
        trainer = hasten.Trainer(
            **flags, plan=plan, max_epochs=2, callbacks=callbacks, default_root_dir=folder, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        torch.manual_seed(5)
        trainer.fit(module, train, held_out, ckpt_path=folder / f"{goes_on}.ckpt" if goes_on else None)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        return read(folder / f"{name}.ckpt")


def rows() -> list[FlagRow]:
    """Return rows in which each pair of values of flags, modules and optimizers that can meet does.

    The last two: modules of other kinds, each under what it takes.
    """
    by_hand = [
        FlagRow(row.module, row.optimizer, row.flags | ({"plan": row.plan} if row.plan else {})) for row in more()
    ]
    return [*cover(_throw), *by_hand]


def _throw(draw: random.Random) -> FlagRow:
    module = draw.choice(list(MODULES))
    optimizer = "adamw" if module == "game" else draw.choice(OPTIMIZERS)
    on = {name for name in VALUES if draw.random() < 0.5}
    if module == "game":
        on -= {*OF_GRADIENTS, "optimizer_in_backward"}  # automatic optimization's
    if optimizer == "lbfgs":
        on -= {"accumulate_grad_batches", "microbatch", "optimizer_in_backward", "precision"}
    if "optimizer_in_backward" in on:
        on -= set(OF_GRADIENTS)
    on -= {"gradient_clip_algorithm"} if "gradient_clip_val" not in on else set()
    on -= {draw.choice(["limit_train_batches", "overfit_batches"])}  # the one sets the other
    on -= {"channels_last", "sync_batchnorm"} if module != "images" else set()
    flags = {name: draw.choice(VALUES[name]) for name in VALUES if name in on}
    if "batched_fetch" in on and flags.get("plan") == {"sample_cache": "samples"}:
        del flags["batched_fetch"]  # both act on the same fetch
    return FlagRow(module, optimizer, flags)
