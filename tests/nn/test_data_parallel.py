"""Shares of a batch on several devices of one process: the loss and gradients of the whole batch.

Devices are "cpu" several times: what the GPUs' own path adds is torch's `replicate` and `parallel_apply`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hasten.errors import HastenError
from hasten.nn import DataParallelCriterion, DataParallelModel, gather

CPUS = ["cpu"] * 3


class Two(nn.Module):
    """Two outputs, one of them within a dict, from an input and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.first(x) * scale, {"second": self.second(x) * mask}


def both(output: Any, target: Tensor, other: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + F.mse_loss(output[1]["second"], other)


@given(st.integers(1, 11), st.integers(1, 5), st.integers(0, 3))
def test_loss_and_gradients_are_those_of_the_whole_batch(samples: int, many: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Two(), torch.randn(samples, 5, dtype=torch.float64)
    mask, target = torch.randn(samples, 1, dtype=torch.float64), torch.randint(0, 4, (samples,))
    other = torch.randn(samples, 3, dtype=torch.float64)
    whole = model(x, 2.0, mask=mask)
    loss = both(whole, target, other)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    outputs = DataParallelModel(model, ["cpu"] * many)(x, 2.0, mask=mask)
    assert len(outputs) == min(samples, many)
    ours = DataParallelCriterion(both, reduction="mean")(outputs, target, other)
    torch.testing.assert_close(ours, loss)
    torch.testing.assert_close(torch.autograd.grad(ours, list(model.parameters())), wanted)
    torch.testing.assert_close(gather(outputs), whole)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"ignore_index": 2}, {"weight": True, "ignore_index": 99}])
def test_classes_that_are_ignored_or_weigh_more_count_as_on_one_device(kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, target = nn.Linear(4, 6), torch.randn(7, 4), torch.randint(0, 6, (7,))
    target[:3] = options.get("ignore_index", -100)  # the whole first share
    if "weight" in options:
        options = {**options, "weight": torch.linspace(0.5, 3, 6)}
    criterion = kind(**options)
    ours = DataParallelCriterion(criterion)(DataParallelModel(model, CPUS)(x), target)
    wanted = criterion(model(x), target)
    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, wanted)))
    assert criterion.reduction == "mean"


def test_losses_of_16_bits_do_not_overflow() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(9000, 3).half(), torch.randint(0, 3, (9000,))
    logits[:, 0] += 30
    outputs = list(logits.tensor_split(2))
    ours = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, target)
    torch.testing.assert_close(ours, F.cross_entropy(logits.float(), target))
    assert DataParallelCriterion(nn.MSELoss())(outputs, logits + 9).isfinite()


def test_autocast_reaches_the_shares_and_the_loss_is_in_float32() -> None:
    torch.manual_seed(0)
    model, x, target = nn.Linear(16, 5), torch.randn(7, 16), torch.randint(0, 5, (7,))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = DataParallelModel(model, CPUS)(x)
        ours = DataParallelCriterion(nn.CrossEntropyLoss())(outputs, target)
        wanted = F.cross_entropy(model(x), target)
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    assert ours.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
    assert ours.requires_grad


def test_a_sum_stays_a_sum_and_tokens_count_by_weigh() -> None:
    torch.manual_seed(0)
    model, x, target = nn.Linear(4, 6), torch.randn(7, 4), torch.randint(0, 6, (7,))
    outputs = DataParallelModel(model, CPUS)(x)
    summed = DataParallelCriterion(nn.CrossEntropyLoss(reduction="sum"))(outputs, target)
    torch.testing.assert_close(summed, F.cross_entropy(model(x), target, reduction="sum"))
    target[:5] = -100
    counting = DataParallelCriterion(
        lambda output, target: F.cross_entropy(output, target, reduction="sum") / (target != -100).sum().clamp(min=1),
        weigh=lambda target: (target != -100).sum(),
    )
    torch.testing.assert_close(counting(outputs, target), F.cross_entropy(model(x), target))


def test_a_training_is_that_of_the_plain_model_and_its_checkpoints_those_of_dataparallel() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = DataParallelModel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(), CPUS)
    model.module.load_state_dict(plain.state_dict())
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    left, right = (torch.optim.AdamW(one.parameters(), 1e-2) for one in (plain, model))
    for _ in range(20):
        x, target = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))
        for optimizer in (left, right):
            optimizer.zero_grad()
        F.cross_entropy(plain(x), target).backward()
        criterion(model(x), target).backward()
        left.step()
        right.step()
    torch.testing.assert_close(list(plain.parameters()), list(model.parameters()), rtol=1e-9, atol=1e-12)
    assert set(model.state_dict()) == set(nn.DataParallel(plain).state_dict())


def sum_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


class Holds(nn.Module):
    """A criterion within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.loss(output, target)
        return loss


class Doubled(nn.CrossEntropyLoss):
    """A loss of its own by inheritance."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


WEIGHT = torch.tensor([1.0, 5.0, 2.0])
FUNCTIONS: dict[str, Any] = {
    "plain": F.cross_entropy,
    "ignored": functools.partial(F.cross_entropy, ignore_index=1),
    "weights": functools.partial(F.cross_entropy, weight=WEIGHT),
    "smoothed": functools.partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1),
    "sum": functools.partial(F.cross_entropy, reduction="sum"),
    "the old sum": functools.partial(F.multi_margin_loss, size_average=False),
    "margins": functools.partial(F.multi_margin_loss, weight=WEIGHT),
    "nested": functools.partial(functools.partial(F.cross_entropy, weight=WEIGHT), reduction="sum"),
}


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_torchs_are_as_their_modules(name: str) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    model, x, target = nn.Linear(4, 3), torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, 1, 1])
    if name in ("plain", "weights", "sum"):
        target[-3:] = -100  # the whole last share, and one more
    ours = DataParallelCriterion(function)(DataParallelModel(model, CPUS)(x), target)
    wanted = function(model(x), target)
    torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, wanted)))


@pytest.mark.parametrize(
    "criterion",
    [
        sum_of,
        Holds(),
        Doubled(),
        functools.partial(sum_of),
        functools.partial(F.cosine_similarity, dim=1),
        lambda output, target: F.cross_entropy(output, target),
    ],
)
def test_a_criterion_that_nobody_knows_is_refused(criterion: Any) -> None:
    with pytest.raises(HastenError, match="nobody knows what") as caught:
        DataParallelCriterion(criterion)
    assert 'reduction="sum"' in str(caught.value)
    assert "weigh=" in str(caught.value)


def test_what_it_is_can_be_said() -> None:
    torch.manual_seed(0)
    model, x, target = nn.Linear(4, 3), torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, -100, -100])
    holds = Holds()
    kept = DataParallelCriterion(holds, weigh=lambda target: WEIGHT[target.clamp(min=0)][target >= 0].sum())
    said = {kept: holds, DataParallelCriterion(sum_of, reduction="sum"): sum_of}
    for ours, plain in said.items():
        pair = ours(DataParallelModel(model, CPUS)(x), target), plain(model(x), target)
        torch.testing.assert_close(*pair)
        torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters())) for loss in pair))
    everything = torch.full((7,), -100)
    assert kept(DataParallelModel(model, CPUS)(x), everything).isnan()  # as plain is
    assert holds(model(x), everything).isnan()


def test_without_gradients_there_is_no_graph() -> None:
    with torch.no_grad():
        outputs = DataParallelModel(nn.Linear(4, 2), CPUS)(torch.randn(5, 4))
    assert not any(output.requires_grad for output in outputs)
    assert [len(output) for output in outputs] == [2, 2, 1]


def test_what_cannot_be_right_is_refused() -> None:
    model = DataParallelModel(nn.Linear(4, 2), CPUS)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    target = torch.zeros(6, dtype=torch.long)
    calls = {
        r"first dimensions \[3, 5\]": lambda: model(torch.randn(5, 4), torch.randn(3)),
        "no tensor with a first dimension": lambda: model(3.0),
        r"first dimensions \[0\]": lambda: model(torch.randn(0, 4)),
        "reduction=": lambda: DataParallelCriterion(nn.CrossEntropyLoss(reduction="none")),
        "Linear has parameters": lambda: DataParallelCriterion(nn.Linear(2, 1)),
        "an output of 3 samples beside targets of 2": lambda: criterion(model(torch.randn(9, 4)), target),
        "but fewer targets": lambda: criterion(model(torch.randn(9, 4)), target[:2]),
        "has the shape": lambda: DataParallelCriterion(lambda output, target: output, reduction="mean")(
            model(torch.randn(6, 4)), target
        ),
        'has reduction="mean"': lambda: DataParallelCriterion(nn.MSELoss(), reduction="sum"),
        "a sum is not weighed": lambda: DataParallelCriterion(sum_of, weigh=len, reduction="sum"),
        "reduction='median'": lambda: DataParallelCriterion(sum_of, reduction="median"),
        "ignore_index= says": lambda: DataParallelCriterion(F.cross_entropy)(
            model(torch.randn(6, 4)), target, ignore_index=0
        ),
        "several types": lambda: DataParallelModel(nn.Linear(4, 2), ["cpu", "meta"]),
        "the module lies on cpu": lambda: DataParallelModel(nn.Linear(4, 2), ["meta"]),
    }
    for words, call in calls.items():
        with pytest.raises(HastenError, match=words) as caught:
            call()
        assert caught.value.fix
