"""Findings about what a script trusts."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.doctor.checks import compute, convergence, optimization, safety, shapes
from hasten.evidence import Evidence, Severity
from hasten.techniques import CATALOGUE
from tests.doctor.checks.made import event, evidence

CHECKS = [check for room in (compute, convergence, optimization, safety, shapes) for check in room.CHECKS]
TECHNIQUES = (
    "precision", "matmul_precision", "channels_last", "compile", "cudnn_benchmark", "fused_optimizer", "debug_off",
    "attention",
)  # fmt: skip
NAMES = {
    "bias_before_norm", "odd_sizes", "full_precision", "tf32_off", "channels_first", "unfused_pointwise",
    "launch_bound", "recompilations", "graph_breaks", "cudnn_benchmark_off", "cudnn_benchmark_varying",
    "per_tensor_optimizer", "debug_tools_on", "attention_by_hand", "ragged_batches", "no_gradient_clipping",
    "constant_rate", "unnormalised_inputs", "adam_with_l2", "unsafe_load", "bad_losses",
}  # fmt: skip


def test_unsafe_load_by_line() -> None:
    seen = evidence(events=(event("torch_load", count=1, line=3), event("torch_load", count=1, line=9)))
    findings = list(safety.UnsafeLoad.findings(seen))
    assert sorted(finding.line for finding in findings) == [3, 9]
    assert all(finding.severity is Severity.NOTE for finding in findings)


def test_no_load_no_finding() -> None:
    assert not list(safety.UnsafeLoad.findings(evidence(events=(event("item"),))))


def everything_said(seen: Evidence) -> list[Any]:
    found = [finding for check in CHECKS for finding in check.findings(seen)]
    return found + [finding for name in TECHNIQUES if (finding := CATALOGUE[name].finding(seen))]


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_a_name_of_the_list_and_a_source(check: Any) -> None:
    assert check.name in NAMES
    assert check.sources


def test_a_healthy_training_is_healthy() -> None:
    assert everything_said(evidence()) == []
    assert everything_said(evidence(on_gpu=True)) == []
