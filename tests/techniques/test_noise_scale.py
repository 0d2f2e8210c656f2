"""The noise scale of gradients whose law is known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasten.techniques.convergence.noise_scale import (
    NoiseScale,
    noise_scale,
    rate_factor,
    samples_factor,
    steps_factor,
)

DIMENSIONS, SAMPLES = 64, 8


def drawn(noise: float, seed: int, gradients: int = 16) -> torch.Tensor:
    """Gradients of batches of 8, of a law with this noise scale: |G|^2 is 1, and Sigma is not the same all over."""
    draw = torch.Generator().manual_seed(seed)
    mean = torch.zeros(DIMENSIONS, dtype=torch.double)
    mean[0] = 1.0
    spread = torch.linspace(0.5, 2.0, DIMENSIONS, dtype=torch.double)
    spread *= math.sqrt(noise / SAMPLES) / spread.norm()
    return mean + spread * torch.randn(gradients, DIMENSIONS, generator=draw, dtype=torch.double)


def of(gradients: torch.Tensor) -> NoiseScale:
    return noise_scale((gradients @ gradients.T).tolist(), SAMPLES)


@pytest.mark.parametrize("noise", [4.0, 40.0, 160.0])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(noise: float) -> None:
    found = [of(drawn(noise, seed)) for seed in range(200)]
    assert sum(one.low <= noise <= one.high for one in found) >= 0.9 * len(found)
    assert sum(one.value < noise for one in found) in range(60, 141)  # it errs to both sides


def test_it_is_the_estimate_by_two_batch_sizes() -> None:
    """McCandlish et al. 2018, appendix A.1: one batch is the small one, all of them the large one."""
    gradients = drawn(40.0, 0)
    small, large = SAMPLES, SAMPLES * len(gradients)
    of_small, of_large = gradients.square().sum(1).mean(), gradients.mean(0).square().sum()
    square = (large * of_large - small * of_small) / (large - small)
    trace = (of_small - of_large) / (1 / small - 1 / large)
    assert of(gradients).value == pytest.approx(float(trace / square))


def test_where_the_mean_gradient_does_not_show_there_is_no_upper_bound() -> None:
    found = of(drawn(1e6, 0) - drawn(1e6, 0).mean(0))
    assert (found.value, found.high) == (math.inf, math.inf)
    assert found.low > 40


def test_gradients_without_noise_have_none() -> None:
    found = of(torch.ones(5, 3, dtype=torch.double))
    assert (found.value, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-9)


@given(st.floats(1e-6, 1e6), st.integers(0, 50))
def test_a_loss_that_is_scaled_has_the_same(scale: float, seed: int) -> None:
    plain, scaled = of(drawn(40.0, seed)), of(scale * drawn(40.0, seed))
    assert (scaled.value, scaled.low) == pytest.approx((plain.value, plain.low), rel=1e-6)


@pytest.mark.parametrize("products", [[[1.0] * 3] * 3, [[0.0] * 5] * 5, [[math.nan] * 5] * 5])
def test_too_few_or_empty_gradients_are_refused(products: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="gradients"):
        noise_scale(products, 8)


@given(st.floats(0.1, 1e6), st.floats(1, 1e4), st.floats(1, 1e4))
def test_steps_and_samples_go_between_what_is_possible(noise: float, former: float, batch: float) -> None:
    steps, samples = steps_factor(noise, former, batch), samples_factor(noise, former, batch)
    least, most = sorted((former / batch, 1.0))
    assert least * (1 - 1e-9) <= steps <= most * (1 + 1e-9)
    assert samples == pytest.approx(steps * batch / former)
    assert rate_factor(noise, former, batch) == pytest.approx(1 / steps)


def test_far_below_the_noise_scale_steps_go_in_proportion_and_far_above_not_at_all() -> None:
    assert steps_factor(1e9, 8, 64) == pytest.approx(1 / 8)
    assert steps_factor(math.inf, 8, 64) == 1 / 8
    assert steps_factor(1e-6, 8, 64) == pytest.approx(1)
    assert samples_factor(64, 1e-9, 64) == pytest.approx(2)  # as the scale itself is defined
