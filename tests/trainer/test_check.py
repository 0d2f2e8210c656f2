"""`Trainer.check`: flags and techniques of a Trainer, in pairs, against the same Trainer without techniques."""

from __future__ import annotations

import multiprocessing.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from benchmarks.exact.cover import pairs_of
from benchmarks.exact.trainer_rows import FLAGS, TECHNIQUES, Table, TrainerRow, covering, more, with_compile
from hasten.data import rng

EAGER = [name for name in TECHNIQUES if name != "compile"]
FEW = covering(EAGER, among=pairs_of(EAGER))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give slow tests their rows. They take a second to find, so not where slow tests are left out."""
    slow: dict[str, Callable[[], list[TrainerRow]]] = {
        "test_each_pair_of_flags_keeps_its_word": lambda: [*covering(EAGER), *more()],
        "test_compile_beside_each_technique_keeps_its_word": with_compile,
    }
    if rows := slow.get(metafunc.function.__name__):
        left_out = metafunc.config.option.markexpr == "not slow"
        metafunc.parametrize("row", [] if left_out else rows(), ids=lambda row: row.name)


def keeps_its_word(row: TrainerRow, folder: Path) -> None:
    """Check a row and say what parts."""
    found = row.trainer(default_root_dir=folder).check(*row.fit())
    assert found.ok, (row.name, found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", FEW, ids=lambda row: row.name)
def test_each_pair_of_techniques_keeps_its_word(row: TrainerRow, tmp_path: Path) -> None:
    keeps_its_word(row, tmp_path)


@pytest.mark.slow  # a check for each row of the covering array
@pytest.mark.timeout(900)
def test_each_pair_of_flags_keeps_its_word(row: TrainerRow, tmp_path: Path) -> None:
    keeps_its_word(row, tmp_path)


@pytest.mark.slow  # compiles C++
@pytest.mark.timeout(900)
def test_compile_beside_each_technique_keeps_its_word(row: TrainerRow, tmp_path: Path) -> None:
    keeps_its_word(row, tmp_path)


def test_every_flag_of_the_rows_is_one_of_the_trainer() -> None:
    TrainerRow("table", "adamw", FLAGS, {}).trainer()


class Doubled(Table):
    """Under bf16 its loss is another one."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return 1.3 * loss if torch.is_autocast_enabled("cpu") else loss


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(96, 20), torch.randint(0, 5, (96,))), 8, shuffle=True)


def drawn_next() -> tuple[float, float, float]:
    """What the random generators would give next; they are left as they were."""
    kept = rng.state()
    drawn = random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: NPY002 - the global one
    rng.restore(kept)
    return drawn


def test_what_parts_is_named(tmp_path: Path) -> None:
    trainer = hasten.Trainer(precision="bf16-mixed", fused_optimizer=True, default_root_dir=tmp_path, logger=False)
    found = trainer.check(Doubled("adamw"), _loader())
    assert found.ok is False
    assert found.culprits == ("precision",)
    assert found.first is not None
    assert "step 1" in f"{found.first.place} {found.first.what}" or "batch" in found.first.place, found.first


def test_a_process_that_has_had_workers_of_loaders(tmp_path: Path) -> None:
    """Its folder for sockets is not the forks': workers there could not hand over what they made."""
    assert multiprocessing.util.get_temp_dir()
    trainer = hasten.Trainer(plan=hasten.Plan({"loader_workers": 2}), default_root_dir=tmp_path, logger=False)
    assert trainer.check(Table("adamw"), _loader(), resume=False).ok


def test_nothing_is_trained_or_drawn_or_written_here(tmp_path: Path) -> None:
    module, loader = Table("adamw"), _loader()
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    before = drawn_next()
    trainer = hasten.Trainer(precision="bf16-mixed", default_root_dir=tmp_path, logger=False)
    assert trainer.check(module, loader).ok
    assert all(torch.equal(one, other) for one, other in zip(weights, module.parameters(), strict=True))
    assert drawn_next() == before
    assert list(tmp_path.iterdir()) == []
    assert isinstance(module.net, nn.Sequential)
    assert trainer.global_step == 0
