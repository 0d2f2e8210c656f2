"""Cross entropy by rows: torch's own value and gradients but for rounding, from less memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hasten.switchboard import Switchboard
from hasten.techniques import CATALOGUE, Refusal
from hasten.techniques.memory import chunked_loss, loss_by_rows
from hasten.techniques.memory.chunked_loss import ChunkedLoss
from tests.techniques.conftest import Train, close, evidence_of

PLAIN = F.cross_entropy


@pytest.fixture
def technique(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkedLoss]:
    """The technique, which acts on small losses too."""
    monkeypatch.setattr(chunked_loss, "_LEAST", 1)
    monkeypatch.setattr(loss_by_rows, "_NUMBERS", 40)
    one = ChunkedLoss(True)
    one.process()
    yield one
    one.restore()
    assert F.cross_entropy is PLAIN


def both(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of the logits, torch's and ours."""
    found = []
    for function in (PLAIN, F.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target, **options)
        loss.backward(torch.linspace(1, 2, loss.numel()).reshape(loss.shape).to(loss.dtype))
        assert leaf.grad is not None
        found.append((loss.detach(), leaf.grad))
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [(2, 1), (2, 3), (2,)], ids=["its target", "another class", "all of a row"])
def test_what_is_not_finite_spreads_as_in_torchs(
    technique: ChunkedLoss, reduction: str, value: float, place: tuple[int, ...]
) -> None:
    """A training that blows up must not go on with gradients of zero."""
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    logits[place] = value
    (loss, gradient), (our_loss, our_gradient) = both(logits, torch.tensor([0, 1, 1, 2, 3, 4]), reduction=reduction)
    assert torch.allclose(loss, our_loss, equal_nan=True)
    assert torch.allclose(gradient, our_gradient, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(max_examples=15)
@given(rows=st.integers(1, 40), classes=st.integers(1, 30), ignored=st.integers(0, 40), seed=st.integers(0, 99))
def test_value_and_gradients_are_torchs(
    reduction: str, dtype: torch.dtype, rows: int, classes: int, ignored: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, classes, generator=draw)).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=draw)
    target[:ignored] = -100
    leaf = logits.clone().requires_grad_()
    other = logits.clone().requires_grad_()
    plain = PLAIN(leaf, target, reduction=reduction)
    ours = loss_by_rows.by_rows(other, target, -100, reduction, plain.dtype)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert ours.dtype is plain.dtype
    assert torch.allclose(ours, plain, rtol=tolerance, atol=tolerance, equal_nan=True)
    plain.sum().backward()
    ours.sum().backward()
    assert torch.allclose(other.grad, leaf.grad, rtol=tolerance, atol=tolerance, equal_nan=True)  # type: ignore[arg-type]


def test_it_is_called_by_scripts_and_layers_alike(technique: ChunkedLoss) -> None:
    logits, target = torch.randn(30, 12), torch.randint(0, 12, (30,))
    (plain, gradient), (ours, by_rows) = both(logits, target, ignore_index=3)
    assert torch.allclose(plain, ours)
    assert torch.allclose(gradient, by_rows, atol=1e-7)
    leaf = logits.requires_grad_()
    loss = torch.nn.CrossEntropyLoss()(leaf, target)  # held: in torch 2.9 a graph's nodes end with their tensor
    assert type(loss.grad_fn.next_functions[0][0]).__name__  # type: ignore[union-attr]
    assert technique.acted == {"loss": 1}


LEFT: dict[str, dict[str, Any]] = {
    "class weights": {"weight": torch.ones(12)},
    "label smoothing": {"label_smoothing": 0.1},
    "the old way to reduce": {"size_average": False},
}


@pytest.mark.parametrize("options", LEFT.values(), ids=LEFT.keys())
def test_other_losses_are_torchs_own_to_the_bit(technique: ChunkedLoss, options: dict[str, Any]) -> None:
    (plain, gradient), (ours, other) = both(torch.randn(30, 12), torch.randint(0, 12, (30,)), **options)
    assert torch.equal(plain, ours)
    assert torch.equal(gradient, other)
    assert technique.acted == {}


def test_probabilities_images_and_validation_are_left_alone(technique: ChunkedLoss) -> None:
    F.cross_entropy(torch.randn(5, 4, requires_grad=True), torch.rand(5, 4).softmax(1))
    F.cross_entropy(torch.randn(5, 4, 3, 3, requires_grad=True), torch.randint(0, 4, (5, 3, 3)))
    F.cross_entropy(torch.randn(5, 4), torch.randint(0, 4, (5,)))
    assert technique.acted == {}


def test_wrong_arguments_have_torchs_own_errors(technique: ChunkedLoss) -> None:
    logits = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(logits, torch.full((5,), 7))
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        F.cross_entropy(logits, torch.zeros(5, dtype=torch.int64), reduction="average")


@pytest.mark.parametrize(("target", "ignored"), [(7, -100), (-1, -100), (-100, -1)])
def test_a_target_that_is_no_class_has_torchs_own_error(technique: ChunkedLoss, target: int, ignored: int) -> None:
    targets = torch.tensor([0, 1, 2, 3, target])  # not in the first row
    said = []
    for function in (PLAIN, F.cross_entropy):
        with pytest.raises(IndexError) as caught:
            function(torch.randn(5, 4, requires_grad=True), targets, ignore_index=ignored)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_logits_changed_in_place_behind_the_loss_name_the_technique(technique: ChunkedLoss) -> None:
    logits = torch.randn(5, 4, requires_grad=True) * 1
    loss = F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 0]))
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation") as caught:
        loss.backward()
    assert "chunked_loss" in "".join(caught.value.__notes__)


def test_a_gradient_of_gradients_is_an_error(technique: ChunkedLoss) -> None:
    logits = torch.randn(5, 4, requires_grad=True)
    loss = F.cross_entropy(logits, torch.randint(0, 4, (5,)))
    with pytest.raises(RuntimeError, match="chunked_loss"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_under_autocast_the_loss_is_of_the_type_it_would_be(technique: ChunkedLoss) -> None:
    logits, target = torch.randn(30, 12).bfloat16(), torch.randint(0, 12, (30,))
    with torch.autocast("cpu", torch.bfloat16):
        (plain, gradient), (ours, other) = both(logits, target)
    assert (plain.dtype, gradient.dtype) == (ours.dtype, other.dtype)
    assert torch.allclose(plain.float(), ours.float(), rtol=1e-2)


def test_it_is_switched_between_two_steps_and_a_name_of_the_scripts_own_goes_with_it(technique: ChunkedLoss) -> None:
    kept = F.cross_entropy  # from torch.nn.functional import cross_entropy
    technique.restore()
    board = Switchboard([technique])
    for on in (True, False, True, False):
        board.switch({technique.name: True} if on else {})
        assert (F.cross_entropy is PLAIN) is not on
        loss = kept(torch.randn(30, 12, requires_grad=True), torch.randint(0, 12, (30,)))
        assert ("ByRows" in type(loss.grad_fn).__name__) is on
    assert board.broken == {}


SCRIPT = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3000, 8), nn.Linear(8, 3000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, peaks = [], []
    words = torch.randint(0, 3000, (1500,))
    for number in range(3):
        with torch.profiler.profile(profile_memory=True) as profiler:
            logits = model(words)  # as most scripts keep them
            loss = F.cross_entropy(logits, words.roll(-1))
        peaks.append(sum(event.self_cpu_memory_usage for event in profiler.key_averages()))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict(), "kept": peaks[-1]}, "left.pt")
"""


def test_under_run_it_keeps_less(train: Train) -> None:
    plain, under = train(SCRIPT), train(SCRIPT, chunked_loss=True)
    assert under.code == 0, under.err
    assert under.installed == {"chunked_loss": "loss"}
    assert close(under.left["losses"], plain.left["losses"], 1e-5)
    assert close(under.left["model"], plain.left["model"], 1e-4)
    assert under.left["kept"] < plain.left["kept"] - 1500 * 3000 * 3  # three quarters of a float32 copy of the logits


def test_tune_does_not_try_it_by_itself() -> None:
    assert isinstance(CATALOGUE["chunked_loss"].settings(evidence_of()), Refusal)


def test_torchscript_compiles_the_plain_function(technique: ChunkedLoss) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, y)

    x, y = torch.randn(6, 5), torch.randint(5, (6,))
    for module in (torch.nn.CrossEntropyLoss(), Model()):
        assert torch.equal(torch.jit.script(module)(x, y), PLAIN(x, y))
