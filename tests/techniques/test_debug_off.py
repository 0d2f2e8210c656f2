"""Debug tools switched off leave the numbers alone, and a backward that makes NaN still raises."""

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
    losses, anomaly, tracebacks = [], [], []

    def fit(steps=30, then=lambda: None):
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            anomaly.append(torch.is_anomaly_enabled())
            tracebacks.append("traceback_" in loss.grad_fn.metadata)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
            then()
    left = {}
    MIDDLE
    left |= {"losses": losses, "anomaly": anomaly, "tracebacks": any(tracebacks), "model": model.state_dict()}
    torch.save(left, "left.pt")
"""


ANOMALY = {
    "switch": "torch.autograd.set_detect_anomaly(True); fit()",
    "on and off": """torch.autograd.set_detect_anomaly(True, False); fit()
    torch.autograd.set_detect_anomaly(False); fit(2)""",
    "nested": """with torch.autograd.detect_anomaly():
        with torch.autograd.set_detect_anomaly(False): fit(2)
        fit(2)
    fit(2)""",
}


@pytest.mark.parametrize("case", ANOMALY)
def test_anomaly_detection_writes_no_tracebacks(train: Train, case: str) -> None:
    script = TRAINING.replace("MIDDLE", ANOMALY[case])
    plain, changed = train(script), train(script, debug_off=True)
    assert plain.code == changed.code == 0, changed.err
    assert (plain.left.pop("tracebacks"), changed.left.pop("tracebacks")) == (True, False)
    assert identical(plain.left, changed.left)
    assert "anomaly detection" in changed.installed["debug_off"]


SKIPPING = """
    torch.autograd.set_detect_anomaly(True)
    errors = []
    for step in range(8):
        x = torch.randn(8, 4)
        if step % 3 == 1: x[0] = 0.0
        y = model(x); z = model(x * 2)
        loss = LOSS
        try:
            BACKWARD
        except RuntimeError as error:
            errors.append(str(error))
            continue
        optimizer.step(); losses.append(loss.item())  # what half a backward left in .grad stays
    left["errors"] = errors
"""
NAN = "(x.norm(dim=1) * (x @ model.weight.T).squeeze(1).mul(0)).sqrt().sum() + y.pow(2).mean()"
WAYS = {
    "backward": "loss.backward()",
    "grad": "grads = torch.autograd.grad(loss, list(model.parameters()))\n            "
    "for p, g in zip(model.parameters(), grads): p.grad = g",
    "retained": "loss.backward(retain_graph=True); loss.backward()",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_script_that_skips_batches_by_their_error(train: Train, way: str) -> None:
    skipping = SKIPPING.replace("LOSS", NAN).replace("BACKWARD", WAYS[way])
    script = TRAINING.replace("    MIDDLE\n", skipping)
    plain, changed = train(script), train(script, debug_off=True)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert any("returned nan values" in error for error in plain.left["errors"])
    assert identical(plain.left, changed.left)


def test_a_profiler_is_left_alone(train: Train) -> None:
    script = TRAINING.replace(
        "    MIDDLE\n",
        """
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CPU]) as profiler: fit()
    profiler.export_chrome_trace("trace.json")
    events = json.load(open("trace.json"))["traceEvents"]
    left["steps"] = sum(event.get("name", "").startswith("Optimizer.step") for event in events)
""",
    )
    changed = train(script, debug_off=True)
    assert changed.code == 0, changed.err
    assert changed.left["steps"] == 30
    assert "debug_off" not in changed.installed


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dataclasses.replace(FLAGS, anomaly=True), "left on: anomaly detection"),
        (dataclasses.replace(FLAGS, anomaly=True, profiler="a profiler"), "anomaly detection"),
        (dataclasses.replace(FLAGS, profiler="a profiler"), None),
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
