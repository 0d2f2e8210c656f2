"""Losses that are sums over the batch are told from those that are means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hasten.parallel.sum_over_batch import sum_over_batch

X = torch.randn(8, 3, requires_grad=True)
Y = torch.rand(8, 3)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (F.mse_loss(X, Y), ""),
        (F.cross_entropy(X, Y.argmax(1)), ""),
        ((X - Y).pow(2).sum(1).mean(), ""),
        ((X - Y).pow(2).sum() / 8, ""),
        (F.mse_loss(X, Y) + X.new_ones(3, 3, requires_grad=True).pow(2).sum(), ""),
        (torch.ones((), requires_grad=True), ""),
        (
            F.binary_cross_entropy(X.sigmoid(), Y, reduction="sum") + 0.5 * X.mean(),
            "BinaryCrossEntropy with reduction='sum'",
        ),
        (F.cross_entropy(X, Y.argmax(1), reduction="sum"), "NllLoss with reduction='sum'"),
        ((X - Y).abs().sum(), "sum()"),
    ],
)
def test_summed(loss: torch.Tensor, said: str) -> None:
    assert sum_over_batch(loss, 8) == said
