"""The loss in chunks against F.cross_entropy on all logits: values, gradients, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hasten.nn
from hasten import HastenError
from hasten.nn import ChunkedCrossEntropy, chunked_cross_entropy
from tests.fork_here import ran_here


def drawn(rows: int, classes: int, features: int, ignored: int, seed: int, bias: bool = True) -> list[Any]:
    """Inputs in float64 that want gradients; the first rows are ignored."""
    torch.manual_seed(seed)
    hidden = torch.randn(rows, features, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, features, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, classes, (rows,))
    target[:ignored] = -100
    shift = torch.randn(classes, dtype=torch.float64, requires_grad=True) if bias else None
    return [hidden, weight, target, shift]


def gradients(loss: Tensor, inputs: list[Any]) -> list[Tensor]:
    wanted = [one for one in inputs if one is not None and one.requires_grad]
    # As different a factor for each row as there is, so that "none" is more than a sum.
    factors = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return list(torch.autograd.grad((loss * factors).sum(), wanted))


def plain(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), target, **options)


@given(
    rows=st.integers(1, 12),
    classes=st.integers(2, 9),
    features=st.integers(1, 5),
    ignored=st.integers(0, 11),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    chunk=st.integers(1, 14),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=120)
def test_values_and_gradients_are_those_of_torch(
    rows: int,
    classes: int,
    features: int,
    ignored: int,
    smoothing: float,
    reduction: str,
    chunk: int,
    bias: bool,
    seed: int,
) -> None:
    inputs = drawn(rows, classes, features, min(ignored, rows - 1), seed, bias)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    ours, theirs = chunked_cross_entropy(*inputs, chunk=chunk, **options), plain(*inputs, **options)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_pass_gradcheck(reduction: str) -> None:
    hidden, weight, target, bias = drawn(5, 4, 3, 1, 0)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weight, target, bias, reduction=reduction, label_smoothing=0.2, chunk=2)

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_with_no_row_that_counts_it_answers_as_torch() -> None:
    inputs = drawn(3, 4, 2, 3, 0)
    ours, theirs = chunked_cross_entropy(*inputs), plain(*inputs)
    assert ours.isnan()
    assert theirs.isnan()
    for one, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert torch.equal(one, other)


def test_another_index_is_ignored() -> None:
    inputs = drawn(6, 4, 3, 0, 0)
    inputs[2][:] = torch.tensor([0, 1, 2, 3, 0, 0])
    ours, theirs = chunked_cross_entropy(*inputs, ignore_index=0), plain(*inputs, ignore_index=0)
    torch.testing.assert_close(ours, theirs)
    assert gradients(ours, inputs)[0][0].abs().sum() == 0


def test_great_logits_do_not_overflow() -> None:
    inputs = drawn(4, 5, 3, 0, 0)
    with torch.no_grad():
        inputs[0] *= 1e4
    ours, theirs = chunked_cross_entropy(*inputs, chunk=3), plain(*inputs)
    assert ours.isfinite()
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_may_have_any_shape() -> None:
    hidden, weight, target, bias = drawn(6, 5, 3, 1, 0)
    wide = chunked_cross_entropy(hidden.reshape(2, 3, 3), weight, target.reshape(2, 3), bias, reduction="none")
    assert wide.shape == (2, 3)
    torch.testing.assert_close(wide.flatten(), plain(hidden, weight, target, bias, reduction="none"))
    one = chunked_cross_entropy(hidden[3], weight, target[3], bias, reduction="none")
    assert one.shape == ()
    torch.testing.assert_close(one, wide.flatten()[3])


class Words(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, chunked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 4)
        self.mix = nn.Linear(4, 4)
        self.head = ChunkedCrossEntropy(4, 11, bias=False, chunk=3)
        self.head.weight = self.table.weight
        self.chunked = chunked

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        hidden = self.mix(self.table(words)).tanh()
        if self.chunked:
            return self.head(hidden, following)
        return F.cross_entropy(self.head.logits(hidden).flatten(0, 1), following.flatten())


def weights_behind(model: nn.Module, steps: int = 5, autocast: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    words = torch.randint(0, 11, (2, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(words[:, :-1], words[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_tied_weights_train_as_with_all_logits() -> None:
    for one, other in zip(weights_behind(Words(True)), weights_behind(Words(False)), strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast_gradients_are_as_near_to_float32_as_torchs() -> None:
    exact = weights_behind(Words(False), steps=1)
    ours, theirs = (weights_behind(Words(chunked), steps=1, autocast=True) for chunked in (True, False))
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert (one - true).abs().max() <= 2 * (other - true).abs().max() + 1e-6
        torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-3)


def test_16_bits_in_16_bits_out() -> None:
    hidden, weight, target, bias = (
        one.detach().bfloat16().requires_grad_() if one.is_floating_point() else one for one in drawn(6, 5, 3, 1, 0)
    )
    loss = chunked_cross_entropy(hidden, weight, target, bias, chunk=2)
    loss.backward()
    assert hidden.grad.dtype is weight.grad.dtype is bias.grad.dtype is torch.bfloat16
    torch.testing.assert_close(loss, plain(hidden, weight, target, bias).float(), rtol=2e-2, atol=2e-2)


def test_a_graph_that_is_kept_may_be_differentiated_again() -> None:
    inputs = drawn(5, 4, 3, 1, 0)
    loss = chunked_cross_entropy(*inputs, chunk=2)
    first = [one.clone() for one in torch.autograd.grad(3 * loss, [inputs[0], inputs[1]], retain_graph=True)]
    again = torch.autograd.grad(3 * loss, [inputs[0], inputs[1]])
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_gradients_are_refused_with_words() -> None:
    hidden, weight, target, bias = drawn(5, 4, 3, 1, 0)
    loss = chunked_cross_entropy(hidden, weight, target, bias)
    with pytest.raises(HastenError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_only_what_wants_a_gradient_gets_one() -> None:
    hidden, weight, target, bias = drawn(5, 4, 3, 1, 0)
    loss = chunked_cross_entropy(hidden, weight.detach(), target, bias)
    loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain(hidden, weight, target, bias), hidden)[0])
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, target, bias).requires_grad


def test_a_compiled_model_calls_it() -> None:
    compiled = Words(True)
    compiled.compile(backend="aot_eager")
    for one, other in zip(weights_behind(compiled, 2), weights_behind(Words(False), 2), strict=True):
        torch.testing.assert_close(one, other)


def test_its_weights_are_a_linear_layers_and_its_state_dict_too() -> None:
    torch.manual_seed(0)
    head = ChunkedCrossEntropy(3, 5)
    torch.manual_seed(0)
    linear = nn.Linear(3, 5)
    linear.load_state_dict(head.state_dict())
    torch.manual_seed(0)
    assert torch.equal(head.weight, nn.Linear(3, 5).weight)
    assert torch.equal(head.logits(torch.ones(2, 3)), linear(torch.ones(2, 3)))
    assert hasten.nn.ChunkedCrossEntropy is ChunkedCrossEntropy


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"reduction": "avg"}, "reduction='avg' is unknown"),
    ({"label_smoothing": 1.5}, "not between 0 and 1"),
    ({"chunk": 0}, "no number of rows"),
    ({"target": torch.rand(6)}, "target holds probabilities"),
    ({"target": torch.zeros(5, dtype=torch.long)}, r"hidden is \(6, 3\) and target \(5,\)"),
    ({"weight": torch.zeros(5, 4)}, r"weight \(5, 4\)"),
    ({"bias": torch.zeros(4)}, r"bias is \(4,\)"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_wrong_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    names = ("hidden", "weight", "target", "bias")
    arguments = {**dict(zip(names, drawn(6, 5, 3, 0, 0))), **changed}
    with pytest.raises(HastenError, match=message):
        chunked_cross_entropy(**arguments)


def test_a_target_that_is_no_class_is_an_error() -> None:
    hidden, weight, target, bias = drawn(6, 5, 3, 0, 0)
    target[0] = 5
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, target, bias)


def test_it_never_holds_all_logits(tmp_path: Path) -> None:
    """2000 rows of 20,000 classes are 153 MiB of logits, and as much of their gradients."""
    script = """
        import torch
        from hasten.nn import chunked_cross_entropy

        def read(name):
            return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1024

        torch.set_num_threads(1)
        hidden, table = torch.randn(2000, 64, requires_grad=True), torch.randn(20_000, 64, requires_grad=True)
        words = torch.randint(0, 20_000, (2000,))
        chunked_cross_entropy(hidden[:8], table, words[:8]).backward()
        hidden.grad = table.grad = None
        open("/proc/self/clear_refs", "w").write("5")
        before = read("VmRSS")
        chunked_cross_entropy(hidden, table, words).backward()
        print(read("VmHWM") - before)
    """
    grown = float(ran_here(script, tmp_path).out)
    assert grown < 150  # plain: above 300; here 32 for a chunk, and what the C library keeps between chunks
