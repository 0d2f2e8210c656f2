"""Flags of the Trainer in pairs: none keeps a training that stops in the middle from going on to the bit."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import nn

from benchmarks.exact import flag_rows
from benchmarks.exact.trainer_rows import MODULES, OTHERS
from hasten.trainer.config import Config

# There are 27 trainings. Which they are takes a second to find, so they are not found when tests are collected.
rows = functools.cache(flag_rows.rows)
_PARTS = 4  # processes of pytest may share them out
# How to tell by a module that a training is of a kind.
KINDS: dict[str, Callable[[nn.Module], bool]] = {
    "convolutions": lambda module: has(module, nn.Conv2d),
    "BatchNorm": lambda module: has(module, nn.BatchNorm2d),
    "dropout": lambda module: has(module, nn.Dropout),
    "recurrence": lambda module: has(module, nn.LSTM),
    "embeddings": lambda module: has(module, nn.Embedding),
    "sparse embeddings": lambda module: any(part.sparse for part in module.modules() if isinstance(part, nn.Embedding)),
    "attention": lambda module: has(module, nn.MultiheadAttention),
    "tied weights": lambda module: (
        len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))
    ),
    "two optimizers": lambda module: len(optimizers(module)) == 2,
    "closures": lambda module: isinstance(optimizers(module)[0], torch.optim.LBFGS),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(_PARTS))
def test_a_training_goes_on_to_the_bit_under_every_pair_of_flags(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    # For `detect_anomaly`, which keeps a stack of each operation: no look at the disk for each frame.
    monkeypatch.setattr(linecache, "checkcache", lambda filename=None: None)
    found = {row.training: row.compare() for row in rows()[part::_PARTS]}
    assert found
    assert all(row["steps"] for row in found.values())
    assert {training: row["off"] for training, row in found.items() if not row["ok"]} == {}


def test_each_flag_is_in_a_row_or_has_its_reason() -> None:
    flags = {flag.name for flag in fields(Config)}
    assert flag_rows.VALUES.keys() | flag_rows.IN_NO_ROW.keys() == flags
    assert not flag_rows.VALUES.keys() & flag_rows.IN_NO_ROW.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_training_is_in_a_row(kind: str) -> None:
    modules = [(MODULES | OTHERS)[row.module](row.optimizer) for row in rows()]
    assert any(map(KINDS[kind], modules))


def test_each_value_of_each_flag_is_in_a_row() -> None:
    """Accumulation and clipping are among them."""
    named = {(name, repr(value)) for row in rows() for name, value in row.flags.items()}
    assert {(name, repr(value)) for name, values in flag_rows.VALUES.items() for value in values} <= named


def has(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a part of a module is of this kind."""
    return any(isinstance(part, kind) for part in module.modules())


def optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers that a module configures, without their schedules."""
    configured = module.configure_optimizers()
    if isinstance(configured, tuple):
        configured, _ = configured
    return configured if isinstance(configured, list) else [configured]
