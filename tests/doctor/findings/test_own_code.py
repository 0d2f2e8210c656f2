"""What scripts of others had that no guide names: own code, float64, gradients for nothing, too few threads."""

from __future__ import annotations

import dataclasses

import pytest

from hasten.doctor.diagnose import diagnose
from hasten.doctor.findings.dense_embedding_gradients import DenseEmbeddingGradients
from hasten.doctor.findings.double_precision import DoublePrecision
from hasten.doctor.findings.few_threads import FewThreads
from hasten.doctor.findings.frequent_validation import FrequentValidation
from hasten.doctor.findings.own_code import OwnCode
from hasten.doctor.findings.unused_gradients import UnusedGradients
from hasten.doctor.views.wording import hot_lines
from hasten.evidence import (
    PHASES,
    Event,
    Evidence,
    Finding,
    HowKnown,
    Layer,
    Measurement,
    Operator,
    Sampled,
    SampledLine,
    Severity,
)
from tests.doctor.findings.made import evidence, use

# Of 20 ms, 8 are the script's own.
OWN = {"data": 0.0, "forward": 0.004, "backward": 0.007, "optimizer": 0.001, "other": 0.008}
LINES = (
    SampledLine("train.py:31", "main", "backward", 0.35, 70, True),
    SampledLine("train.py:12", "confusion", "other", 0.20, 40),
    SampledLine("train.py:40", "main", "other", 0.10, 20, True),
    SampledLine("train.py:13", "confusion", "other", 0.05, 10),
    SampledLine("train.py:41", "main", "other", 0.05, 9, True),
)


def own(**changes: object) -> list[Finding]:
    return list(OwnCode.findings(evidence(**{"phases": OWN, "lines": LINES, **changes})))  # type: ignore[arg-type]


def test_functions_as_a_whole_and_lines_of_the_loop_alone() -> None:
    function, line = own()
    assert (function.file, function.line) == ("train.py", 12)
    assert function.what.startswith("confusion() takes 25 % of the step")
    assert function.worth == pytest.approx(0.4 * 25 / 40)
    assert function.details == ("line 12: 20 % of the step", "line 13: 5 % of the step")
    assert (function.severity, function.how_known) == (Severity.HIGH, HowKnown.MEASURED)
    assert (line.line, line.details) == (40, ())
    assert line.what.startswith("this line of the training loop takes 10 %")


def test_what_computes_is_not_the_scripts_own() -> None:
    """The loss in the line of the model's call; clearing gradients, which is torch's Python."""
    lines = (
        SampledLine("train.py:31", "main", "forward", 0.35, 70, True),
        SampledLine("train.py:31", "main", "other", 0.20, 40, True),
        SampledLine("train.py:30", "main", "other", 0.20, 40, True, library=True),
        SampledLine("train.py:9", "confusion", "other", 0.20, 40, library=True),
    )
    (found,) = own(lines=lines)
    assert found.line == 9
    assert found.worth == pytest.approx(0.4 / 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"lines": ()},
        {"lines": LINES[:1]},
        {"lines": (SampledLine("train.py:12", "confusion", "other", 0.4, 3),)},  # seen too rarely
        {"phases": {**OWN, "other": 0.001}},
        {
            "lines": (
                SampledLine("train.py:40", "main", "other", 0.2, 30, True),
                *[SampledLine(f"t.py:{n}", f"f{n}", "other", 0.1, 9) for n in range(9)],
            )
        },
    ],
)
def test_silent_without_own_code(changes: dict[str, object]) -> None:
    assert own(**changes) == []


def test_silent_where_another_finding_says_why() -> None:
    collected = Event("gc_collect", "train.py:12", 200, 200, seconds=200 * 0.005)
    names = [one.name for one in diagnose(evidence(phases=OWN, lines=LINES, events=(collected,))).findings]
    assert "garbage_collected" in names
    assert names.count("own_code") == 1  # of line 40


def test_hot_lines_in_words() -> None:
    said = hot_lines(evidence(lines=LINES))
    assert said == "train.py:31 (backward) 35 %, train.py:12 (confusion()) 20 %, train.py:40 (main()) 10 %"
    assert hot_lines(evidence(lines=LINES[4:])) == ""
    assert hot_lines(None) == ""


DOUBLE = Layer("net.0", "Linear", {"in_features": 64, "out_features": 64}, dtype="float64", where="train.py:9")


def test_float64_is_named_and_tried() -> None:
    (guessed,) = DoublePrecision.findings(evidence(layers=(DOUBLE,)))
    assert guessed.how_known is HowKnown.ESTIMATED
    tried = Measurement(
        "double_precision", "Linear 64 -> 64: computed in float32", "net.0", 0.004, 0.001, turns=20, wins=1.0
    )
    (found,) = DoublePrecision.findings(evidence(layers=(DOUBLE,), measured=(tried,)))
    assert found.worth == pytest.approx(0.75 * 0.8, rel=0.2)
    assert "75 % less time" in found.what
    assert (found.file, found.line) == ("train.py", 9)
    single = Layer("net.0", "Linear", dtype="float32")
    assert not list(DoublePrecision.findings(evidence(layers=(single,))))


def part(path: str, kind: str = "Linear", seconds: float = 0.001) -> Layer:
    sizes = {"in_features": 8, "out_features": 8} if kind == "Linear" else {"kernel_size": 2}
    return Layer(path, kind, sizes, seconds=seconds, where="train.py:5")


LAYERS = (part("body.0"), part("body.1", "AvgPool2d"), part("body.2"), part("head"))


@pytest.mark.parametrize(
    ("strays", "share"),
    [
        ((), 0.0),
        (("body.0", "body.2"), 3 / 4),  # all before the head, with what lies between
        (("body.2",), 1 / 8),  # its inputs still need gradients
        (("head",), 1 / 8),
        (("body.0", "body.2", "head"), 1.0),
    ],
)
def test_gradients_for_nothing(strays: tuple[str, ...], share: float) -> None:
    seen = evidence(phases=OWN, layers=LAYERS, strays=strays)
    found = list(UnusedGradients.findings(seen))
    assert [one.worth for one in found] == ([pytest.approx(0.35 * share)] if share else [])
    if share == 3 / 4:
        assert "torch.no_grad()" in found[0].fix
        assert "body.0 and 1 more" in found[0].what


# -- tables -------------------------------------------------------------------------------------------------

TABLE = Layer(
    "items", "Embedding", {"num_embeddings": 50_000, "embedding_dim": 32}, shape=(256,), calls=1.0, where="train.py:7"
)
SAMPLED = Sampled(operators=(Operator("aten::embedding_dense_backward", 1.0, 0.004),))


@pytest.mark.parametrize(
    ("table", "worth"),
    [
        (TABLE, (0.004 + 0.001 * 50 / 60) / 0.020),
        (dataclasses.replace(TABLE, sizes={"num_embeddings": 500, "embedding_dim": 32}), None),
        (dataclasses.replace(TABLE, shape=(256, 128)), None),  # most of its rows in each batch
    ],
)
def test_dense_gradients_of_tables(table: Layer, worth: float | None) -> None:
    seen = evidence(phases=OWN, layers=(table,), sampled=SAMPLED, optimizer={"shapes": ((50_000, 32), (10_000, 32))})
    found = list(DenseEmbeddingGradients.findings(seen))
    assert [one.worth for one in found] == ([pytest.approx(worth)] if worth else [])
    sparse = dataclasses.replace(seen, sampled=Sampled())
    assert not list(DenseEmbeddingGradients.findings(sparse))


# -- pace ---------------------------------------------------------------------------------------------------


def test_validation_that_takes_too_long() -> None:
    steps = [0.0] * 190 + [0.2] * 10
    (found,) = FrequentValidation.findings(validating(steps))
    assert found.worth == pytest.approx(0.01 / 0.02 / 2, rel=0.1)
    assert "51 % of the time, after every 19 steps" in found.what
    assert not list(FrequentValidation.findings(validating([0.01] * 200)))  # a policy that acts in each step
    assert not list(FrequentValidation.findings(validating([0.0] * 199 + [0.05])))


def validating(seconds: list[float]) -> Evidence:
    """A training of 10 ms a step, with seconds of validation in each."""
    plain = evidence(steps=len(seconds))
    place = PHASES.index("validation")
    phases = [(*step[:place], more, *step[place + 1 :]) for step, more in zip(plain.step_phases, seconds, strict=True)]
    return dataclasses.replace(plain, step_phases=tuple(phases))


LONG = Sampled(operators=(Operator("aten::addmm", 4.0, 0.008),))


@pytest.mark.parametrize(
    ("threads", "seen", "sampled", "worth"),
    [
        (1, {"cpu": 1.0}, LONG, 0.8 * 0.8 * 3 / 4),
        (4, {"cpu": 1.0}, LONG, None),
        (1, {"cpu": 3.9}, LONG, None),  # no core is idle
        (1, {"cpu": 3.5, "workers": 3.0}, LONG, None),  # loaders have the others
        (1, {"cpu": 3.3, "workers": 2.6}, LONG, None),  # nearly so
        (1, {"cpu": 1.0}, Sampled(operators=(Operator("aten::addmm", 400.0, 0.008),)), None),  # too short to be shared
    ],
)
def test_threads_for_idle_cores(threads: int, seen: dict[str, float], sampled: Sampled, worth: float | None) -> None:
    made = evidence(machine={"cores": 4}, flags={"threads": threads}, use=use(**seen), sampled=sampled)
    found = list(FewThreads.findings(made))
    assert [one.worth for one in found] == ([pytest.approx(worth, rel=0.2)] if worth else [])
    assert all("let it have 4 threads" in one.fix for one in found)
