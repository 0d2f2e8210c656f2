"""Debug tools switched off leave the numbers alone, and a profiler what it has gathered."""

from __future__ import annotations

import dataclasses

import pytest

from hasten.techniques import Choices, Refusal
from hasten.techniques.compute.debug_off import DebugOff
from tests.techniques.conftest import FLAGS, Train, evidence_of, identical

TRAINING = """
    import json
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, anomaly = [], []

    def fit(steps=30, then=lambda: None):
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            anomaly.append(torch.is_anomaly_enabled())
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
            then()
    left = {}
    MIDDLE
    torch.save({"losses": losses, "anomaly": any(anomaly), "model": model.state_dict(), **left}, "left.pt")
"""


@pytest.mark.parametrize(
    "middle",
    [
        "torch.autograd.set_detect_anomaly(True); fit()",
        "torch.autograd.set_detect_anomaly(True, False); fit(); torch.autograd.set_detect_anomaly(False); fit(2)",
        "with torch.autograd.detect_anomaly(): fit()",
    ],
    ids=["switch", "switch on and off", "context"],
)
def test_anomaly_detection_stays_off(train: Train, middle: str) -> None:
    script = TRAINING.replace("MIDDLE", middle)
    if "with" in middle:
        script = script.replace("    with", "    with", 1)
    plain, changed = train(script), train(script, debug_off=True)
    assert plain.code == changed.code == 0, changed.err
    assert (plain.left.pop("anomaly"), changed.left.pop("anomaly")) == (True, False)
    assert identical(plain.left, changed.left)
    assert "anomaly detection" in changed.installed["debug_off"]


PROFILED = """
    from torch.profiler import profile, ProfilerActivity, schedule
    ready, cpu, own = [], [ProfilerActivity.CPU], schedule(wait=1, warmup=1, active=25)
    USE
    profiler.export_chrome_trace("trace.json")
    events = json.load(open("trace.json"))["traceEvents"]
    left["steps"] = sum(event.get("name", "").startswith("Optimizer.step") for event in events)
    left["table"] = "aten::addmm" in profiler.key_averages().table()
    left["ready"] = len(ready)
"""


@pytest.mark.parametrize(
    ("use", "steps", "installed"),
    [
        ("with profile(activities=cpu) as profiler: fit()", 20, True),
        ("with profile(activities=cpu, on_trace_ready=ready.append) as profiler: fit(30, profiler.step)", 20, True),
        ("profiler = profile(activities=cpu); profiler.start(); fit(); profiler.stop()", 20, True),
        ("with profile(activities=cpu) as profiler: fit(5)", 5, False),
        (
            "with profile(activities=cpu, schedule=own) as profiler: fit(27, profiler.step)",
            25,
            False,
        ),
    ],
    ids=["context", "handler and steps", "started by hand", "short", "with a schedule of its own"],
)
def test_a_profiler_left_on_stops_and_can_still_be_exported(
    train: Train, use: str, steps: int, installed: bool
) -> None:
    script = TRAINING.replace("    MIDDLE\n", PROFILED.replace("USE", use))
    plain, changed = train(script), train(script, debug_off=True)
    assert plain.code == changed.code == 0, changed.err
    assert (plain.left.pop("steps"), changed.left.pop("steps")) == (
        25 if steps == 25 else 30 if installed else 5,
        steps,
    )
    assert identical(plain.left, changed.left)
    assert changed.left["table"]
    assert ("debug_off" in changed.installed) is installed


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dataclasses.replace(FLAGS, anomaly=True), "left on: anomaly detection"),
        (dataclasses.replace(FLAGS, anomaly=True, profiler="a profiler"), "anomaly detection, a profiler"),
        (FLAGS, None),
    ],
)
def test_worth_trying(flags: object, expected: str | None) -> None:
    answer = DebugOff.settings(evidence_of(flags=flags))  # type: ignore[arg-type]
    if expected is None:
        assert isinstance(answer, Refusal)
    else:
        assert isinstance(answer, Choices)
        assert expected in answer.why
