"""Which trainings and plans are put together, so that every pair that can meet does meet at least once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.exact.cover import Pair, cover
from benchmarks.exact.trainings import DATA, EXTRAS, MODELS, OPTIMIZERS, training

SETTINGS: dict[str, Any] = {
    "sample_cache": "samples",
    "batched_fetch": True,
    "loader_workers": 2,
    "debug_off": True,
    "no_grad_validation": True,
    "cpu_threads": 1,
    "matmul_precision": "medium",
    "fused_optimizer": True,
    "set_to_none": True,
    "precision": "bf16-mixed",
    "channels_last": True,
    "attention": "math",
    "activation_checkpointing": True,
    "compile": "default",
}
ELSEWHERE = {
    "allocator": "acts when a process starts: compared in processes of its own",
    "read_ahead": "acts on folders of files: compared in `tests/techniques/test_read_ahead.py`",
    "pin_memory": "needs a GPU",
    "device_prefetch": "needs a GPU",
    "cudnn_benchmark": "needs a GPU",
    "batch_scale": "changes the optimisation path: judged by the time to a target",
    "lr_scale": "changes the optimisation path: judged by the time to a target",
    "schedule": "changes the optimisation path: judged by the time to a target",
}


@dataclass(frozen=True)
class Row:
    """One training and the plan it is checked under."""

    model: str
    optimizer: str
    data: str
    extras: tuple[str, ...]
    plan: dict[str, Any] = field(hash=False)

    @property
    def script(self) -> str:
        """The training's source."""
        return training(self.model, self.optimizer, self.data, self.extras)

    @property
    def name(self) -> str:
        """The training in a few words."""
        return ", ".join((self.model, self.optimizer, self.data, *self.extras))

    def features(self) -> list[str]:
        """What can meet in pairs: parts of the training, and techniques."""
        parts = [f"model {self.model}", f"optimizer {self.optimizer}", f"data {self.data}"]
        return [*parts, *(f"loop {extra}" for extra in self.extras), *self.plan]


def acts(technique: str, model: str, optimizer: str, data: str, extras: Iterable[str]) -> bool:
    """Whether a technique finds something to act on in a training."""
    needs: dict[str, bool] = {
        "sample_cache": data == "repeated",
        "batched_fetch": data == "tensors",
        "debug_off": "anomaly" in extras,
        "no_grad_validation": "graphs in validation" in extras,
        "fused_optimizer": optimizer != "lbfgs" and model != "sparse",
        "set_to_none": "zeros" in extras and model == "mlp",
        "precision": optimizer != "lbfgs",  # its line search compares losses that differ by less than bf16 can tell
        "channels_last": model == "convolutions",
        "attention": model == "attention",
        "activation_checkpointing": model == "attention",
    }
    return needs.get(technique, True)


def fits(model: str, optimizer: str, extras: Iterable[str]) -> bool:
    """Whether a training of these parts runs at all in plain Python."""
    if (model == "sparse") != (optimizer == "sparse"):
        return False
    if model == "sparse" and {"clipping", "zeros"} & set(extras):
        return False  # norms and zeros of sparse gradients are no part of torch's optimizers
    return not (optimizer in ("closure", "lbfgs") and "accumulation" in extras)


def covering(techniques: Iterable[str], seed: int = 0, among: set[Pair] | None = None) -> list[Row]:
    """Return rows in which every pair that can meet does: of techniques, and of these with parts of trainings.

    Args:
        techniques: Those to choose from.
        seed: Of the rows that are thrown.
        among: Only these pairs count; None: all.
    """
    chosen = list(techniques)
    return cover(lambda draw: _throw(draw, chosen), seed, among)


def _throw(draw: random.Random, techniques: list[str]) -> Row | None:
    model, optimizer, data = draw.choice(list(MODELS)), draw.choice(list(OPTIMIZERS)), draw.choice(list(DATA))
    extras = tuple(extra for extra in EXTRAS if draw.random() < 0.5)
    if not fits(model, optimizer, extras):
        return None
    on = [name for name in techniques if acts(name, model, optimizer, data, extras) and draw.random() < 0.8]
    settings = {**SETTINGS, "allocator": "glibc"}
    return Row(model, optimizer, data, extras, {name: settings[name] for name in on}) if on else None


def alone(techniques: Iterable[str]) -> Iterator[Row]:
    """Give each technique by itself on a training where it acts."""
    draw = random.Random(1)
    for name in techniques:
        while True:
            row = _throw(draw, [name])
            if row is not None and name in row.plan:
                yield row
                break
