"""Findings about sizes, biases and padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hasten.doctor.findings.bias_before_norm import BiasBeforeNorm
from hasten.doctor.findings.odd_sizes import OddSizes
from hasten.doctor.findings.ragged_batches import RaggedBatches
from hasten.evidence import Evidence, Finding, HowKnown, Inputs, Layer, Measurement, Severity
from tests.doctor.findings.made import evidence

HEAD = Layer(
    "head", "Linear", {"in_features": 512, "out_features": 50257}, False, (8, 128, 512), "float32",
    calls=1.0, seconds=0.002, where="/home/me/net.py:40",
)  # fmt: skip
TRIED = Measurement(
    "odd_sizes", "Linear 512 -> 50257: out_features 50257 -> 50264", "head", 0.006, 0.0045, 1.0, 9, 1.0,
    "out_features=50264",
)  # fmt: skip


def found(check: Any, seen: Evidence) -> list[Finding]:
    return list(check.findings(seen))


class TestOddSizes:
    def test_worth_is_what_rounding_up_was_measured_to_save(self) -> None:
        (finding,) = found(OddSizes, evidence(layers=(HEAD,), measured=(TRIED,)))
        assert finding.worth == pytest.approx(0.15, rel=0.01)
        assert (finding.file, finding.line, finding.where) == ("/home/me/net.py", 40, "head")
        assert "25 %" in finding.what
        assert "out_features=50264" in finding.fix

    def test_the_best_of_several_roundings_is_given_once(self) -> None:
        better = dataclasses.replace(TRIED, after=0.003, detail="out_features=50304")
        (finding,) = found(OddSizes, evidence(layers=(HEAD,), measured=(TRIED, better)))
        assert "50304" in finding.fix
        assert len(finding.details) == 2

    @pytest.mark.parametrize(
        "one",
        [
            dataclasses.replace(TRIED, after=0.007, wins=0.0),
            dataclasses.replace(TRIED, wins=0.6),
            dataclasses.replace(TRIED, after=0.00595),
            dataclasses.replace(TRIED, failed="no memory"),
        ],
    )
    def test_silent_where_rounding_up_is_no_faster(self, one: Measurement) -> None:
        assert not found(OddSizes, evidence(layers=(HEAD,), measured=(one,)))

    def test_never_recited(self) -> None:
        assert not found(OddSizes, evidence(layers=(HEAD,)))

    def test_the_batch_is_judged_over_all_layers(self) -> None:
        gains = dataclasses.replace(TRIED, what="batch 33 -> 32", where="a", detail="batch_size=32")
        loses = dataclasses.replace(gains, where="b", before=0.002, after=0.0025, wins=0.0)
        seen = evidence(loader={"batch_size": 33}, measured=(gains, loses))
        (finding,) = found(OddSizes, seen)
        assert finding.worth == pytest.approx(0.1, rel=0.01)
        assert (finding.file, finding.line) == ("/home/me/train.py", 7)
        assert not found(OddSizes, dataclasses.replace(seen, measured=(loses,)))


CONV = Layer(
    "features.0", "Conv2d", {"in_channels": 3, "out_channels": 64, "kernel_size": 3}, True, (32, 3, 32, 32), "float32",
    normed_by="features.1 (BatchNorm2d)", calls=1.0, seconds=0.001, where="/home/me/net.py:12",
)  # fmt: skip


class TestBiasBeforeNorm:
    def test_a_note_without_a_measured_gain(self) -> None:
        (finding,) = found(BiasBeforeNorm, evidence(layers=(CONV,)))
        assert (finding.severity, finding.worth) == (Severity.NOTE, None)
        assert (finding.file, finding.where) == ("", "features.0")  # the source's finding knows where it is built
        assert "BatchNorm2d" in finding.what

    def test_the_norm_may_be_named_without_its_class(self) -> None:
        layers = (dataclasses.replace(CONV, normed_by="features.1"), Layer("features.1", "BatchNorm2d"))
        assert found(BiasBeforeNorm, evidence(layers=layers))

    def test_one_finding_for_all_layers(self) -> None:
        (finding,) = found(BiasBeforeNorm, evidence(layers=(CONV, dataclasses.replace(CONV, path="features.3"))))
        assert "1 more" in finding.what
        assert len(finding.details) == 2

    def test_worth_where_it_was_measured(self) -> None:
        tried = Measurement("bias_before_norm", "without its bias", "features.0", 0.003, 0.0025, 1.0, 9)
        (finding,) = found(BiasBeforeNorm, evidence(layers=(CONV,), measured=(tried,)))
        assert finding.worth == pytest.approx(0.05, rel=0.01)
        assert finding.how_known is HowKnown.MEASURED

    @pytest.mark.parametrize(
        "changes",
        [{"bias": False}, {"normed_by": ""}, {"normed_by": "norm (LayerNorm)"}, {"kind": "Embedding"}],
    )
    def test_silent(self, changes: dict[str, Any]) -> None:
        assert not found(BiasBeforeNorm, evidence(layers=(dataclasses.replace(CONV, **changes),)))


TOKENS = Inputs((((32, 128), 100),), 100, "int64", padding=0.5)
TEXT: dict[str, Any] = {"model": {"layers": {"Embedding": 1, "Linear": 2}}}


class TestRaggedBatches:
    def test_worth_is_the_paddings_share(self) -> None:
        (finding,) = found(RaggedBatches, evidence(**TEXT, inputs=TOKENS))
        assert finding.worth == pytest.approx(0.8 * 0.5 * 0.9, rel=0.01)
        assert "50 %" in finding.what
        assert finding.line == 7

    @pytest.mark.parametrize(
        "changes",
        [{"padding": 0.05}, {"dtype": "float32"}, {"shapes": (((32, 4), 100),)}],
    )
    def test_silent(self, changes: dict[str, Any]) -> None:
        assert not found(RaggedBatches, evidence(**TEXT, inputs=dataclasses.replace(TOKENS, **changes)))

    def test_silent_without_tokens(self) -> None:
        assert not found(RaggedBatches, evidence(inputs=TOKENS))
        assert not found(RaggedBatches, evidence(**TEXT))
