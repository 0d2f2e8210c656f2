"""docs/report-schema.md says what the code writes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from hasten.check.agreement import Agreement
from hasten.check.judge import Difference, RunComparison
from hasten.check.result import CheckResult
from hasten.evidence import Machine
from hasten.tuner import proof

PAGE = (Path(__file__).parents[2] / "docs" / "report-schema.md").read_text(encoding="utf-8")
PARTS = (
    Machine,
    proof.Ratio,
    proof.FullRun,
    Agreement,
    proof.ParityCheck,
    proof.Parity,
    proof.Memory,
    proof.KeptTechnique,
    proof.TriedSetting,
    proof.Skipped,
    proof.Block,
    proof.MachineNoise,
    proof.Pair,
    proof.Curves,
    proof.TrialRow,
    CheckResult,
    RunComparison,
    Difference,
    proof.Proof,
)


def test_every_field_is_documented():
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    documented = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", " ".join(rows)))))
    fields = {field.name for part in PARTS for field in dataclasses.fields(part)}
    assert fields - documented == set()


def test_the_version_is_the_one_described():
    assert f"`{proof.SCHEMA}`" in PAGE


def test_the_example_is_a_report(tmp_path: Path):
    example = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert example
    path = tmp_path / "hasten-report.json"
    path.write_text(example[1])
    read = proof.Proof.read(path)
    assert json.loads(read.to_json()) == json.loads(example[1])
