"""Which trainings and plans are put together, so that every pair that can meet does meet at least once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.exact.cover import Pair, cover, pairs_of
from benchmarks.exact.trainings import DATA, EXTRAS, FILES, MANY_CLASSES, MODELS, OPTIMIZERS, training
from hasten.techniques import CATALOGUE

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
ON_FILES: dict[str, Any] = {"read_ahead": 2}
"""Techniques that act on folders of files only: they meet the others in rows of their own."""
FOR_MEMORY: dict[str, Any] = {"chunked_loss": True, "optimizer_in_backward": True}
"""Techniques that act on few of the trainings above, so in rows of their own: those with many classes, and those that
do nothing to gradients between a backward and its step."""
ELSEWHERE = {
    "allocator": "acts when a process starts: compared in processes of its own",
    "pin_memory": "needs a GPU",
    "device_prefetch": "needs a GPU",
    "cudnn_benchmark": "needs a GPU",
    "fp8": "needs a GPU and torchao; emulated on a CPU: see `tests/techniques/test_fp8.py`",
    "host_embeddings": "needs a GPU; its paths on a CPU: see `tests/techniques/test_host_embeddings.py`",
    "activation_offload": "needs a GPU; its copies on a CPU: see `tests/techniques/test_activation_offload.py`",
}
TRAJECTORY = {
    "lr_scale": "the script with that learning rate written in it: equal to the bit, beside other techniques as well",
    "batch_scale": "the script with that batch size, and the rate times the factor (SGD) or its square root (Adam): "
    "equal to the bit",
    "schedule": "the script with torch's own scheduler in it: weights within 1e-6",
}
"""Techniques that change the optimisation path: what `tests/techniques/test_<name>.py` holds them to instead."""


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
        return [*self.features_of([self.model], [self.optimizer], [self.data], self.extras), *self.plan]

    @staticmethod
    def features_of(
        models: Iterable[str], optimizers: Iterable[str], data: Iterable[str], extras: Iterable[str]
    ) -> list[str]:
        """Return the names that parts of trainings have as features."""
        kinds = {"model": models, "optimizer": optimizers, "data": data, "loop": extras}
        return [f"{kind} {name}" for kind, names in kinds.items() for name in names]


def acts(technique: str, model: str, optimizer: str, data: str, extras: Iterable[str]) -> bool:
    """Whether a technique finds something to act on in a training."""
    needs: dict[str, bool] = {
        "sample_cache": data == "repeated" or data in FILES,
        "read_ahead": data in FILES,
        "batched_fetch": data == "tensors",
        "debug_off": "anomaly" in extras,
        "no_grad_validation": "graphs in validation" in extras,
        "fused_optimizer": optimizer != "lbfgs" and model != "sparse",
        "set_to_none": "zeros" in extras and model == "mlp",
        "precision": optimizer != "lbfgs",  # its line search compares losses that differ by less than bf16 can tell
        "channels_last": model == "convolutions",
        "attention": model == "attention",
        "activation_checkpointing": model == "attention",
        "chunked_loss": MANY_CLASSES in extras,
        # Several optimizers and closures it leaves alone; the rest would end in an error.
        "optimizer_in_backward": optimizer in ("sgd", "adamw", "adagrad")
        and not {"clipping", "accumulation", "zeros"} & set(extras),
    }
    return needs.get(technique, True)


def fits(model: str, optimizer: str, extras: Iterable[str]) -> bool:
    """Whether a training of these parts runs at all in plain Python."""
    if (model == "sparse") != (optimizer == "sparse"):
        return False
    if model == "sparse" and {"clipping", "zeros"} & set(extras):
        return False  # norms and zeros of sparse gradients are no part of torch's optimizers
    if MANY_CLASSES in extras and model not in ("recurrence", "attention", "sparse"):
        return False
    return not (optimizer in ("closure", "lbfgs") and "accumulation" in extras)


def covering(
    techniques: Iterable[str], seed: int = 0, among: set[Pair] | None = None, data: Iterable[str] = DATA
) -> list[Row]:
    """Return rows in which every pair that can meet does: of techniques, and of these with parts of trainings.

    Args:
        techniques: Those to choose from.
        seed: Of the rows that are thrown.
        among: Only these pairs count; None: all.
        data: Kinds of data sets to choose from.
    """
    chosen, kinds = list(techniques), list(data)
    return cover(lambda draw: _throw(draw, chosen, kinds), seed, among)


def with_compile(kinds: bool = True) -> list[Row]:
    """Return rows in which `compile` meets every technique that it can.

    Args:
        kinds: Every kind of model, optimizer, data set and loop as well.
    """
    names = list(SETTINGS)
    among = pairs_of(names)
    if kinds:  # all that can meet: found by a covering of everything
        among |= {pair for row in covering(names, seed=1) for pair in pairs_of(row.features())}
    return covering(names, among={pair for pair in among if "compile" in pair})


def on_files(techniques: Iterable[str]) -> list[Row]:
    """Return rows on folders of files, in which what acts on them alone meets everything else that it can.

    Beside `loader_workers` it acts on nothing, since workers make whole samples: they are together in one row.
    """
    chosen = list(techniques)
    eager = [name for name in chosen if name not in ("loader_workers", "compile")]
    parts = Row.features_of(MODELS, OPTIMIZERS, FILES, EXTRAS)
    rows = list(alone(ON_FILES, FILES))
    for more in ([], *([name] for name in ("loader_workers", "compile") if name in chosen)):
        together = sorted([*eager, *more, *ON_FILES], key=list(CATALOGUE).index)
        met = more or [*parts, *eager, *ON_FILES]
        among = {pair for name in ON_FILES for other in met for pair in pairs_of([name, other])}
        rows += covering(together, among=among, data=FILES)
    return rows


def for_memory(techniques: Iterable[str]) -> list[Row]:
    """Return rows in which techniques of `FOR_MEMORY` meet each other and everything else that they can."""
    chosen, extras, data = list(techniques), [*EXTRAS, MANY_CLASSES], list(DATA | FILES)
    eager = [name for name in chosen if name != "compile"]
    parts = Row.features_of(MODELS, OPTIMIZERS, data, extras)
    rows = list(alone(FOR_MEMORY, extras=extras))
    for more in ([], *([name] for name in chosen if name == "compile")):
        together = sorted([*eager, *more, *ON_FILES, *FOR_MEMORY], key=list(CATALOGUE).index)
        met = more or [*parts, *eager, *ON_FILES, *FOR_MEMORY]
        among = {pair for name in FOR_MEMORY for other in met for pair in pairs_of([name, other])}

        def throw(draw: random.Random, techniques: list[str] = together) -> Row | None:
            row = _throw(draw, techniques, data, extras)
            beside = row is not None and {"read_ahead", "loader_workers"} <= row.plan.keys()
            return None if beside else row  # read_ahead does nothing there

        rows += cover(throw, among=among)
    return rows


def _throw(draw: random.Random, techniques: list[str], kinds: list[str], loops: Iterable[str] = EXTRAS) -> Row | None:
    model, optimizer, data = draw.choice(list(MODELS)), draw.choice(list(OPTIMIZERS)), draw.choice(kinds)
    extras = tuple(extra for extra in loops if draw.random() < 0.5)
    if not fits(model, optimizer, extras):
        return None
    on = [name for name in techniques if acts(name, model, optimizer, data, extras) and draw.random() < 0.8]
    settings = {**SETTINGS, **ON_FILES, **FOR_MEMORY, "allocator": "glibc"}
    if data == "augmented files":
        settings["sample_cache"] = "decoded"  # whole samples differ
    return Row(model, optimizer, data, extras, {name: settings[name] for name in on}) if on else None


def alone(techniques: Iterable[str], data: Iterable[str] = DATA, extras: Iterable[str] = EXTRAS) -> Iterator[Row]:
    """Give each technique by itself on a training where it acts."""
    draw = random.Random(1)
    for name in techniques:
        while True:
            row = _throw(draw, [name], list(data), list(extras))
            if row is not None and name in row.plan:
                yield row
                break
