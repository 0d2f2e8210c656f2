"""A model that is converted computes in its type throughout, and what others hold is not converted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hasten.errors import HastenError
from hasten.techniques.compute.precision import Precision
from tests.techniques.conftest import Train, close, identical
from tests.techniques.whole_steps import Driven, Stepping, batches


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [("bf16-true", torch.bfloat16), ("16-true", torch.float16), ("64-true", torch.float64)],
)
def test_a_converted_model_computes_in_its_type_throughout(setting: str, dtype: Any) -> None:
    driven = Driven(precision=setting)
    (technique,) = driven.run.techniques
    assert isinstance(technique, Precision)
    same = [id(parameter) for parameter in driven.module.parameters()]
    technique.prepare(driven.module)  # once more changes nothing
    driven.run.model(driven.module.net, ())
    driven.fit(batches())
    assert [id(parameter) for parameter in driven.module.parameters()] == same
    assert {parameter.dtype for parameter in driven.module.parameters()} == {dtype}
    assert driven.module.count.dtype is torch.int64
    assert driven.module.seen == dict.fromkeys(("x", "weights", "output", "new"), dtype)
    assert torch.get_default_dtype() is torch.float32
    steps = 2 if dtype is torch.float16 else 8  # AdamW's eps is 0 in fp16: not a number from the first update on
    tolerance = 1e-5 if dtype is torch.float64 else 0.05
    assert close(driven.losses[:steps], Driven().fit(batches()).losses[:steps], tolerance)
    assert driven.run.installed() == {"precision": "model"}
    output = driven.step(driven.module, (batches(1)[0], 0), {})["o"]
    assert output.dtype is dtype


# Weights that a process shares, weights tied by hand, an average beside the model, and an input changed in place.
HOLDING = """
    import copy
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        def forward(self, x):
            return self.last(self.first(x.clamp_(-1.0, 1.0)).tanh())
    model = Net()
    model.last.weight.data = model.first.weight.data
    model.share_memory()
    shared = [p.detach() for p in model.parameters()]
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    losses, xs = [], torch.randn(5, 4, 8)
    for x in xs:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()): a.lerp_(p, 0.1)
        losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict(), "average": average.state_dict(), "xs": xs,
                "shared": shared, "state": optimizer.state_dict()}, "left.pt")
"""


@pytest.mark.parametrize("setting", ["bf16-true", "64-true"])
def test_a_script_keeps_its_own_model(train: Train, setting: str) -> None:
    plain, changed = train(HOLDING), train(HOLDING, precision=setting)
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    assert f'precision does not act from here on: "{setting}" is for the Trainer' in changed.err
    assert "left alone" in changed.installed["precision"]


class Tied(nn.Module):
    """Weights tied by their data, and weights that are views of one buffer; changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight.data = self.one.weight.data
        self.register_buffer("flat", torch.randn(8))
        self.three = nn.Parameter(self.flat[2:8].view(2, 3).t())


@pytest.mark.parametrize(("setting", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_what_shares_memory_in_a_converted_model_still_does(setting: str, dtype: Any) -> None:
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    Precision(setting).prepare(model)
    for name, tensor in model.state_dict().items():
        assert identical(tensor, before[name].to(dtype))
    model.one.weight.data.fill_(2.0)
    model.flat.fill_(3.0)
    assert (model.two.weight == 2.0).all()
    assert (model.three == 3.0).all()
    assert model.three.stride() == (1, 3)


def test_memory_that_others_hold_as_well_is_not_converted() -> None:
    shared, viewed = nn.Linear(3, 3).share_memory(), nn.Linear(3, 3)
    outside = viewed.bias.detach()
    with pytest.raises(HastenError, match="weight lies in memory that processes share"):
        Precision("64-true").prepare(shared)
    with pytest.raises(HastenError, match="bias shares its memory with a tensor that is no parameter"):
        Precision("64-true").prepare(viewed)
    assert shared.weight.dtype is viewed.weight.dtype is torch.float32
    del outside
    Precision("64-true").prepare(viewed)
    assert viewed.weight.dtype is torch.float64


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_input_changed_in_place_is_seen_by_who_made_it(mode: Any) -> None:
    module = Stepping()
    technique = Precision("64-true")
    technique.prepare(module)

    def clamp(module: Any, args: Any, kwargs: Any) -> Any:
        assert args[0][0] is args[0][1]
        return args[0][0].clamp_(-1.0, 1.0).sum()

    x = torch.randn(8)
    expected = x.clamp(-1.0, 1.0)
    with mode():
        assert technique.forward(clamp)(module, ([x, x],), {}).dtype is torch.float64
    assert identical(x, expected)
