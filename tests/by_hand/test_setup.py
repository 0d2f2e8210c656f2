"""`hasten.setup` in loops written by hand: the numbers of plain torch, and objects that stay plain torch's."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hasten
from hasten import by_hand
from hasten.plan import Plan
from tests.taps.forks import forked
from tests.taps.scripts import write


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    by_hand.end()


def parts(kind: str = "AdamW", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """The same model, optimizer and loader at every call."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 12), torch.randint(0, 3, (48,)))
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    return model, optimizer, DataLoader(data, batch_size=8, shuffle=True)


def trained(
    model: nn.Module, optimizer: Any, loader: Any, context: Any = None, backward: Any = torch.Tensor.backward
) -> list[torch.Tensor]:
    """The weights behind two epochs; `context()` is around the forward alone."""
    torch.manual_seed(1)
    for _ in range(2):
        for inputs, labels in loader:
            optimizer.zero_grad()
            if context is None:
                output = model(inputs)
            else:
                with context():
                    output = model(inputs)
            backward(F.cross_entropy(output.float(), labels))
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(weights: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


EXACT = [
    {},
    {"batched_fetch": True},
    {"loader_workers": 1},
    {"sample_cache": "samples"},
    {"set_to_none": True},
    {"no_grad_validation": True},
    {"batched_fetch": True, "no_grad_validation": True, "set_to_none": True},
]


@pytest.mark.parametrize("techniques", EXACT, ids=lambda one: "+".join(one) or "none")
def test_exact_techniques_give_the_weights_of_the_plain_loop_to_the_bit(techniques: Any) -> None:
    plain = trained(*parts())
    handed = hasten.setup(*parts(), **techniques)
    assert equal(trained(*handed, backward=hasten.backward), plain)


def test_what_comes_back_is_the_same_model_and_optimizer_and_a_data_loader() -> None:
    model, optimizer, loader = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = hasten.setup(model, optimizer, loader, schedule, precision="bf16-mixed", batched_fetch=True)
    assert given[0] is model
    assert given[1] is optimizer
    assert given[3] is schedule
    assert isinstance(given[2], DataLoader)
    assert type(given[2]).__name__ == "DataLoader"
    assert len(given[2]) == len(loader)
    assert hasten.setup(model, precision="bf16-mixed", batched_fetch=True) is model


def test_bf16_is_autocast_by_hand_to_the_bit() -> None:
    cast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    by_torch = trained(*parts(), context=cast)
    model, optimizer, loader = hasten.setup(*parts(), precision="bf16-mixed")
    assert equal(trained(model, optimizer, loader, backward=hasten.backward), by_torch)
    assert not equal(trained(*parts()), by_torch)


def test_within_hasten_autocast_a_model_gives_16_bits_and_outside_float32() -> None:
    by_torch = trained(*parts(), context=lambda: torch.autocast("cpu", torch.bfloat16))
    model, optimizer, loader = hasten.setup(*parts(), precision="bf16-mixed")
    inputs = torch.randn(4, 12)
    assert model(inputs).dtype is torch.float32
    with hasten.autocast():
        assert model(inputs).dtype is torch.bfloat16
        assert model[0](inputs).dtype is torch.bfloat16  # a part that is called by itself
    model, optimizer, loader = hasten.setup(*parts(), precision="bf16-mixed")
    assert equal(trained(model, optimizer, loader, context=hasten.autocast), by_torch)


def test_autocast_does_nothing_in_float32() -> None:
    model, _, _ = parts()
    with hasten.autocast():
        assert model(torch.randn(2, 12)).dtype is torch.float32
    hasten.setup(model)
    with hasten.autocast():
        assert model(torch.randn(2, 12)).dtype is torch.float32


@pytest.mark.parametrize("by", ["hasten.backward", "loss.backward"])
def test_fp16_scales_the_loss_whichever_way_it_is_differentiated(by: str) -> None:
    """The product of two small numbers is no number of fp16 unless the loss is scaled."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = hasten.setup(model, optimizer, precision="16-mixed")
    loss = model(torch.full((2, 4), 1e-3)).sum() * 1e-6
    hasten.backward(loss) if by == "hasten.backward" else loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 4), 2e-9), rtol=2e-3, atol=0.0)


def test_fp16_within_autocast_goes_on_scaling() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = hasten.setup(model, optimizer, precision="16-mixed")
    for _ in range(2):
        optimizer.zero_grad()
        with hasten.autocast():
            loss = model(torch.full((2, 4), 1e-3)).float().sum() * 1e-6
        hasten.backward(loss)
        torch.testing.assert_close(model.weight.grad, torch.full((1, 4), 2e-9), rtol=2e-3, atol=0.0)
        optimizer.step()


def test_bf16_true_converts_the_model_and_keeps_its_parameters_the_optimizers() -> None:
    model, optimizer, loader = hasten.setup(*parts(), precision="bf16-true")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert not equal(trained(model, optimizer, loader), before)
    by_hand.end()
    model, optimizer, loader = parts()
    trained(model, optimizer, loader)
    with pytest.raises(hasten.HastenError, match="holds state of the former type"):
        hasten.setup(model, optimizer, precision="bf16-true")


def test_fused_optimizer_is_torchs_own_to_the_bit() -> None:
    by_torch = trained(*parts(fused=True))
    assert equal(trained(*hasten.setup(*parts(), fused_optimizer=True)), by_torch)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(images).relu()).relu().mean((2, 3)))


def test_channels_last_rounds_alike() -> None:
    torch.manual_seed(0)
    model = Convolutional()
    twin = copy.deepcopy(model)
    images = torch.randn(4, 3, 12, 12)
    twin(images).square().sum().backward()
    model = hasten.setup(model, channels_last=True)
    hasten.backward(model(images).square().sum())
    hasten.backward(model(images).square().sum())
    for one, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(one.grad, 2 * other.grad)


@pytest.mark.slow  # compiles C++
def test_compiled_under_bf16_trains_as_uncompiled_with_the_same_dropout() -> None:
    plain = trained(*hasten.setup(*parts(), precision="bf16-mixed"))
    handed = hasten.setup(*parts(), precision="bf16-mixed", compile=True)
    for one, other in zip(trained(*handed), plain):
        torch.testing.assert_close(one, other, rtol=0.05, atol=5e-3)


def test_a_model_compiled_by_hand_stays_compiled() -> None:
    model, _, _ = parts()
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    wrapped = torch.compile(model, backend=backend)
    wrapped = hasten.setup(wrapped, precision="bf16-mixed")
    with torch.no_grad():
        assert wrapped(torch.randn(2, 12)).dtype is torch.float32
    assert calls
    assert type(copy.deepcopy(model)(torch.randn(2, 12))) is torch.Tensor
    by_hand.end()
    assert "_compiled_call_impl" not in vars(wrapped)


def test_a_model_whose_forward_no_technique_wraps_pays_nothing_in_a_step() -> None:
    model, optimizer, loader = parts()
    model, optimizer, loader = hasten.setup(model, optimizer, loader, channels_last=False, matmul_precision="high")
    model(torch.randn(2, 12))
    assert "_compiled_call_impl" not in vars(model)
    assert type(loader) is DataLoader
    assert torch.autograd.backward.__module__ == "torch.autograd"
    by_hand.end()
    model, optimizer, loader = hasten.setup(*parts(), fused_optimizer=True)
    model(torch.randn(2, 12))
    assert "_compiled_call_impl" not in vars(model)


def test_copies_and_pickles_of_the_model_are_plain() -> None:
    model, _, _ = hasten.setup(*parts(), precision="bf16-mixed")
    inputs = torch.randn(4, 12)
    model.eval()(inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "_compiled_call_impl" not in vars(twin)
        with torch.no_grad():
            twin[0].weight.zero_()
            twin[0].bias.zero_()
            assert torch.equal(twin(inputs), twin[1:](torch.zeros(4, 32)))  # its own weights, not the original's


def test_a_checkpoint_loads_without_hasten(tmp_path: Any) -> None:
    model, optimizer, loader = hasten.setup(*parts(), precision="bf16-mixed", fused_optimizer=True, compile=False)
    trained(model, optimizer, loader)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    script = """
        import sys
        import torch
        from torch import nn
        saved = torch.load(sys.argv[1], weights_only=True)
        model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 3))
        model.load_state_dict(saved["model"])
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.state[model[0].weight]["exp_avg"].abs().sum() > 0
        assert "hasten" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path / "last.pt"], check=True)


def adversarial(handed: bool) -> list[torch.Tensor]:
    """Two models, two optimizers and two loaders in one loop."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    own = [torch.optim.Adam(maker.parameters(), 0.01), torch.optim.SGD(judge.parameters(), 0.1, momentum=0.9)]
    real = DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=8, shuffle=True)
    noise = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=8, shuffle=True)
    cast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    if handed:
        cast = hasten.autocast
        maker, judge, *own, real, noise = hasten.setup(
            maker, judge, *own, real, noise, precision="bf16-mixed", batched_fetch=True
        )
    for (truth,), (seed,) in zip(real, noise):
        with cast():
            fake = maker(seed)
            loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(truth)).mean()
        own[1].zero_grad()
        loss.backward()
        own[1].step()
        with cast():
            loss = F.softplus(-judge(fake)).mean()
        own[0].zero_grad()
        loss.backward()
        own[0].step()
    return [parameter.detach() for model in (maker, judge) for parameter in model.parameters()]


def test_several_models_optimizers_and_loaders() -> None:
    assert equal(adversarial(handed=True), adversarial(handed=False))


def test_one_model_inside_another_is_cast_once() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(inner, nn.ReLU())
    inner, outer = hasten.setup(inner, outer, precision="bf16-mixed")
    inputs = torch.randn(3, 4)
    assert inner(inputs).dtype is outer(inputs).dtype is torch.float32


def test_a_later_call_with_the_same_techniques_adds_to_the_first(capfd: Any) -> None:
    first = hasten.setup(nn.Linear(4, 4), precision="bf16-mixed")
    second = hasten.setup(nn.Linear(4, 4), precision="bf16-mixed")
    inputs = torch.randn(2, 4)
    for model in (first, second):
        with torch.autocast("cpu", torch.bfloat16):
            cast = F.linear(inputs, model.weight, model.bias).float()
        assert torch.equal(model(inputs), cast)
    told = [line for line in capfd.readouterr().err.splitlines() if "this CPU has no instructions for it" not in line]
    assert told == []


def test_a_later_call_with_other_techniques_ends_the_first_and_says_so(capfd: Any) -> None:
    first = hasten.setup(nn.Linear(4, 4), precision="bf16-mixed")
    inputs = torch.randn(2, 4)
    first(inputs)
    hasten.setup(nn.Linear(4, 4))
    assert torch.equal(first(inputs), F.linear(inputs, first.weight, first.bias))
    assert "precision of the former one end here" in capfd.readouterr().err


def test_the_end_puts_everything_back() -> None:
    before = torch.autograd.backward, torch.Tensor.normal_, torch.optim.Optimizer.zero_grad, DataLoader._get_iterator
    model, optimizer, loader = parts()
    hasten.setup(model, optimizer, loader, precision="16-mixed", set_to_none=True, loader_workers=1)
    assert torch.autograd.backward is not before[0]
    by_hand.end()
    after = torch.autograd.backward, torch.Tensor.normal_, torch.optim.Optimizer.zero_grad, DataLoader._get_iterator
    assert after == before
    assert "_compiled_call_impl" not in vars(model)
    assert equal(trained(model, optimizer, loader), trained(*parts()))


def test_a_plan_of_tune_is_installed_and_arguments_add_to_it() -> None:
    by_torch = trained(*parts(fused=True), context=lambda: torch.autocast("cpu", torch.bfloat16))
    handed = hasten.setup(*parts(), plan=Plan({"fused_optimizer": True}), precision="bf16")
    assert equal(trained(*handed), by_torch)


def test_loaders_of_other_kinds_come_back_as_they_are() -> None:
    batches = (torch.ones(1) for _ in range(3))
    assert hasten.setup(batches, batched_fetch=True) is batches


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


def test_an_iterable_dataset_under_loader_techniques_is_left_alone(capfd: Any) -> None:
    loader = hasten.setup(DataLoader(Stream(), batch_size=2), loader_workers=2, batched_fetch=True)
    assert torch.equal(torch.cat(list(loader)), torch.arange(6.0))
    by_hand.end()
    assert "loader_workers left alone: an iterable dataset" in capfd.readouterr().err


WRONG = [
    ({"presision": "bf16"}, "there is no technique 'presision'"),
    ({"device": "cuda"}, r"model\.to\(device\) before the call"),
    ({"precision": "bf17"}, r"setup\(precision='bf17'\): precision must be one of"),
    ({"compile": "fast"}, "compile must be one of"),
    ({"plan": Plan({"precision": "bf16-mixed"}), "precision": "16-mixed"}, "the call says precision='16-mixed'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(hasten.HastenError, match=message):
        hasten.setup(nn.Linear(1, 1), **arguments)


@pytest.mark.parametrize("part", [[nn.Linear(1, 1)], torch.ones(2), 3])
def test_parts_that_are_none_are_named(part: Any) -> None:
    with pytest.raises(hasten.HastenError, match=f"argument 2 of hasten.setup is a {type(part).__name__}"):
        hasten.setup(nn.Linear(1, 1), part)


def test_a_technique_that_comes_too_late_is_said_and_left_out(capfd: Any) -> None:
    hasten.setup(nn.Linear(1, 1), allocator="jemalloc")
    assert 'allocator is not installed: "jemalloc" is chosen when a process starts' in capfd.readouterr().err


def test_a_technique_that_found_nothing_is_said_when_the_process_ends(tmp_path: Path) -> None:
    script = """
        import hasten, torch
        model = hasten.setup(torch.nn.Linear(2, 2), channels_last=True)
        model(torch.ones(1, 2))
    """
    write(tmp_path, "train.py", script)
    ended = forked(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    assert "channels_last found no model with 2-D convolutions to act on" in ended.err
