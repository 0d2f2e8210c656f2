"""Findings whose cure was switched on and off in the run itself: that is their worth."""

from __future__ import annotations

import dataclasses

import pytest

from hasten.doctor.findings import FINDINGS
from hasten.evidence import Evidence, Finding, HowKnown, LiveTrial, Measurement
from tests.doctor.findings.made import evidence

CONV = Measurement("", "Conv2d 64 -> 64, 3x3: changed", "a", 1e-3, 5e-4, 1.0, 9, 2.0)
BF16 = {"machine": {"cpu_flags": ("amx_bf16",)}, "layers": (), "model": {"layers": {"Conv2d": 2, "Linear": 1}}}
"""A CPU with bf16 instructions, and a model that has use for them."""
FOUND = [
    ("precision", "full_precision"),
    ("channels_last", "channels_first"),
    ("fused_optimizer", "per_tensor_optimizer"),
]


def tried(finding: str, technique: str, ratio: float, low: float, high: float) -> LiveTrial:
    """A technique that was tried in four blocks on each side."""
    return LiveTrial(finding, technique, "true", (), ratio, low, high, blocks=4, steps=20.0, before=0.01)


def seen(finding: str, *live: LiveTrial, alone: bool = False) -> Evidence:
    """A run in which it was tried, and in which its layers were tried by themselves unless `alone`."""
    measured = () if alone else (dataclasses.replace(CONV, finding=finding),)
    return evidence(**BF16, optimizer={"fused": False}, measured=measured, tried=live)


def of(name: str, run: Evidence) -> Finding | None:
    """The one finding of this name."""
    return next(iter(FINDINGS[name].findings(run)), None)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("technique", "name"), FOUND)
def test_a_sure_gain_is_the_worth_whatever_layers_said(technique: str, name: str, alone: bool) -> None:
    finding = of(name, seen(name, tried(name, technique, 1.33, 1.28, 1.38), alone=alone))
    assert finding is not None
    assert finding.worth == pytest.approx(1 - 1 / 1.33)
    assert finding.how_known is HowKnown.MEASURED
    assert "4 blocks each" in finding.details[0]
    assert "1.33x [1.28, 1.38]" in finding.details[0]


@pytest.mark.parametrize(("technique", "name"), FOUND)
def test_what_brings_nothing_in_the_run_is_no_finding(technique: str, name: str) -> None:
    assert of(name, seen(name)) is not None
    assert of(name, seen(name, tried(name, technique, 0.97, 0.95, 1.005))) is None


def test_where_chance_may_have_made_it_an_estimate_is_no_more_than_the_blocks_show() -> None:
    finding = of("channels_first", seen("channels_first", tried("channels_first", "channels_last", 1.03, 0.95, 1.12)))
    assert finding is not None
    assert (finding.worth, finding.how_known) == (pytest.approx(1 - 1 / 1.03), HowKnown.ESTIMATED)


def test_where_chance_may_have_made_it_a_claim_that_was_measured_stands() -> None:
    name = "per_tensor_optimizer"
    claimed = of("per_tensor_optimizer", seen(name))
    beside = of("per_tensor_optimizer", seen(name, tried(name, "fused_optimizer", 0.99, 0.5, 2.0)))
    assert claimed is not None
    assert beside is not None
    assert (beside.worth, beside.how_known) == (claimed.worth, HowKnown.MEASURED)
    assert len(beside.details) == len(claimed.details) + 1


def test_what_could_not_be_tried_leaves_all_as_it_was() -> None:
    failed = LiveTrial("channels_first", "channels_last", "true", failed="there was no time left for it")
    assert of("channels_first", seen("channels_first", failed)) == of("channels_first", seen("channels_first"))


def test_only_what_may_be_found_is_tried() -> None:
    run = evidence(**BF16)
    assert FINDINGS["full_precision"].to_try(run)["precision"] == "bf16-mixed"
    assert FINDINGS["channels_first"].to_try(run) == {"channels_last": True}
    assert FINDINGS["unfused_pointwise"].to_try(run) == {}
    assert FINDINGS["full_precision"].to_try(evidence(**{**BF16, "machine": {"cpu_flags": ()}})) == {}
    assert FINDINGS["full_precision"].to_try(evidence(**BF16, optimizer={"name": "LBFGS"})) == {}
    assert FINDINGS["per_tensor_optimizer"].to_try(evidence(optimizer={"fused": True})) == {}
