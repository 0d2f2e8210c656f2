"""The technique that a finding names cures it: the finding is seen in a script, and under the technique it is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hasten.doctor.findings import FINDINGS
from hasten.doctor.observe import OBSERVERS
from hasten.evidence import Evidence, LiveTrial, Sampled, read_evidence
from hasten.plan import Setting
from hasten.taps.config import DoctorOptions, RunConfig
from tests.doctor.findings.made import event, evidence, use
from tests.doctor.findings.test_compute import CONV, PRODUCTS, measured
from tests.doctor.findings.test_memory import faulting
from tests.taps.forks import forked
from tests.taps.scripts import write

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
class Slow(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, index):
        sum(range(50_000))
        return torch.full((64,), float(index)), index % 10
loader = [(torch.randn(4, 64), torch.zeros(4, dtype=torch.long))] * 40
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
SLOW = "loader = DataLoader(Slow(), 8, shuffle=True)\n"
FILES = """
def decode(number):
    sum(range(50_000))
    return torch.full((64,), float(number))
class Files(Slow):
    def __init__(self):
        self.loader = decode
    def __getitem__(self, index):
        return self.loader(index), index % 10
loader = DataLoader(Files(), 16, shuffle=True)
"""
LARGE = """
loader = [(torch.randn(4, 1024), torch.zeros(4, dtype=torch.long))] * 20
model = nn.Sequential(nn.Linear(1024, 1024))
"""
IMAGES = """
loader = [(torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))] * 20
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))
"""
WORDS = """
loader = [(torch.randn(1024, 16), torch.zeros(1024, dtype=torch.long))] * 2
model = nn.Linear(16, 2 ** 15)
"""
SCRIPTS: dict[str, tuple[Setting, str]] = {
    "workers_zero": ({"num_workers": 2}, SLOW + TRAIN),
    "samples_recomputed": ("samples", SLOW + TRAIN),
    "decoded_in_turn": (2, FILES + TRAIN),
    "sample_by_sample": (
        True,
        "data = TensorDataset(torch.randn(8000, 64), torch.zeros(8000, dtype=torch.long))\n"
        "loader = DataLoader(data, 500, shuffle=True)\n" + TRAIN,
    ),
    "zeroed_gradients": (True, LARGE + TRAIN.replace("zero_grad()", "zero_grad(set_to_none=False)")),
    "debug_tools_on": (True, "torch.autograd.set_detect_anomaly(True)\n" + TRAIN),
    "validation_graphs": (True, TRAIN + "model.eval()\nfor x, y in loader:\n    model(x)\n"),
    "per_tensor_optimizer": (True, TRAIN),
    "channels_first": (True, IMAGES + TRAIN),
    "full_precision": ("bf16-mixed", TRAIN),
    "large_logits": (True, WORDS + TRAIN.replace("range(3)", "range(1)")),
}
"""Findings whose cure acts on a CPU: its setting, and a script."""
TRIED = {"per_tensor_optimizer", "channels_first", "full_precision"}
"""Those that are given where trying their cure showed a gain."""
MADE = {
    "allocator": evidence(memory=faulting(2000, 0.002)),
    "threads_oversubscribed": evidence(use=use(cpu=4.0, workers=3.0)),
    "unfused_pointwise": evidence(sampled=Sampled((3,), pointwise_calls=40.0, pointwise_seconds=0.005)),
    "tf32_off": evidence(on_gpu=True, sampled=Sampled((3,), PRODUCTS)),
    "cudnn_benchmark_off": evidence(on_gpu=True, measured=measured("cudnn_benchmark_off", CONV)),
    "device_prefetch": evidence(on_gpu=True, phases={"transfer": 0.0025}, device_clock=True),
    "pageable_memory": evidence(
        on_gpu=True,
        loader={"pin_memory": False},
        events=(event("blocking_copy", 0.6, detail="pageable", device="cuda"),),
        sampled=Sampled((20,), device_busy=0.5),
    ),
}
"""Findings whose cure needs a GPU, a compiler or another start of the process: evidence that shows them."""


def run(folder: Path, name: str, techniques: dict[str, Setting]) -> Evidence:
    """What a script leaves behind with these techniques installed, as doctor listens to it."""
    folder.mkdir()
    write(folder, "train.py", HEAD + SCRIPTS[name][1])
    options = DoctorOptions(steps=0, seconds=0, sample=False, observers=OBSERVERS)
    config = RunConfig(techniques, str(folder / "evidence.json"), ("train.py",), quiet=True, doctor=options)
    done = forked(folder, "train.py", config=config)
    assert done.code == 0, done.err
    seen = read_evidence(folder / "evidence.json")
    gain = LiveTrial(name, "", "", (), 1.3, 1.2, 1.4, blocks=4, steps=20.0, before=0.01)
    machine = dataclasses.replace(seen.machine, cpu_flags=("amx_bf16",))
    return dataclasses.replace(seen, tried=(gain,), machine=machine) if name in TRIED else seen


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_finding_of_a_script_is_not_there_under_the_technique_it_names(tmp_path: Path, name: str) -> None:
    rule = FINDINGS[name]
    assert rule.cure is not None
    (finding,) = rule.findings(run(tmp_path / "without", name, {}))
    assert finding.technique == rule.cure.name
    assert not rule.findings(run(tmp_path / "with", name, {rule.cure.name: SCRIPTS[name][0]}))


@pytest.mark.parametrize("name", MADE)
def test_a_finding_is_not_there_once_its_technique_acted_and_is_where_it_left_something_alone(name: str) -> None:
    rule, seen = FINDINGS[name], MADE[name]
    assert rule.cure is not None
    (finding,) = rule.findings(seen)
    assert finding.technique == rule.cure.name
    assert not rule.findings(dataclasses.replace(seen, installed={rule.cure.name: "process"}))
    assert rule.findings(dataclasses.replace(seen, installed={rule.cure.name: "process, left alone: Net: a reason"}))


def test_every_finding_that_names_a_technique_is_shown_here() -> None:
    cured = {name for name, rule in FINDINGS.items() if rule.cure is not None}
    assert cured == SCRIPTS.keys() | MADE.keys()
