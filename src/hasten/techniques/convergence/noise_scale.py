"""Gradient noise scale, from gradients of single batches: the batch size beyond which more saves few steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hasten.evidence.interval import mean_of

FEWEST = 4  # gradients from which an interval can be given


@dataclass(frozen=True)
class NoiseScale:
    """The "simple" noise scale, tr(Sigma) / |G|^2, in samples (McCandlish et al. 2018, arXiv 1812.06162).

    G is the mean gradient, Sigma the covariance of gradients of single samples. A batch of this size takes twice as
    many steps as an infinite batch, and twice as many samples as batches of one sample.

    Attributes:
        value: The estimate; infinite if the mean gradient is not visible above the noise.
        low: Lower end of its 95 % interval.
        high: Upper end; infinite if there is none.
        gradients: Number of batches whose gradients were used.
        samples: Samples in each batch.
    """

    value: float
    low: float
    high: float
    gradients: int
    samples: float


def noise_scale(products: Sequence[Sequence[float]], samples: float) -> NoiseScale:
    """Return the noise scale from the inner products of gradients, all at the same weights.

    The mean product of two batches' gradients is an unbiased estimate of |G|^2, and the mean square of one gradient is
    |G|^2 + tr(Sigma) / samples. This is the paper's estimate from two batch sizes, one batch and all of them. The
    interval is a jackknife interval of the ratio of the two, of which the noise scale is a monotonic function.

    Args:
        products: Inner products of all pairs of gradients, (gradients, gradients); squares on the diagonal.
        samples: Samples in each batch.

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
    estimate = mean_of([count * share - (count - 1) * without for without in left_out])  # jackknife pseudo-values
    half = estimate.half if estimate is not None else math.inf
    return NoiseScale(
        _of_share(share, samples),
        _of_share(share + half, samples),
        _of_share(share - half, samples),
        count,
        samples,
    )


def _share(squares: float, others: float, count: int) -> float:
    """Return the share of the mean gradient in a batch gradient's square, from sums over `count` gradients."""
    return (others / (count - 1)) / squares if squares > 0 else 0.0


def of_means(square: float, product: float, samples: float) -> float:
    """Return the noise scale from the mean square of a batch's gradient and the mean product of two batches'.

    Args:
        square: Mean of |g|^2, in any unit.
        product: Mean of g . h over pairs of different batches, in the same unit.
        samples: Samples in each batch.
    """
    return _of_share(product / square if square > 0 else 0.0, samples)


def _of_share(share: float, samples: float) -> float:
    """Return the noise scale from the mean gradient's share of a batch gradient's square."""
    return samples * (1 / min(share, 1.0) - 1) if share > 0 else math.inf


def steps_factor(noise: float, former: float, batch: float) -> float:
    """Return the factor on the number of steps to the same loss when `batch` replaces the batch size `former`.

    Steps = least * (1 + noise / batch), McCandlish et al. 2018, equation 2.11: for SGD with the best rate for each.
    """
    return former / batch if math.isinf(noise) else (1 + noise / batch) / (1 + noise / former)


def samples_factor(noise: float, former: float, batch: float) -> float:
    """Return the factor on the number of samples to the same loss when `batch` replaces the batch size `former`."""
    return steps_factor(noise, former, batch) * batch / former


def rate_factor(noise: float, former: float, batch: float) -> float:
    """Return the factor on SGD's best rate: in proportion to the batch if it is small, near 1 if it is large.

    Rate = greatest / (1 + noise / batch), McCandlish et al. 2018, equation 2.8.
    """
    return 1 / steps_factor(noise, former, batch)
