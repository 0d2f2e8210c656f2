"""Findings about updates: clipping, rates, decay."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.doctor.findings.adam_with_l2 import AdamWithL2
from hasten.doctor.findings.constant_rate import ConstantRate
from hasten.doctor.findings.no_gradient_clipping import NoGradientClipping
from hasten.evidence import Evidence, Finding, Layer, Severity
from tests.doctor.findings.made import event, evidence

RECURRENT: dict[str, Any] = {"model": {"layers": {"LSTM": 1, "Linear": 1}}, "layers": (Layer("encoder", "LSTM"),)}


def found(check: Any, seen: Evidence) -> list[Finding]:
    return list(check.findings(seen))


class TestNoGradientClipping:
    def test_a_note_for_recurrent_layers(self) -> None:
        (finding,) = found(NoGradientClipping, evidence(**RECURRENT))
        assert (finding.severity, finding.where, finding.file) == (Severity.NOTE, "encoder", "")  # the source knows

    @pytest.mark.parametrize(
        "harm", [{"bad_losses": 3}, {"losses": (1.0,) * 100 + (50.0,) + (1.0,) * 99}], ids=["nan", "jump"]
    )
    def test_more_than_a_note_where_harm_was_seen(self, harm: dict[str, Any]) -> None:
        (finding,) = found(NoGradientClipping, evidence(**RECURRENT, **harm))
        assert finding.severity is Severity.MEDIUM

    @pytest.mark.parametrize("changes", [{"events": (event("clip"),)}, {"listened": "run"}])
    def test_silent_with_clipping_or_where_nobody_could_see_it(self, changes: dict[str, Any]) -> None:
        assert not found(NoGradientClipping, evidence(**RECURRENT, **changes))

    def test_silent_for_an_optimizer_by_curvature(self) -> None:
        by_curvature = evidence(**RECURRENT, optimizer={"name": "LBFGS"})
        assert not found(NoGradientClipping, by_curvature)

    def test_silent_without_recurrent_layers(self) -> None:
        assert not found(NoGradientClipping, evidence())


CONSTANT: dict[str, Any] = {"optimizer": {"schedule": "", "rates": (1e-3,)}}


class TestConstantRate:
    def test_over_several_epochs(self) -> None:
        (finding,) = found(ConstantRate, evidence(**CONSTANT, epochs=4))
        assert finding.severity is Severity.NOTE
        assert "0.001" in finding.what
        assert finding.line == 9

    def test_over_a_whole_training(self) -> None:
        assert found(ConstantRate, evidence(**CONSTANT, ended="finished"))

    def test_within_the_first_epoch_a_schedule_may_yet_begin(self) -> None:
        assert not found(ConstantRate, evidence(**CONSTANT))

    @pytest.mark.parametrize(
        "changes",
        [
            {"schedule": "StepLR", "rates": (1e-3,)},
            {"schedule": "", "rates": (1e-3, 1e-4)},
            {"schedule": "", "rates": ()},
            {"schedule": "", "rates": (1e-3,), "name": "LBFGS"},
            {"schedule": "", "rates": (1e-3,), "steps": 30},
        ],
    )
    def test_silent(self, changes: dict[str, Any]) -> None:
        assert not found(ConstantRate, evidence(optimizer=changes, epochs=4))

    def test_silent_for_two_optimizers(self) -> None:
        one = evidence(**CONSTANT).optimizers[0]
        assert not found(ConstantRate, evidence(epochs=4, optimizers=(one, one)))


class TestAdamWithL2:
    def test_adam_with_weight_decay(self) -> None:
        adam = {"name": "Adam", "options": {"lr": 1e-3, "weight_decay": 0.01}}
        (finding,) = found(AdamWithL2, evidence(optimizer=adam))
        assert finding.severity is Severity.NOTE
        assert "AdamW" in finding.fix

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("AdamW", {"weight_decay": 0.01}),
            ("Adam", {"weight_decay": 0.0}),
            ("Adam", {}),
            ("Adam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
            ("SGD", {"weight_decay": 0.01}),
        ],
    )
    def test_silent(self, name: str, options: dict[str, Any]) -> None:
        assert not found(AdamWithL2, evidence(optimizer={"name": name, "options": options}))
