"""Techniques with planted defects, on real trainings: each is found and named, and honest ones pass the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.exact.trainings import training
from hasten.evidence import read_evidence
from hasten.plan import Setting
from hasten.taps.config import RunConfig, TrialOptions
from hasten.tuner.parity import parity_of
from hasten.tuner.proof import Answer
from hasten.tuner.trial import Trial
from tests.check.conftest import Check, check, short  # noqa: F401 - fixtures
from tests.taps.forks import run_in_fork

Pairs = Callable[..., list[tuple[Trial, Trial]]]

HONEST: dict[str, Setting] = {"precision": "bf16-mixed", "fused_optimizer": True, "channels_last": True}

# Images of five kinds that a small network tells apart within some hundred steps.
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
kinds = torch.randn(5, 3, 8, 8)
labels = torch.randint(0, 5, (2000,))
images = 0.5 * kinds[labels] + torch.randn(2000, 3, 8, 8)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(),
    nn.Flatten(), nn.Linear(64, 5),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
train = DataLoader(TensorDataset(images[:1900], labels[:1900]), batch_size=16, shuffle=True)
test = DataLoader(TensorDataset(images[1900:], labels[1900:]), batch_size=50)
for epoch in range(4):
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for x, y in test:
            nn.functional.cross_entropy(model(x), y)
    model.train()
"""
WHOLE = SCRIPT.replace("BATCHES", "train")
# A hundred steps an epoch, whatever the loader gives: the number of batches tells nothing.
COUNTED = SCRIPT.replace("BATCHES", "first_hundred(train)").replace(
    "torch.manual_seed(1)",
    """
def first_hundred(loader):
    for number, batch in enumerate(loader, 1):
        yield batch
        if number == 100:
            return
torch.manual_seed(1)""",
)


_plain: dict[tuple[str, int], Trial] = {}  # a script as it is, by its seed: several tests compare plans with it


@pytest.fixture
def pairs(tmp_path: Path) -> Pairs:
    """Run pairs of trials, one a seed: the script as it is, and under a plan."""

    def run(script: str, plan: Mapping[str, Setting], seeds: int, first: int = 0) -> list[tuple[Trial, Trial]]:
        (tmp_path / "train.py").write_text(script)
        made = []
        for seed in range(first, first + seeds):
            if (script, seed) not in _plain:
                _plain[script, seed] = one(tmp_path, {}, seed)
            made.append((_plain[script, seed], one(tmp_path, plan, seed)))
        return made

    return run


def one(here: Path, plan: Mapping[str, Setting], seed: int) -> Trial:
    """Run a trial as `Trials` does, in a fork that knows the planted techniques."""
    folder = here / f"{'plan' if plan else 'plain'}-{seed}"
    folder.mkdir(exist_ok=True)
    options = TrialOptions(str(folder), batches=120, epochs=2, steps=240, seed=seed)
    config = RunConfig(dict(plan), str(folder / "evidence.json"), ("train.py",), options, quiet=True)
    log = folder / "log"
    code = run_in_fork(here / "train.py", here, log, log, config=config)
    assert code == 0, log.read_text()
    evidence = read_evidence(folder / "evidence.json")
    assert plan.keys() & HONEST.keys() <= evidence.installed.keys()
    return Trial(dict(plan), seed, "nan" if evidence.bad_losses else "ok", 1.0, evidence=evidence)


# -- an honest plan ---------------------------------------------------------------------------------------------------


def test_an_honest_plan_holds(pairs: Pairs) -> None:
    found = parity_of(pairs(WHOLE, HONEST, 3), ("rounding",))
    assert found.answer is Answer.HOLDS, found
    assert found.checks[0].detectable < 0.03
    assert {compared.what for compared in found.checks} == {"training loss", "validation loss", "batches a pass"}


@pytest.mark.slow  # many pairs of trainings
@pytest.mark.parametrize("first", range(0, 30, 3))
def test_an_honest_plan_is_never_refused(pairs: Pairs, first: int) -> None:
    made = pairs(WHOLE, HONEST, 3, first)
    for chosen in (made, made[:2], *([pair] for pair in made)):
        assert parity_of(chosen, ("rounding",)).answer is not Answer.DOES_NOT


@pytest.mark.timeout(300)
# slow: many pairs of trainings
@pytest.mark.parametrize("model", ["convolutions", pytest.param("attention", marks=pytest.mark.slow)])
def test_an_honest_plan_agrees_on_the_same_batches(check: Check, model: str) -> None:  # noqa: F811
    found = check(training(model), HONEST)
    agreement = found.agreed
    assert found.ok
    assert agreement is not None
    assert agreement.steps == 12
    assert agreement.allowed is not None
    assert 0 < agreement.gradient_gap <= agreement.allowed
    assert agreement.cosine > 0.99
    assert 0 < agreement.loss_gap < 0.02


def test_what_is_equal_to_the_bit_agrees_entirely(check: Check) -> None:  # noqa: F811
    agreement = check(training(), {"leaves_alone": True}).agreed
    assert agreement is not None
    assert (agreement.steps, agreement.loss_gap, agreement.cosine, agreement.gradient_gap) == (12, 0.0, 1.0, 0.0)
    assert check(training(), {}).agreed is None


# -- defects ----------------------------------------------------------------------------------------------------------


def test_a_layers_gradient_scaled_by_nine_tenths_is_seen_in_the_agreement(check: Check) -> None:  # noqa: F811
    found = check(training("convolutions"), {"leaves_alone": True, "scales_a_gradient": True})
    agreement = found.agreed
    assert found.ok is False
    assert found.culprits == ("scales_a_gradient",)
    assert agreement is not None
    assert agreement.worst == "Net.stem.0.weight"
    assert agreement.allowed is not None
    assert agreement.gradient_gap == pytest.approx(0.1, abs=0.02)
    assert agreement.gradient_gap > agreement.allowed


def test_every_fiftieth_batch_left_out_does_not_hold(pairs: Pairs) -> None:
    plan: dict[str, Setting] = {"fused_optimizer": True, "drops_every_fiftieth": True}
    found = parity_of(pairs(WHOLE, plan, 1), ("exact", "rounding"))
    assert found.answer is Answer.DOES_NOT
    assert "117 batches in a pass under the plan and 119 without it" in found.note


def test_every_fiftieth_batch_left_out_is_known_by_the_losses_that_follow(pairs: Pairs) -> None:
    plan: dict[str, Setting] = {"drops_every_fiftieth": True}
    found = parity_of(pairs(COUNTED, plan, 1), ("exact",))
    assert found.answer is Answer.DOES_NOT
    assert "the plan leaves batches out" in found.note
    assert parity_of(pairs(COUNTED, HONEST, 1), ("rounding",)).answer is not Answer.DOES_NOT


def test_weights_in_bf16_without_master_copies_do_not_hold(pairs: Pairs) -> None:
    """The check finds them too; here it is the losses that tell."""
    parity = parity_of(pairs(WHOLE, {"fused_optimizer": True, "narrow_weights": True}, 3), ("rounding",))
    assert parity.answer is Answer.DOES_NOT, parity
    assert "the training loss is higher under the plan" in parity.note
