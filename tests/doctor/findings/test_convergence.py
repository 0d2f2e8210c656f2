"""Findings about losses and inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hasten.doctor.findings.bad_losses import BadLosses
from hasten.doctor.findings.unnormalised_inputs import UnnormalisedInputs
from hasten.evidence import Evidence, Finding, Inputs, Layer, Severity
from tests.doctor.findings.made import evidence


def found(check: Any, seen: Evidence) -> list[Finding]:
    return list(check.findings(seen))


class TestBadLosses:
    def test_high_where_the_training_did_not_recover(self) -> None:
        seen = evidence(bad_losses=5, losses=(1.0,) * 195 + (None,) * 5)
        (finding,) = found(BadLosses, seen)
        assert finding.severity is Severity.HIGH
        assert "5 of 200" in finding.what
        assert "step 196" in finding.what

    def test_medium_where_it_recovered(self) -> None:
        seen = evidence(bad_losses=1, losses=(1.0,) * 100 + (float("nan"),) + (1.0,) * 99)
        assert found(BadLosses, seen)[0].severity is Severity.MEDIUM

    def test_float16_without_a_scaler_is_named(self) -> None:
        seen = evidence(bad_losses=1, model={"autocast": "float16"})
        assert "GradScaler" in found(BadLosses, seen)[0].fix
        scaled = evidence(bad_losses=1, model={"autocast": "float16"}, flags={"grad_scaler": True})
        assert "GradScaler" not in found(BadLosses, scaled)[0].fix

    def test_silent(self) -> None:
        assert not found(BadLosses, evidence())
        assert not found(BadLosses, evidence(losses=(None,) * 200))  # no loss was seen at all


NORMAL = Inputs((((32, 3, 32, 32), 9),), 9, "float32", 0.0, 1.0, -3.0, 3.0, 0.1, 1.1)


class TestUnnormalisedInputs:
    @pytest.mark.parametrize(
        "changes",
        [
            {"mean": 120.0, "std": 60.0, "low": 0.0, "high": 255.0},
            {"mean": -7.0, "std": 1.0},
            {"mean": 0.5, "std": 25.0},
            {"mean": 0.0, "std": 1e-4},
            {"last_mean": 900.0},
            {"last_mean": 900.0, "high": None},
            {"last_std": 500.0},
        ],
    )
    def test_far_from_normal(self, changes: dict[str, Any]) -> None:
        (finding,) = found(UnnormalisedInputs, evidence(inputs=dataclasses.replace(NORMAL, **changes)))
        assert finding.severity is Severity.NOTE
        assert finding.line == 7
        assert ("255" in finding.fix) is (changes.get("high") == 255.0)

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"mean": 0.13, "std": 0.31, "low": 0.0, "high": 1.0, "last_mean": 0.13, "last_std": 0.31},  # ToTensor
            {"dtype": "uint8", "mean": 120.0, "std": 60.0},
            {"dtype": "int64", "mean": 2000.0, "std": 900.0},
            {"mean": None, "std": None},
            {"mean": float("nan")},
        ],
    )
    def test_silent(self, changes: dict[str, Any]) -> None:
        assert not found(UnnormalisedInputs, evidence(inputs=dataclasses.replace(NORMAL, **changes)))

    def test_silent_where_the_model_normalises_them(self) -> None:
        pixels = dataclasses.replace(NORMAL, mean=120.0, std=60.0)
        seen = evidence(inputs=pixels, layers=(Layer("norm", "BatchNorm2d"), Layer("conv", "Conv2d")))
        assert not found(UnnormalisedInputs, seen)
        assert not found(UnnormalisedInputs, evidence())
