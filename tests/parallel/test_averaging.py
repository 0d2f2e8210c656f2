"""Gradients averaged over ranks: real processes, by gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hasten.errors import HastenError
from hasten.parallel import World, spawn
from hasten.parallel.averaging import Averaging
from hasten.parallel.meeting import Meeting, MeetingTopic


def _backward(averaging: Averaging, loss: torch.Tensor, samples: float) -> None:
    averaging.begins()
    loss.backward()
    averaging.ends(0, samples)


def _weighed() -> list[float]:
    world = World.from_environment()
    averaging = Averaging(Meeting(world))
    weight = nn.Parameter(torch.tensor(1.0))
    late = nn.Parameter(torch.tensor(1.0), requires_grad=False)
    averaging.add([weight, late])
    inputs = torch.tensor([1.0, 2.0, 3.0][: 3 - 2 * world.rank])
    _backward(averaging, (weight * inputs).mean(), len(inputs))
    _backward(averaging, (weight * inputs).mean(), len(inputs))  # accumulated
    late.requires_grad_(True)
    _backward(averaging, late * (world.rank + 1.0), 0.0 if world.rank else 4.0)
    assert weight.grad is not None
    assert late.grad is not None
    return [weight.grad.item(), late.grad.item()]


def _parts() -> list[float | None]:
    world = World.from_environment()
    averaging = Averaging(Meeting(world))
    both, own, none = (nn.Parameter(torch.tensor(1.0)) for _ in range(3))
    averaging.add([both, own, none])
    _backward(averaging, both * 3 + own if world.rank else both, 1.0)
    return [None if one.grad is None else one.grad.item() for one in (both, own, none)]


def _kinds() -> list[float]:
    world = World.from_environment()
    averaging = Averaging(Meeting(world))
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    ones = [nn.Parameter(torch.ones(2, 3, dtype=kind)) for kind in kinds]
    averaging.add(ones)
    _backward(averaging, sum((one.sum().real.double() * (world.rank + 1) for one in ones), torch.zeros(())), 1.0)
    return [float(one.grad.real.double().mean()) for one in ones if one.grad is not None]


def _apart() -> str:
    world = World.from_environment()
    meeting = Meeting(world)
    meeting.meet(MeetingTopic.PASS)
    try:
        meeting.meet(MeetingTopic.BACKWARD if world.rank else MeetingTopic.PASS)
    except HastenError as error:
        return error.message
    return "met"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (_weighed, [2 * (1 + 2 + 3 + 1) / 4, 1.0]),  # each sample weighs the same
        (_parts, [2.0, 0.5, None]),  # one rank uses a part that the other does not
        (_kinds, [1.5] * 4),
        (
            _apart,
            "The ranks have parted: rank 0 began a pass through a DataLoader where another one did something else.",
        ),
    ],
)
def test_ranks(ranks: Callable[[], object], expected: object) -> None:
    assert spawn(ranks, 2, strategy="ddp_fork") == expected
