"""Linear layers in float8: which, when they are refused, and, where torchao is there, numbers that it emulates."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hasten
from hasten import HastenError, Plan
from hasten.techniques import CATALOGUE, Refusal, check
from hasten.techniques.compute.fp8 import Fp8, linear_layers
from tests.techniques.conftest import CPU, GPU, MODEL, Train, evidence_of, identical
from tests.trainer.trainings import Regression, loader, quiet

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Own(nn.Linear):
    """Not torch's own."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 40), nn.Linear(40, 64), Own(64, 64), nn.LayerNorm(64),
        nn.Linear(64, 32), nn.Linear(32, 16),
    )  # fmt: skip


def test_layers_of_torchs_own_class_whose_sizes_fit_are_taken_but_the_last() -> None:
    model = network()
    assert linear_layers(model) == [model[0], model[6]]
    assert linear_layers(nn.Linear(32, 32)) == []
    nn.utils.parametrizations.weight_norm(model[0])
    assert linear_layers(model) == [model[6]]
    model[6].forward = lambda x: x
    assert linear_layers(model) == []
    assert linear_layers(network().double()) == []
    twice = nn.Linear(16, 16)
    assert linear_layers(nn.Sequential(twice, twice, nn.Linear(16, 4))) == [twice]


def test_a_model_that_is_not_on_a_gpu_is_refused() -> None:
    with pytest.raises(HastenError, match="fp8 needs an NVIDIA GPU, and the model is not on one"):
        quiet(fp8="tensorwise").fit(Regression(), loader())
    with pytest.raises(HastenError, match="fp8 needs an NVIDIA GPU"):
        hasten.setup(network(), fp8="rowwise")
    hasten.by_hand.end()


def test_a_script_on_a_cpu_trains_the_same_and_hears_why(train: Train) -> None:
    script = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad(); model(torch.randn(16, 32)).square().mean().backward(); optimizer.step()
        torch.save(model.state_dict(), "left.pt")
    """
    without, under = train(script), train(script, fp8="tensorwise")
    assert under.code == 0, under.err
    assert identical(under.left, without.left)
    assert under.installed["fp8"] == "left alone: fp8 needs an NVIDIA GPU, and the model is not on one"
    assert "fp8 does not act from here on: fp8 needs an NVIDIA GPU" in under.err


def test_without_torchao_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8, "emulate", True)
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(HastenError, match=r"fp8 needs torchao: [^\n]*\n  pip install 'hasten\[fp8\]'"):
        Fp8("tensorwise").prepare(network())


def test_settings() -> None:
    rule = CATALOGUE["fp8"]
    found = rule.settings(evidence_of())
    assert isinstance(found, Refusal)
    assert "CUDA only" in found.reason
    import dataclasses

    found = rule.settings(evidence_of(machine=GPU, models=(dataclasses.replace(MODEL, device="cuda"),)))
    assert isinstance(found, Refusal)
    assert "not measured on a GPU yet" in found.reason
    assert "CUDA only" in rule.useless("rowwise", CPU)
    assert rule.roundoff("rowwise") < rule.roundoff("tensorwise")
    with pytest.raises(HastenError, match='must be one of "tensorwise", "rowwise"'):
        check(Plan({"fp8": True}))


# -- numbers, emulated: `pip install 'hasten[fp8]'` ------------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torchao computes in float32 what it has rounded to float8."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(Fp8, "emulate", True)


def trained(model: nn.Module, steps: int = 6) -> tuple[dict[str, Any], list[float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draw, losses = torch.Generator().manual_seed(1), []
    for number in range(steps):
        x = torch.randn(7 if number % 2 else 32, 32, generator=draw)  # the last batch of an epoch is of any size
        loss = F.mse_loss(model(x), x[:, :16])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_goes_the_same_way(emulated: None, recipe: str) -> None:
    plain, losses = trained(network())
    model, technique = network(), Fp8(recipe)
    parameters = list(model.parameters())
    technique.prepare(model)
    technique.model(model, ())
    assert technique.acted == {"layer": 2}
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    left, rounded = trained(model)
    assert list(left) == list(plain)
    assert rounded != losses
    assert rounded == pytest.approx(losses, rel=technique.roundoff(recipe))


def test_a_checkpoint_is_a_plain_one_and_so_is_the_model_afterwards(emulated: None) -> None:
    model, technique = network(), Fp8("tensorwise")
    technique.prepare(model)
    left, _ = trained(model)
    again = network()
    again.load_state_dict(left)
    technique.teardown()
    assert [type(layer) for layer in model] == [type(layer) for layer in again]
    assert all(vars(one).keys() == vars(other).keys() for one, other in zip(model, again, strict=True))
    x = torch.randn(3, 32)
    assert identical(model(x), again(x))
    model.load_state_dict(network().state_dict())
    technique.prepare(model)
    assert identical(trained(model)[0], left)


def test_hooks_stay_and_a_layer_that_is_there_twice_is_one(emulated: None) -> None:
    seen = []
    layer = nn.Linear(16, 16)
    layer.register_forward_hook(lambda *call: seen.append(call[0]))
    model = nn.ModuleDict({"one": layer, "other": layer, "last": nn.Linear(16, 4)})
    Fp8("tensorwise").prepare(model)
    assert model["one"] is model["other"]
    exact = F.linear(torch.ones(2, 16) / 3, layer.weight, layer.bias)
    out = layer(torch.ones(2, 16) / 3)
    assert seen == [layer]
    assert not torch.equal(out, exact)
    assert torch.allclose(out, exact, atol=0.1)


def test_the_trainer_has_it_beside_bf16_and_checkpointing(emulated: None) -> None:
    class Wide(Regression):
        def __init__(self) -> None:
            block = [nn.Linear(32, 32), nn.Tanh()]
            super().__init__(net=nn.Sequential(nn.Linear(4, 32), *block, nn.Linear(32, 1)))

    trainer = quiet(fp8="tensorwise", precision="bf16-mixed", max_epochs=2, gradient_clip_val=1.0)
    trainer.fit(Wide(), loader())
    assert trainer.run.installed()["fp8"] == "layer"
    assert [type(one) for one in trainer.model.net] == [nn.Linear, nn.Linear, nn.Tanh, nn.Linear]
