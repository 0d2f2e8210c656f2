"""How far apart two tensors are, by plain arithmetic; and values of a track, read only where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hasten.check.difference import WeightStep, explained_by_gradient, measure_difference
from hasten.check.track import Moment, Track

INF, NAN = float("inf"), float("nan")


def test_a_tensor_is_as_far_as_its_numbers_are() -> None:
    mine, plain = torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])
    assert measure_difference(mine, plain) == pytest.approx((4.0, 5.0, -16 / 25, 5.0))
    # Of a step what counts is how far it went: from (3, 0) to (3, 4), and not at all.
    assert measure_difference(mine, plain, mine, mine) == pytest.approx((4.0, 4.0, -1.0, 5.0))
    assert measure_difference(plain, plain) == pytest.approx((0.0, 5.0, 0.0, 5.0))


def test_elements_that_something_else_explains_do_not_count() -> None:
    """As where a gradient of almost zero has the other sign, so that Adam's first step goes the other way."""
    mine, plain, start = torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0]), torch.zeros(2)
    assert measure_difference(mine, plain, start, start)[0] == pytest.approx(2.0)
    turned = torch.tensor([False, True])
    assert measure_difference(mine, plain, start, start, turned) == pytest.approx((0.0, 2**0.5, 0.0, 2**0.5))
    assert measure_difference(mine, plain, start, start, ~turned)[0] == pytest.approx(2.0)


def test_a_step_is_explained_by_a_gradient_that_differs_as_much() -> None:
    """Adam's steps, of a rate of 1: five elements whose gradients differ by 0, 3 % (twice), and in sign (twice)."""
    zero = torch.zeros(5)
    plain_gradient, gradient = torch.tensor([1.0, 1, 1, 1e-6, 1]), torch.tensor([1.0, 1.03, 1.03, -1e-6, -1])
    plain_step, step = torch.tensor([1.0, 1, 1, 1, 1]), torch.tensor([1.01, 1.05, 1.1, -1, 1])
    sides = WeightStep(gradient, zero, step), WeightStep(plain_gradient, zero, plain_step)
    assert explained_by_gradient(*sides).tolist() == [False, True, False, True, True]
    assert explained_by_gradient(*sides, only_turned=True).tolist() == [False, False, False, True, True]
    # Where momentum and gradient cancel, a step is small by chance: it is held to the weight's usual step.
    plain_step[1], step[1] = 0.001, 0.04
    assert explained_by_gradient(*sides).tolist() == [False, True, False, True, True]
    assert explained_by_gradient(*(WeightStep(*(torch.ones(0),) * 3),) * 2).tolist() == []


@pytest.mark.parametrize("noise", [2.0**-20, 2.0**-9])
def test_an_optimizers_own_fault_is_not_explained(noise: float) -> None:
    """Steps of nine tenths, under gradients that are off by rounding: in 16 bits that explains a twelfth of them."""
    lot = torch.Generator().manual_seed(0)
    plain_gradient = torch.randn(2000, generator=lot) * torch.rand(2000, generator=lot) ** 3
    errors = plain_gradient * torch.randn(2000, generator=lot) + 0.01 * torch.randn(2000, generator=lot)
    gradient, zero = plain_gradient + noise * errors, torch.zeros(2000)
    plain_step, step = plain_gradient.sign(), 0.9 * gradient.sign()
    explained = explained_by_gradient(WeightStep(gradient, zero, step), WeightStep(plain_gradient, zero, plain_step))
    apart, size, _, _ = measure_difference(step, plain_step, zero, zero, explained)
    assert apart / size > 0.09


def test_what_is_not_finite_in_both_takes_no_part() -> None:
    for value in (INF, -INF, NAN):
        plain = torch.tensor([3.0, 4.0, value])
        assert measure_difference(torch.tensor([3.0, 0.0, value]), plain) == pytest.approx((4.0, 5.0, -16 / 25, 5.0))
        start = torch.tensor([3.0, 0.0, 1.0])
        assert measure_difference(plain, plain, start, start) == pytest.approx((0.0, 4.0, 0.0, 5.0))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_is_finite_in_one_alone_is_without_end_apart(value: float) -> None:
    finite, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, value])
    assert measure_difference(other, finite) == (INF, 5.0, INF, 5.0)
    assert measure_difference(finite, other) == (INF, 3.0, INF, 3.0)
    assert measure_difference(finite, torch.ones(3)) == (INF, 0.0, INF, 0.0)


def test_values_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    written, read = Track(str(tmp_path)), Track(str(tmp_path))
    written.write(Moment("batch", "batch 1", digests={"sample 0 of part 0": "a"}))
    written.write(Moment("step", "optimizer step 1", values={"loss: 0": torch.tensor(2.0)}))
    written.close()
    batch = read.read()
    assert batch is not None
    assert batch.digests == {"sample 0 of part 0": "a"}
    assert read.values() is None
    step = read.read()
    assert step is not None
    assert step.values is None
    assert read.values() == {"loss: 0": torch.tensor(2.0)}
    assert read.read() is None
