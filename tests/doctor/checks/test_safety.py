"""Findings about what a script trusts; and that no finding of these rooms ever raises."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hasten.doctor.checks import compute, convergence, optimization, safety, shapes
from hasten.doctor.jobs import jobs
from hasten.evidence import Evidence, Measurement, Severity
from hasten.techniques import CATALOGUE
from tests.doctor.checks.made import event, evidence, evidences

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


_times = st.floats(0.0, 10.0)
_measured = st.lists(
    st.builds(
        Measurement, st.sampled_from(sorted(NAMES)), st.just("Linear 3 -> 4: changed"),
        st.sampled_from(["", "a", "a.b and 3 like it", "/home/me/train.py:4", "anomaly"]), _times, _times,
        st.floats(0.0, 1.0), st.integers(0, 30), st.floats(0.0, 100.0), st.sampled_from(["", "batch_size=8"]),
        st.sampled_from(["", "", "no memory"]),
    ),
    max_size=6,
).map(tuple)  # fmt: skip


def everything_said(seen: Evidence) -> list[Any]:
    found = [finding for check in CHECKS for finding in check.findings(seen)]
    return found + [finding for name in TECHNIQUES if (finding := CATALOGUE[name].finding(seen))]


@settings(
    max_examples=50,
    deadline=None,
    phases=(Phase.reuse, Phase.generate),  # making such evidence smaller takes minutes
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
)
@given(seen=evidences(), measured=_measured)
def test_no_evidence_makes_a_finding_raise(seen: Evidence, measured: tuple[Measurement, ...]) -> None:
    seen = dataclasses.replace(seen, measured=measured)
    jobs(seen)
    for finding in everything_said(seen):
        assert finding.name in NAMES
        assert finding.worth is None or 0.01 <= finding.worth <= 1.0 or finding.name == "debug_tools_on"
        assert finding.worth is None or 0.0 <= finding.worth <= 1.0
        assert finding.what
        assert not finding.what.endswith(".")
        assert finding.fix


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_a_name_of_the_list_and_a_source(check: Any) -> None:
    assert check.name in NAMES
    assert check.sources


def test_a_healthy_training_is_healthy() -> None:
    assert everything_said(evidence()) == []
    assert everything_said(evidence(on_gpu=True)) == []
