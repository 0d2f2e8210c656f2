"""Findings about what a script trusts."""

from __future__ import annotations

from hasten.doctor.findings import FINDINGS
from hasten.doctor.findings.unsafe_load import UnsafeLoad
from hasten.evidence import Severity
from tests.doctor.findings.made import event, evidence


def test_unsafe_load_by_line() -> None:
    seen = evidence(events=(event("torch_load", count=1, line=3), event("torch_load", count=1, line=9)))
    findings = list(UnsafeLoad.findings(seen))
    assert sorted(finding.line for finding in findings) == [3, 9]
    assert all(finding.severity is Severity.NOTE for finding in findings)


def test_no_load_no_finding() -> None:
    assert not list(UnsafeLoad.findings(evidence(events=(event("item"),))))


def test_a_healthy_training_is_healthy() -> None:
    for seen in (evidence(), evidence(on_gpu=True)):
        assert [finding for rule in FINDINGS.values() for finding in rule.findings(seen)] == []
