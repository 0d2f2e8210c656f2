"""`hasten compare`, as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.doctor.diagnose import diagnose
from tests.doctor.views import diagnoses


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


def hasten(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "hasten", "compare", *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_numbers_that_no_run_leaves_are_one_message(runs):
    data = json.loads((runs / "main.json").read_text())
    (runs / "strange.json").write_text(json.dumps({**data, "blocks": [1e308] * 5, "step": -1e308, "phases": {"x": 1}}))
    (runs / "deep.json").write_text("[" * 10**5)
    for name in ("strange.json", "deep.json"):
        done = hasten(runs, "main.json", name)
        assert "Traceback" not in done.stderr
        assert name in done.stderr or done.returncode == 0


def test_slower_beyond_the_limit_is_exit_code_one(runs):
    done = hasten(runs, "main.json", "slow.json", "--fail-if-slower", "5%", "--json", "out.json")
    assert done.returncode == 1, done.stderr
    assert "SLOWER by more than 5 %" in done.stdout
    assert "95 % interval" in done.stdout
    assert "data wait" in done.stdout
    written = json.loads((runs / "out.json").read_text())
    assert written["schema"] == "hasten-comparison/1"
    assert written["typical"]["ratio"] > 1.05
    assert written["typical"]["low"] > 1


def test_evidence_and_diagnosis_can_be_mixed_and_the_same_again_is_not_slower(runs):
    done = hasten(runs, "main.json", "again.json", "--fail-if-slower", "5%")
    assert done.returncode == 0, done.stdout
    assert "Not slower by more than 5 %" in done.stdout


def test_without_a_limit_slower_is_no_failure(runs):
    done = hasten(runs, "main.json", "slow.json")
    assert done.returncode == 0
    assert "The typical step takes" in done.stdout
    assert "SLOWER" not in done.stdout


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
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_tells_the_rule_and_the_exit_codes(runs):
    text = " ".join(hasten(runs, "--help").stdout.split())
    assert "Exit codes: 0 not slower, or nothing was asked; 1 slower; 2 bad input" in text
    assert "95 % interval" in text
