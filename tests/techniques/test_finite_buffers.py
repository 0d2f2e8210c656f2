"""Buffers that a forward updates stay finite where it overflows in fp16."""

from __future__ import annotations

import math

import pytest

from hasten.plan import Setting
from tests.techniques.conftest import Train, close

NORMED = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3))
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    validations = []
    for number in range(12):
        x, y = torch.randn(8, 2, 8), torch.randint(0, 3, (8,))
        if number in BIG:
            x[:, :, 4] *= 1e7  # infinite in fp16
        STEP
        model.eval()
        with torch.no_grad(): validations.append(model(torch.ones(1, 2, 8)).tolist())
        model.train()
    torch.save({"validations": validations, "model": model.state_dict()}, "left.pt")
"""
NORMED_STEPS = {
    "a step": "loss = nn.functional.cross_entropy(model(x), y)\n"
    "        optimizer.zero_grad(); loss.backward(); optimizer.step()",
    "accumulated": "loss = nn.functional.cross_entropy(model(x), y); (loss / 3).backward()\n"
    "        if number % 3 == 2: optimizer.step(); optimizer.zero_grad()",
    "left out": "loss = nn.functional.cross_entropy(model(x), y)\n"
    "        if not loss.isfinite(): continue\n        optimizer.zero_grad(); loss.backward(); optimizer.step()",
    "beside the loss": "loss = nn.functional.cross_entropy(model(x).detach() + model[3].bias, y)\n"
    "        loss = loss.nan_to_num(0.0)\n        optimizer.zero_grad(); loss.backward(); optimizer.step()",
    "statistics renewed": "with torch.no_grad(): model(x)",
}


@pytest.mark.parametrize("case", NORMED_STEPS)
def test_an_overflow_of_a_forward_leaves_running_statistics_finite(train: Train, case: str) -> None:
    script = NORMED.replace("STEP", NORMED_STEPS[case])
    changed = train(script.replace("BIG", "(4, 7)"), precision="16-mixed")
    assert changed.code == 0, changed.err
    assert "buffers overflowed in fp16; they are as before the step" in changed.err
    statistics = [changed.left["model"][f"1.running_{name}"] for name in ("mean", "var")]
    assert all(one.isfinite().all() for one in statistics)
    assert changed.left["model"]["mask"].tolist() == [0.0, -math.inf]
    assert all(map(math.isfinite, changed.left["validations"][-1][0]))


def test_running_statistics_without_an_overflow_are_those_of_fp16_alone(train: Train) -> None:
    script = NORMED.replace("STEP", NORMED_STEPS["a step"]).replace("BIG", "()")
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, changed.err
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert close(plain.left["model"][name], changed.left["model"][name], 5e-3)


def test_what_becomes_infinite_in_float32_is_left_as_it_is(train: Train) -> None:
    """Once fp16 was given up: a buffer of the script's own may be meant to be infinite."""
    step = "if number == 3: model[3].bias.register_hook(lambda gradient: gradient)\n        "
    step += "if number == 8: model[1].running_mean[2] = float('inf')\n        "
    script = NORMED.replace("STEP", step + NORMED_STEPS["a step"]).replace("BIG", "()")
    changed = train(script, precision="16-mixed")
    assert changed.code == 0, changed.err
    assert "precision does not act from here on: a hook on a tensor sees gradients inside the backward" in changed.err
    assert changed.left["model"]["1.running_mean"][2] == math.inf
    assert "buffers overflowed" not in changed.err


def test_a_forward_without_gradients_that_overflows_leaves_other_graphs_whole(train: Train) -> None:
    """As in contrastive learning: a model's graph is there while another batch runs through it under no_grad."""
    step = (
        "out = model(x)\n        with torch.no_grad(): model(x * (1e7 if number == 5 else 1))\n"
        "        loss = nn.functional.cross_entropy(out, y)\n"
        "        optimizer.zero_grad(); loss.backward(); optimizer.step()"
    )
    changed = train(NORMED.replace("STEP", step).replace("BIG", "()"), precision="16-mixed")
    assert changed.code == 0, changed.err
    assert "overflow in fp16 in a forward without gradients" in changed.err
    assert all(value.isfinite().all() for name, value in changed.left["model"].items() if name != "mask")


@pytest.mark.parametrize(
    "beside",
    [
        {"channels_last": True, "fused_optimizer": True},
        {"activation_checkpointing": "Block"},
        {"activation_offload": 0},
    ],
    ids=lambda plan: "+".join(plan),
)
def test_statistics_stay_finite_beside_other_techniques(train: Train, beside: dict[str, Setting]) -> None:
    script = NORMED.replace("STEP", NORMED_STEPS["a step"]).replace("BIG", "(6,)").replace("Conv1d", "Conv2d")
    script = script.replace("BatchNorm1d", "BatchNorm2d").replace("2, 8)", "2, 8, 8)").replace("24, 3)", "144, 3)")
    script = script.replace("nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)", "Block(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))")
    start = "class Block(nn.Sequential): pass\n    torch.manual_seed(0)"
    changed = train(script.replace("torch.manual_seed(0)", start), precision="16-mixed", **beside)
    assert changed.code == 0, changed.err
    assert "buffers overflowed in fp16" in changed.err
    assert beside.keys() <= changed.installed.keys()
    assert all(value.isfinite().all() for name, value in changed.left["model"].items() if name != "mask")
