"""Images laid out pixel by pixel: the same model, the same names, the same numbers to rounding."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hasten.run import Run
from hasten.techniques import CATALOGUE, Choices, Refusal, build
from hasten.techniques.compute.channels_last import ChannelsLast
from tests.techniques.conftest import MODEL, Train, close, evidence_of, identical

TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layouts = []
    class Look(nn.Module):
        def forward(self, x):
            layouts.append(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
            return x
    model = MODEL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    same = [id(p) for p in model.parameters()]
    losses = []
    for number in range(5):
        x = torch.randn(INPUT)
        loss = model(x).pow(2).mean()
        assert x.is_contiguous()  # the script's own tensor stays as it is
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict(), "layouts": set(layouts),
                "same": same == [id(p) for p in model.parameters()]}, "left.pt")
"""
CNN = "nn.Sequential(Look(), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Look(), nn.Flatten(), nn.Linear(288, 2))"


def test_convolutions_read_pixel_by_pixel(train: Train) -> None:
    script = TRAINING.replace("MODEL", CNN).replace("INPUT", "4, 3, 8, 8")
    plain, changed = train(script), train(script, channels_last=True)
    assert plain.code == changed.code == 0, changed.err
    assert (plain.left["layouts"], changed.left["layouts"]) == ({False}, {True})
    assert changed.left["same"]  # the optimizer still has the model's parameters
    assert list(plain.left["model"]) == list(changed.left["model"])
    assert close(plain.left["losses"], changed.left["losses"], 1e-4)
    assert close(plain.left["model"], changed.left["model"], 1e-4)
    assert changed.installed == {"channels_last": "model"}


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("nn.Sequential(Look(), nn.Linear(5, 2))", "2, 3, 4, 5"),
        ("nn.Sequential(Look(), nn.Conv1d(3, 4, 2))", "2, 3, 9"),
    ],
    ids=["linear", "1-D"],
)
def test_a_model_without_2d_convolutions_is_left_alone(train: Train, model: str, shape: str) -> None:
    script = TRAINING.replace("MODEL", model).replace("INPUT", shape)
    plain, changed = train(script), train(script, channels_last=True)
    assert identical(plain.left, changed.left)
    assert changed.installed == {}


class Stepping(nn.Module):
    """A module as the Trainer drives it: its step takes a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 2, 3)
        self.seen: list[bool] = []

    def training_step(self, batch: Any, number: int) -> Any:
        images = [batch["image"], batch["more"][0], batch["pair"].left]
        self.seen += [image.is_contiguous(memory_format=torch.channels_last) for image in images]
        return sum(self.net(image).sum() for image in images) + batch["label"].sum()


class Pair(NamedTuple):
    """Two tensors."""

    left: Any
    right: Any


def test_images_inside_a_batch_are_laid_out_too_and_the_batch_stays_as_it_is() -> None:
    run = Run(build({"channels_last": True}, CATALOGUE))
    module = Stepping()
    run.model(module, ())
    assert module.net.weight.is_contiguous(memory_format=torch.channels_last)
    step = run.wrapped("forward", lambda this, args, kwargs: this.training_step(*args, **kwargs))
    image = torch.randn(2, 3, 5, 5)
    batch = {"image": image, "more": [image], "pair": Pair(image, "b"), "label": torch.ones(2), "name": ["a", "b"]}
    before = dict(batch)
    loss = step(module, (batch, 0), {})
    assert module.seen == [True, True, True]
    assert all(batch[key] is before[key] for key in before)
    assert image.is_contiguous()
    assert torch.allclose(loss, module.training_step(batch, 0), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True,)),
        ({"layers": {"ConvTranspose2d": 1}}, (True,)),
        ({"layers": {"Linear": 2}}, "no 2-D convolution"),
        ({"input_shapes": ((32, 3, 32),)}, "4-D"),
    ],
)
def test_worth_trying(changes: dict[str, Any], expected: Any) -> None:
    answer = ChannelsLast.settings(evidence_of(models=(dataclasses.replace(MODEL, **changes),)))
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected
