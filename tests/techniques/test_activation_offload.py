"""Activations that wait on the host: the same bits, and fewer bytes on the device. A CPU stands for the device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from hasten import HastenError, Plan
from hasten.switchboard import Switchboard
from hasten.techniques import CATALOGUE, Refusal, check
from hasten.techniques.compute.narrow_kernels import missing_kernel
from hasten.techniques.memory import saved_on_host
from hasten.techniques.memory.activation_offload import ActivationOffload
from hasten.techniques.memory.saved_on_host import OnHost, _MovedToHost, _OnDevice, _overlaps
from tests.techniques.conftest import CPU, GPU, Train, evidence_of, identical


@pytest.fixture
def technique(monkeypatch: pytest.MonkeyPatch) -> ActivationOffload:
    """The technique, which moves a CPU's tensors, small ones too."""
    monkeypatch.setattr(saved_on_host, "LEAST", 1)
    monkeypatch.setattr(ActivationOffload, "device", "cpu")
    return ActivationOffload(True)


class Attention(nn.Module):
    """Views of one storage, dropout, residuals, a tensor that is saved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + self.out((y * y).transpose(1, 2).reshape(x.shape))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(16 * 64, 5),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # fmt: skip


KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "attention": (lambda: nn.Sequential(Attention(), Attention(), nn.Flatten(), nn.Linear(32 * 10, 5)), (6, 10, 32)),
    "images": (images, (6, 3, 12, 12)),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(8, 16, batch_first=True), _First(), nn.Linear(16, 5)), (6, 7, 8)),
}


class _First(nn.Module):
    def forward(self, given: Any) -> Any:
        return given[0][:, -1]


def trained(kind: str, call: Any, autocast: bool = False) -> dict[str, Any]:
    """What five steps leave, with a validation between."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for number in range(5):
        x, y = torch.randn(shape), torch.randint(0, 5, (shape[0],))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(call(model, (x,), {}), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if number == 2:
            model.eval()
            losses.append(call(model, (x,), {}).sum().item())
            model.train()
    return {"model": model.state_dict(), "losses": losses, "random": torch.get_rng_state()}


def plain(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_is_the_same_to_the_bit(technique: ActivationOffload, kind: str, autocast: bool) -> None:
    if autocast and (why := missing_kernel(KINDS[kind][0](), torch.bfloat16)):
        pytest.skip(why)
    assert identical(trained(kind, technique.forward(plain), autocast), trained(kind, plain, autocast))
    assert technique.acted == {"model": 1}


def test_between_forward_and_backward_weights_inputs_and_little_else_stay(technique: ActivationOffload) -> None:
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())])
    given = torch.randn(128, 64)
    stays = {one.untyped_storage().data_ptr() for one in (*model.parameters(), given)}
    gc.collect()  # graphs of other tests
    out = technique.forward(plain)(model, (given,), {})
    kept = [one for one in gc.get_objects() if type(one) in (_OnDevice, _MovedToHost)]
    assert out.requires_grad
    assert (
        sum(type(one) is _MovedToHost for one in kept) == 4 + 3
    )  # each tanh's output, saved by tanh and by the layer behind
    assert {one.tensor.untyped_storage().data_ptr() for one in kept if type(one) is _OnDevice} <= stays


def test_a_tensor_comes_back_with_its_strides(technique: ActivationOffload) -> None:
    hooks = OnHost("cpu", nn.Linear(1, 1), ())
    whole = torch.randn(4, 6, 8)
    views = [whole, whole.transpose(0, 2), whole[:, ::2], whole.permute(2, 0, 1)[4:], whole.bfloat16()]
    for view in views:
        away = hooks.pack_hook(view)
        assert type(away) is _MovedToHost
        back = away.restored()
        assert torch.equal(back, view)
        assert (back.stride(), back.dtype) == (view.stride(), view.dtype)
        assert back.data_ptr() != view.data_ptr()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=4))
def test_overlaps_are_seen(dimensions: list[tuple[int, int]]) -> None:
    """Never missed; what is called overlapping may not be."""
    shape, stride = [size for size, _ in dimensions], [step for _, step in dimensions]
    view = torch.zeros(200).as_strided(shape, stride)
    places = torch.arange(200).as_strided(shape, stride).flatten()
    if len(places.unique()) < len(places):
        assert _overlaps(view)
    assert not _overlaps(torch.zeros(shape).transpose(0, -1))


def test_expanded_unaligned_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = OnHost("cpu", nn.Linear(1, 1), ())
    large = torch.randn(1 << 19)
    assert type(hooks.pack_hook(large)) is _MovedToHost
    for other in (large[:1000], torch.randn(1, 1 << 10).expand(1 << 10, -1), large[1:], nn.Parameter(large)[:-1]):
        kept = hooks.pack_hook(other)
        assert type(kept) is (_MovedToHost if other is large else _OnDevice) or other.data_ptr() % 16 == 0
    assert type(OnHost("cuda", nn.Linear(1, 1), ()).pack_hook(large)) is _OnDevice  # another device's


def test_what_is_changed_in_place_after_it_was_saved_is_the_same_error(technique: ActivationOffload) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    model, x = Changes(), torch.ones(8)
    for call in (plain, technique.forward(plain)):
        out = call(model, (x,), {})
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_gradients_of_gradients_are_the_same(technique: ActivationOffload) -> None:
    found = []
    for call in (plain, technique.forward(plain)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        x = torch.randn(4, 8, requires_grad=True)
        [slope] = torch.autograd.grad(call(model, (x,), {}).sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([one.grad for one in model.parameters() if one.grad is not None])
    assert identical(*found)


def test_eval_mode_no_grad_and_own_hooks_are_left_to_themselves(technique: ActivationOffload) -> None:
    call, model = technique.forward(plain), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with torch.no_grad():
        call(model, (torch.ones(2, 8),), {})
    with torch.autograd.graph.save_on_cpu():
        call(model, (torch.ones(2, 8),), {})
    call(model.eval(), (torch.ones(2, 8),), {})
    assert technique.acted == {}


def test_a_model_on_another_device_is_left_alone_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    technique = ActivationOffload(True)
    call, model = technique.forward(plain), nn.Linear(8, 8)
    for _ in range(2):
        call(model, (torch.ones(2, 8),), {})
    assert technique.acted == {"left alone: CUDA only: the model is not on a GPU": 1}
    assert capsys.readouterr().err.count("the model is not on a GPU") == 1


def test_it_is_switched_between_two_steps(technique: ActivationOffload) -> None:
    board, calls = Switchboard([technique]), []
    call = board.wrap("forward", plain)

    def switching(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        board.switch({technique.name: True} if len(calls) % 2 else {})
        calls.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
        return call(module, args, kwargs)

    assert identical(trained("attention", switching), trained("attention", plain))
    assert technique.acted == {"model": 1}
    assert board.broken == {}


def test_a_plan_with_it_trains_the_same_on_a_cpu_and_says_that_it_is_of_no_use(train: Train) -> None:
    script = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Tanh(), torch.nn.Linear(600, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad(); model(torch.randn(600, 600)).square().mean().backward(); optimizer.step()
        torch.save(model.state_dict(), "left.pt")
    """
    without, under = train(script), train(script, activation_offload=True)
    assert under.code == 0, under.err
    assert identical(under.left, without.left)
    assert "left alone: CUDA only" in under.installed["activation_offload"]


def test_it_stands_neither_beside_compile_nor_beside_what_computes_again() -> None:
    for other, setting in (("compile", "default"), ("activation_checkpointing", 2)):
        with pytest.raises(HastenError, match="activation_offload cannot act here"):
            check(Plan({"activation_offload": True, other: setting}))
    check(Plan({"activation_offload": True, "optimizer_in_backward": True, "precision": "bf16-mixed"}))


def test_tune_does_not_try_it_by_itself_and_a_cpu_has_no_use_for_it() -> None:
    rule = CATALOGUE["activation_offload"]
    found = rule.settings(evidence_of())
    assert isinstance(found, Refusal)
    assert "CUDA only" in found.reason
    assert "CUDA only" in rule.useless(True, CPU)
    assert rule.useless(True, GPU) == ""
