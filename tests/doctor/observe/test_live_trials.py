"""What doctor switches on and off in the run itself, once it has heard enough."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hasten.doctor.findings import FINDINGS, switched
from hasten.doctor.observe import OBSERVERS
from hasten.evidence import Evidence, HowKnown, read_evidence
from hasten.taps.config import DoctorOptions, RunConfig
from tests.taps.forks import forked, parent_of_forks
from tests.taps.scripts import Done, write

MANY_TENSORS = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(4) for _ in range(150))
    def forward(self, x):
        return (torch.stack(list(self.parts)) - x).square().mean()
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
x = torch.ones(4)
while True:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
"""

ONE_CONVOLUTION = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
    def forward(self, x):
        {check}
        return self.convolution(x).mean()
model = Net()
{prepare}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(8, 3, 32, 32)
while True:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
"""


SHORT = "from hasten.doctor.observe import live_trials; live_trials._BLOCK = 0.1"
"""Blocks of a fifth of their length: what these scripts gain is seen in them too."""


def heard(folder: Path, text: str, trying: float = 20.0) -> tuple[Done, Evidence]:
    """What a script did that was listened to for 12 steps, and what was heard, with what was tried behind them."""
    write(folder, "train.py", text)
    (folder / "scratch").mkdir()
    path = folder / "scratch" / "evidence.json"  # the kernel lets it write nowhere else
    scratch = str(folder / "scratch")
    options = DoctorOptions(
        steps=12,
        seconds=90.0,
        listener=parent_of_forks(),
        scratch=scratch,
        trying=trying,
        observers=OBSERVERS,
        switched=switched(),
    )
    config = RunConfig(evidence=str(path), command=("train.py",), quiet=True, doctor=options)
    done = forked(folder, "train.py", config=config, before=SHORT)
    assert path.is_file(), done.err
    return done, read_evidence(path)


def test_a_cure_that_can_be_switched_is_measured_in_the_run_and_that_is_the_findings_worth(tmp_path: Path) -> None:
    done, evidence = heard(tmp_path, MANY_TENSORS)
    assert (done.code, evidence.ended, evidence.steps, len(evidence.step_phases)) == (0, "complete", 12, 12)
    (one,) = evidence.tried
    assert (one.finding, one.technique, one.setting, one.failed) == (
        "per_tensor_optimizer", "fused_optimizer", "true", ""
    )  # fmt: skip
    assert 1 < one.low < one.ratio < one.high
    assert (one.blocks >= 4, one.steps >= 4) == (True, True)
    (finding,) = FINDINGS["per_tensor_optimizer"].findings(evidence)
    assert (finding.worth, finding.how_known) == (one.saved, HowKnown.MEASURED)
    assert finding.details[0].startswith(f"switched on and off in this run, in {one.blocks} blocks each")
    assert (evidence.installed, evidence.optimizers[0].fused) == ({}, False)


def test_nothing_is_switched_in_a_run_that_a_person_goes_on_with() -> None:
    asked = DoctorOptions(steps=12, scratch="/scratch", trying=20.0)
    assert asked.tries
    for left_out in ({"steps": 0}, {"scratch": ""}, {"trying": 0.0}, {"sample": False}):
        assert not dataclasses.replace(asked, **left_out).tries  # type: ignore[arg-type]


def test_anomaly_detection_is_switched_off_and_on(tmp_path: Path) -> None:
    _, evidence = heard(tmp_path, "import torch\ntorch.autograd.set_detect_anomaly(True)\n" + MANY_TENSORS)
    assert evidence.flags.anomaly, "as the script has it, after the last block too"
    (one,) = [one for one in evidence.tried if one.technique == "debug_off"]
    assert (one.finding, one.failed) == ("debug_tools_on", "")
    (finding,) = FINDINGS["debug_tools_on"].findings(evidence)
    assert finding.details[0].startswith(f"switched on and off in this run, in {one.blocks} blocks each")


def test_what_there_is_no_time_for_is_said_and_gives_no_worth(tmp_path: Path) -> None:
    done, evidence = heard(tmp_path, MANY_TENSORS, trying=0.1)
    assert (done.code, evidence.ended, evidence.steps) == (0, "complete", 12)
    assert [one.failed for one in evidence.tried] == ["there was no time left for it"]
    assert evidence.tried_live("per_tensor_optimizer") is None


def test_a_cure_that_cannot_be_switched_is_named_and_the_others_are_tried(tmp_path: Path) -> None:
    lies = "model.to(memory_format=torch.channels_last)"
    done, evidence = heard(tmp_path, ONE_CONVOLUTION.format(check="pass", prepare=lies))
    assert (done.code, evidence.ended, done.err) == (0, "complete", "")
    failed = {one.technique: one.failed for one in evidence.tried}
    assert "the script lays out its images channels last itself" in failed["channels_last"]
    assert any(line.startswith("channels_last: ") for line in evidence.skipped)


def test_a_script_that_breaks_under_a_change_is_heard_all_the_same(tmp_path: Path) -> None:
    check = "model.calls = getattr(model, 'calls', 0) + 1; assert model.calls < 20, 'not so'"
    done, evidence = heard(tmp_path, ONE_CONVOLUTION.format(check=check, prepare=""))
    assert (done.code, evidence.ended, evidence.error, evidence.steps) == (0, "complete", "", 12)
    assert "the script, while changes were tried in it: AssertionError: not so" in evidence.skipped
