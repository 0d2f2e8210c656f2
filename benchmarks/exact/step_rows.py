"""Trainers that take a step apart, `microbatch` and `optimizer_in_backward`, held against those that do not."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hasten
from benchmarks.exact.cover import cover
from benchmarks.exact.trainer_rows import TrainerRow
from hasten.trainer.checkpoint import read

APART: dict[str, Any] = {"microbatch": 3, "optimizer_in_backward": True}
BOUNDS = {"microbatch": 1e-9, "optimizer_in_backward": 0.0}
"""Of a weight or a number of an optimizer's state, in double precision, relative to the largest of its tensor."""
_BESIDE: dict[str, Any] = {
    "detect_anomaly": True,
    "val_check_interval": 3,
    "checkpoint_format": "torch",
    "fused_optimizer": True,
    "batched_fetch": True,
    "seed": 7,
    "activation_checkpointing": True,  # text
    "channels_last": True,  # images
    "accumulate_grad_batches": 2,  # these are refused beside optimizer_in_backward
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "value",
}
_GATHER = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_EPOCHS = 2


class _Resting(hasten.callbacks.Callback):
    """Keeps BatchNorm and dropout in eval mode: for parts of a batch they would count and draw otherwise."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d | nn.Dropout):
                part.eval()
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0


@dataclass(frozen=True)
class StepRow:
    """One module, the flag that takes its steps apart, and what else the Trainer is told."""

    module: str
    optimizer: str
    apart: str
    flags: dict[str, Any] = field(hash=False)

    def features(self) -> list[str]:
        """What can meet in pairs."""
        return [f"module {self.module}", f"optimizer {self.optimizer}", self.apart, *self.flags]

    @property
    def training(self) -> str:
        """This row but for its flag, in a few words."""
        return ", ".join([self.module, self.optimizer, *(f"`{name}`" for name in self.flags)])

    def compare(self) -> dict[str, Any]:
        """Train plain and with the flag, whole and in two halves, one of them the other way; return what parted."""
        with tempfile.TemporaryDirectory(prefix="hx", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            plain = self._fit(folder, {}, "plain")
            apart = {self.apart: APART[self.apart]}
            ends = {
                "fresh": self._fit(folder, apart, "apart"),
                "saved plain, gone on with it": self._fit(folder, apart, "there", "plain half"),
                "saved with it, gone on plain": self._fit(folder, {}, "back", "apart half"),
            }
        off = {way: largest_gap(plain, end) for way, end in ends.items()}
        kept = all(gap <= BOUNDS[self.apart] for gap in off.values())
        return {"ok": kept, "plan": [self.apart], "steps": plain["global_step"], "off": off}

    def _fit(self, folder: Path, more: dict[str, Any], name: str, goes_on: str = "") -> dict[str, Any]:
        """Train in double precision, saving in the middle; return the checkpoint of its end."""
        module, train, held_out = TrainerRow(self.module, self.optimizer, {}, {}).fit()
        callbacks: list[Any] = [Half(folder / f"{name} half.ckpt")]
        if self.apart == "microbatch":
            callbacks.append(_Resting())
        trainer = hasten.Trainer(
            **self.flags, **more, precision="64-true", max_epochs=_EPOCHS, callbacks=callbacks, default_root_dir=folder,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        torch.manual_seed(5)
        trainer.fit(module, train, held_out, ckpt_path=folder / f"{goes_on}.ckpt" if goes_on else None)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        return read(folder / f"{name}.ckpt")


class Half(hasten.callbacks.Callback):
    """Saves when the first epoch is over."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.current_epoch:
            trainer.save_checkpoint(self._path)


def largest_gap(
    one: Mapping[str, Any], other: Mapping[str, Any], compared: Iterable[str] = ("state_dict", "optimizer_states")
) -> float:
    """Return how far tensors of two checkpoints are apart at most, as a share of the largest number of each.

    Args:
        one: A checkpoint.
        other: Another.
        compared: Their parts whose tensors count.
    """
    first, second = (dict(_tensors({name: kept[name] for name in compared})) for kept in (one, other))
    if first.keys() != second.keys():
        return float("inf")
    gaps = [0.0]
    for name, tensor in first.items():
        size = max(float(tensor.abs().max()), 1e-30) if tensor.numel() else 1.0
        same = torch.equal(tensor, second[name])  # also of infinities
        gap = 0.0 if same else float((tensor.double() - second[name].double()).abs().max()) / size
        gaps.append(gap if gap == gap else float("inf"))  # NaN would be less than any
    return max(gaps)


def _tensors(kept: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(kept, torch.Tensor):
        yield place, kept
    parts = kept.items() if isinstance(kept, Mapping) else enumerate(kept) if isinstance(kept, list) else ()
    for name, inside in parts:
        yield from _tensors(inside, f"{place}.{name}")


def rows() -> list[StepRow]:
    """Return rows in which each pair of flags, modules and optimizers that can meet does."""
    return cover(_throw)


def _throw(draw: random.Random) -> StepRow | None:
    module, optimizer = draw.choice(["table", "images", "text"]), draw.choice(["adamw", "sgd with a schedule"])
    apart = draw.choice(list(APART))
    on = {name for name in _BESIDE if draw.random() < 0.5}
    on -= {"activation_checkpointing"} if module != "text" else set()
    on -= {"channels_last"} if module != "images" else set()
    on -= set(_GATHER) if apart == "optimizer_in_backward" else set()
    on -= {"gradient_clip_algorithm"} if "gradient_clip_val" not in on else set()
    return StepRow(module, optimizer, apart, {name: _BESIDE[name] for name in _BESIDE if name in on})
