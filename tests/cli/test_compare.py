"""`hasten compare`, as a process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.doctor.diagnose import diagnose
from tests.doctor.views import diagnoses
from tests.taps.forks import command
from tests.taps.scripts import Done


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the same again, and one that is 12 % slower."""
    folder = tmp_path_factory.mktemp("runs")
    diagnose(diagnoses.evidence()).write(folder / "main.json")
    diagnoses.evidence(seed=1).write(folder / "again.json")
    diagnose(diagnoses.evidence(mean=0.0512 * 1.12, seed=2)).write(folder / "slow.json")
    diagnose(diagnoses.evidence(12)).write(folder / "short.json")
    (folder / "bad.json").write_text("{")
    return folder


def hasten(folder: Path, *arguments: str) -> Done:
    return command(folder, "compare", *arguments)


def test_numbers_that_no_run_leaves_are_one_message(runs):
    data = json.loads((runs / "main.json").read_text())
    (runs / "strange.json").write_text(json.dumps({**data, "blocks": [1e308] * 5, "step": -1e308, "phases": {"x": 1}}))
    (runs / "deep.json").write_text("[" * 10**5)
    for name in ("strange.json", "deep.json"):
        done = hasten(runs, "main.json", name)
        assert "Traceback" not in done.err
        assert name in done.err or done.code == 0


def test_slower_beyond_the_limit_is_exit_code_one(runs):
    done = hasten(runs, "main.json", "slow.json", "--fail-if-slower", "5%", "--json", "out.json")
    assert done.code == 1, done.err
    assert "SLOWER by more than 5 %" in done.out
    assert "95 % interval" in done.out
    assert "data wait" in done.out
    written = json.loads((runs / "out.json").read_text())
    assert written["schema"] == "hasten-comparison/1"
    assert written["typical"]["ratio"] > 1.05
    assert written["typical"]["low"] > 1


def test_evidence_and_diagnosis_can_be_mixed_and_the_same_again_is_not_slower(runs):
    done = hasten(runs, "main.json", "again.json", "--fail-if-slower", "5%")
    assert done.code == 0, done.out
    assert "Not slower by more than 5 %" in done.out


def test_without_a_limit_slower_is_no_failure(runs):
    done = hasten(runs, "main.json", "slow.json")
    assert done.code == 0
    assert "The typical step takes" in done.out
    assert "SLOWER" not in done.out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("main.json", "nowhere.json"), "no file nowhere.json"),
        (("main.json", "bad.json"), "bad.json is not JSON"),
        (("main.json", "slow.json", "--fail-if-slower", "0.05"), "write it as 5%"),
        (("main.json", "slow.json", "--fail-if-slower=-5%"), "not a percentage"),
        (("main.json", "slow.json", "--fail-if-slower", ""), "not a percentage"),
        (("main.json", "slow.json", "--fail-if-slower", "1" * 400 + "%"), "not a percentage"),
        (("main.json", "short.json", "--fail-if-slower", "5%"), "too few steady steps to tell"),
        (("main.json", "slow.json", "--json", "no/such/out.json"), "cannot write the comparison"),
        (("main.json",), "AFTER"),
    ],
)
def test_bad_input_is_exit_code_two(runs, arguments, why):
    done = hasten(runs, *arguments)
    assert done.code == 2
    assert why in done.err
    assert "Traceback" not in done.err


def test_the_help_tells_the_rule_and_the_exit_codes(runs):
    text = " ".join(hasten(runs, "--help").out.split())
    assert "Exit codes: 0 not slower, or nothing was asked; 1 slower; 2 bad input" in text
    assert "95 % interval" in text
