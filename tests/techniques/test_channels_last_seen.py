"""Models whose own code would see how activations lie in memory; found by attacks on `channels_last`."""

from __future__ import annotations

import pytest

from tests.techniques.conftest import Train, close, identical

SCRIPT = """
    import torch
    import torch.nn.functional as F
    from torch import nn, rand_like
    torch.manual_seed(0)
    flat = torch.Tensor.view
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor: return x + torch.rand_like(x)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(16, 3)
        def forward(self, x):
            inner = torch.relu(self.first(x))
            inner = CHANGED
            return self.last(torch.flatten(self.second(inner), 1))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        loss = F.cross_entropy(model(torch.randn(4, 2, 6, 6)), torch.tensor([0, 1, 2, 0]))
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.save({"weights": model.state_dict(), "random": torch.get_rng_state()}, "left.pt")
"""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ("inner + rand_like(inner)", "torch's rand_like by a name of its own"),
        ("flat(flat(inner, 4, -1), 4, 4, 4, 4)", "torch's flat by a name of its own"),
        ("inner * (2 if inner.stride(1) == 16 else 3)", "`stride`"),
        ("inner * (2 if inner.is_contiguous() else 3)", "`is_contiguous`"),
        ("inner + torch.ops.aten.rand_like(inner)", "`aten`"),
        ("inner + torch.func.vmap(lambda part: part.view(-1).sum())(inner).view(4, 1, 1, 1)", "`vmap`"),
        ("scripted(inner)", "TorchScript"),
    ],
)
def test_a_model_that_tells_how_activations_lie_is_left_alone(train: Train, changed: str, why: str) -> None:
    script = SCRIPT.replace("CHANGED", changed)
    plain, under = train(script), train(script, channels_last=True)
    assert plain.code == under.code == 0, under.err
    assert identical(plain.left, under.left)
    assert why in under.installed["channels_last"]


@pytest.mark.parametrize(
    "dropped",
    [
        "torch.dropout(inner, 0.5, True)",
        "torch.native_dropout(inner, 0.5, True)[0]",
        "F.dropout(inner * self.first.stride[0], 0.5)",  # a layer's stride says nothing of how tensors lie
    ],
)
def test_dropouts_have_the_same_masks(train: Train, dropped: str) -> None:
    script = SCRIPT.replace("CHANGED", dropped)
    plain, under = train(script), train(script, channels_last=True)
    assert plain.code == under.code == 0, under.err
    assert close(plain.left["weights"], under.left["weights"], 1e-5)
    assert identical(plain.left["random"], under.left["random"])
    assert under.installed == {"channels_last": "model"}


MADE = {  # what a model is made of
    "no weight of its own": "Hyper()",
    "a weight of None": "Hyper(None)",
    "a lazy convolution": "nn.LazyConv2d(4, 3)",
    "a forward made by exec": "nn.Sequential(nn.Conv2d(2, 4, 3), Made())",
    "an attribute that raises": "nn.Sequential(nn.Conv2d(2, 4, 3), Odd())",
}


@pytest.mark.parametrize("case", MADE)
def test_whatever_a_model_is_made_of_its_convolutions_are_laid_out(train: Train, case: str) -> None:
    script = SCRIPT.replace("CHANGED", "inner").replace(
        "model = Net()",
        """class Hyper(nn.Conv2d):
        def __init__(self, *weight):
            super().__init__(2, 4, 3)
            self.bank = nn.Parameter(self.weight.detach().clone())
            del self.weight
            for none in weight: self.register_parameter("weight", none)
        def forward(self, x): return F.conv2d(x, self.bank * 1.1, self.bias)
    made = {}
    exec("def forward(self, x): return x * 2", made)
    class Made(nn.Module): forward = made["forward"]
    class Raises:
        def __getattr__(self, name): raise RuntimeError(name)
    class Odd(nn.Module):
        odd = Raises()
        def forward(self, x): return x
    model = Net()
    model.first = """
        + MADE[case]
        + """
    if isinstance(model.first, nn.LazyConv2d): model(torch.randn(4, 2, 6, 6))""",
    )
    plain, under = train(script), train(script, channels_last=True)
    assert plain.code == under.code == 0, under.err
    assert under.installed == {"channels_last": "model"}
    assert close(plain.left["weights"], under.left["weights"], 1e-5)
