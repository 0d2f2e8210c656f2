"""Gradient noise scale: the batch from which on a larger one saves few steps, from gradients of single batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hasten.evidence.interval import mean_of

FEWEST = 4  # gradients from which an interval can be given


@dataclass(frozen=True)
class NoiseScale:
    """The "simple" noise scale, tr(Sigma) / |G|^2, in samples (McCandlish et al. 2018, arXiv 1812.06162).

    G is the mean gradient, Sigma the covariance of gradients of single samples. A batch of this size takes twice the
    steps that an endless batch takes, and twice the samples that single ones take.

    Attributes:
        value: The estimate; infinite where the mean gradient does not show above the noise.
        low: Lower end of its 95 % interval.
        high: Upper end; infinite where there is none.
        gradients: Of so many batches.
        samples: In each of these.
    """

    value: float
    low: float
    high: float
    gradients: int
    samples: float


def noise_scale(products: Sequence[Sequence[float]], samples: float) -> NoiseScale:
    """Return the noise scale from the inner products of gradients, all at the same weights.

    The mean product of two batches' gradients is |G|^2 without bias, and the mean square of one gradient is
    |G|^2 + tr(Sigma) / samples. This is the estimate by two batch sizes, one batch and all of them. The interval is a
    jackknife's, of the share of the one in the other, which goes one way with the noise scale.

    Args:
        products: Of every two gradients, (gradients, gradients); squares on the diagonal.
        samples: In each batch.

    Raises:
        ValueError: Fewer than four gradients, or all are zero.
    """
    count = len(products)
    if count < FEWEST:
        raise ValueError(f"{count} gradients give no noise scale, {FEWEST} do")
    squares = [row[place] for place, row in enumerate(products)]
    if not sum(squares) > 0:  # NaN too
        raise ValueError("all gradients are zero, or not finite")
    others = [math.fsum(row) - square for row, square in zip(products, squares, strict=True)]
    all_squares, all_others = math.fsum(squares), math.fsum(others)
    share = _share(all_squares, all_others, count)
    left_out = [
        _share(all_squares - square, all_others - 2 * other, count - 1)
        for square, other in zip(squares, others, strict=True)
    ]
    estimate = mean_of([count * share - (count - 1) * one for one in left_out])
    half = estimate.half if estimate is not None else math.inf
    return NoiseScale(
        _of_share(share, samples),
        _of_share(share + half, samples),
        _of_share(share - half, samples),
        count,
        samples,
    )


def _share(squares: float, others: float, count: int) -> float:
    """Return which share of a gradient's square is the mean gradient's, from sums over `count` gradients."""
    return (others / (count - 1)) / squares if squares > 0 else 0.0


def of_means(square: float, product: float, samples: float) -> float:
    """Return the noise scale from the mean square of a batch's gradient and the mean product of two batches'.

    Args:
        square: Mean of |g|^2, in any unit.
        product: Mean of g . h over different batches, in the same unit.
        samples: In each batch.
    """
    return _of_share(product / square if square > 0 else 0.0, samples)


def _of_share(share: float, samples: float) -> float:
    return samples * (1 / min(share, 1.0) - 1) if share > 0 else math.inf


def steps_factor(noise: float, former: float, batch: float) -> float:
    """Return what the number of steps to the same loss is multiplied by, for a batch in the place of the former.

    Steps = least * (1 + noise / batch), McCandlish et al. 2018, equation 2.11: for SGD with the best rate for each.
    """
    return former / batch if math.isinf(noise) else (1 + noise / batch) / (1 + noise / former)


def samples_factor(noise: float, former: float, batch: float) -> float:
    """Return what the number of samples to the same loss is multiplied by, for a batch in the place of the former."""
    return steps_factor(noise, former, batch) * batch / former


def rate_factor(noise: float, former: float, batch: float) -> float:
    """Return what SGD's best rate is multiplied by: in proportion to small batches, not at all to large ones.

    Rate = greatest / (1 + noise / batch), McCandlish et al. 2018, equation 2.8.
    """
    return 1 / steps_factor(noise, former, batch)
