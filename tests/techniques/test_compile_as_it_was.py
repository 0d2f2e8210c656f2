"""Compiled models give what plain ones give where torch's compiler alone would not; found by attacks on `compile`."""

from __future__ import annotations

import pytest

from hasten.techniques.compute.compile import compiler
from tests.techniques.conftest import Train, close, identical

needs_compiler = pytest.mark.skipif(not compiler(), reason="no C++ compiler")

# What torch's compiler makes of a graph does not matter to most of these, and the C++ compiler takes long.
START = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    plain = torch.compile
    torch.compile = lambda f, **_: plain(f, backend="aot_eager")
    torch.manual_seed(0)
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.other = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        def forward(self, x):
            inner = torch.tanh(self.body(x))
            return self.one(inner), self.other(inner)
    model, target = Two(), torch.tensor([0, 1, 2, 0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.3)
"""
END = """
    torch.save({"weights": model.state_dict(), "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]},
               "left.pt")
"""


def test_parameters_of_an_output_that_a_step_leaves_out_get_no_gradient(train: Train) -> None:
    script = f"""{START}
    for number in range(5):
        one, other = model(torch.randn(5, 4))
        loss = F.cross_entropy(one, target) + (F.cross_entropy(other, target) if number < 2 else 0)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left["weights"], changed.left["weights"])
    assert "its outputs depend on different parameters" in changed.installed["compile"]


@pytest.mark.parametrize(
    "forward",
    [
        "return self.one(inner), (self.other(inner) if len(seen) > 2 else inner.detach())",
        "self.kept = self.other(inner) if len(seen) > 2 else inner.detach(); return self.one(inner), self.kept",
    ],
    ids=["returned", "kept"],
)
def test_outputs_that_hang_on_other_parameters_later_get_no_gradient_where_they_are_left_out(
    train: Train, forward: str
) -> None:
    script = f"""{START}
    class Later(Two):
        def forward(self, x):
            inner = torch.tanh(self.body(x))
            {forward}
    model, seen = Later(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(8):
        one, other = model(torch.randn(5, 4))
        loss = F.cross_entropy(one, target) + (F.cross_entropy(other, target) if number in (3, 4) else 0)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        seen.append(number)
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["weights"], changed.left["weights"], 1e-5)
    assert "its outputs depend on different parameters" in changed.installed["compile"]


def test_a_model_that_returns_its_loss_beside_other_outputs_is_compiled(train: Train) -> None:
    script = f"""{START}
    class Whole(Two):
        def forward(self, x):
            one, other = super().forward(x)
            return {{"loss": F.cross_entropy(one, target) + F.cross_entropy(other, target), "logits": one}}
    model = Whole()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.3)
    for number in range(4):
        loss = model(torch.randn(5, 4))["loss"]
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["weights"], changed.left["weights"], 1e-5)
    assert changed.installed == {"compile": "model"}
    assert changed.left["graphs"] == 1


@needs_compiler
def test_a_graph_is_differentiated_twice(train: Train) -> None:
    script = f"""{START}
    torch.compile = plain
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        loss = F.cross_entropy(model(x), target)
        slope, = torch.autograd.grad(loss, x, retain_graph=True)
        optimizer.zero_grad(); loss.backward(retain_graph=True); (loss * slope.norm().item()).backward()
        optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["weights"], changed.left["weights"], 1e-5)
    assert changed.left["graphs"] == 1


def test_a_copy_of_a_modules_attributes_computes_with_its_own_weights(train: Train) -> None:
    """As learn2learn's `clone_module` makes them: what calls compiled code lies among the attributes."""
    script = f"""{START}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    def clone(module):
        twin = module.__new__(type(module))
        twin.__dict__ = module.__dict__.copy()
        twin._parameters = {{name: value.detach() * 2 for name, value in module._parameters.items()}}
        twin._modules = {{name: clone(inner) for name, inner in module._modules.items()}}
        return twin
    outputs = []
    for number in range(3):
        x = torch.randn(5, 4)
        model(x).sum().backward()
        outputs.append(clone(model)(x).detach())
    torch.save({{"outputs": torch.stack(outputs)}}, "left.pt")
    """
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["outputs"], changed.left["outputs"], 1e-5)


@pytest.mark.parametrize(
    "tool",
    [
        "torch.jit.trace(model, x)(x)",
        "torch.fx.symbolic_trace(Around())(x)",
        "torch.func.vmap(torch.func.grad(lambda row: model(row[None]).sum()))(x)",
        "torch.func.jvp(model, (x,), (x,))[1]",
        "dual(x)",
        "flops(x)",
        "model(x.as_subclass(Own)).as_subclass(torch.Tensor)",
    ],
)
def test_what_looks_at_single_operations_sees_them(train: Train, tool: str) -> None:
    script = f"""{START}
    import torch.autograd.forward_ad as forward
    from torch.utils.flop_counter import FlopCounterMode
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    class Own(torch.Tensor): pass
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
        def forward(self, x): return self.inner(x)
    def dual(x):
        with forward.dual_level(): return forward.unpack_dual(model(forward.make_dual(x, x))).tangent
    def flops(x):
        with FlopCounterMode(display=False) as counted: model(x)
        return torch.tensor(counted.get_total_flops())
    for number in range(3):
        x = torch.randn(5, 4)
        model(x).sum().backward()
    torch.save({{"gives": {tool}.detach()}}, "left.pt")
    """
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["gives"], changed.left["gives"], 1e-5)


def test_a_second_backward_asked_for_by_position_is_noticed(train: Train) -> None:
    script = f"""{START}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        slope, = torch.autograd.grad(model(x).sum(), x, None, True, True)
        optimizer.zero_grad(); slope.pow(2).sum().backward(); optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left["weights"], changed.left["weights"])
    assert "gradients are differentiated again (create_graph)" in changed.err


FEATURE = (
    START
    + """
    class Features(Two):
        def forward(self, x):
            self.inner = torch.tanh(self.body(x))
            return self.one(self.inner)
    model, seen = Features(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        loss = F.cross_entropy(model(torch.randn(5, 4)), target)
        ASKS
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        seen.append(GIVES)
    torch.save({"weights": [p for p in model.parameters()], "seen": seen}, "left.pt")
"""
)


@pytest.mark.parametrize(
    ("asks", "gives"),
    [
        ("model.inner.retain_grad()", "model.inner.grad.clone()"),
        ("model.inner.register_hook(lambda gradient: gradient * 0.1)", "0"),
        ("slope, = torch.autograd.grad(loss, model.inner, retain_graph=True)", "slope"),
        ("slope, = torch.autograd.grad(loss, [model.inner], retain_graph=True, allow_unused=True)", "slope"),
    ],
)
def test_gradients_inside_a_model_are_there(train: Train, asks: str, gives: str) -> None:
    script = FEATURE.replace("ASKS", asks).replace("GIVES", gives)
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    assert "the gradient of a tensor within a graph is asked for" in changed.err


def test_a_hook_on_a_parameter_leaves_a_model_compiled(train: Train) -> None:
    script = f"""{START}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    for number in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        loss = F.cross_entropy(model(x), target)
        x.register_hook(lambda gradient: gradient * 2)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["weights"], changed.left["weights"], 1e-5)
    assert changed.left["graphs"] == 1


def test_a_full_deque_is_followed(train: Train) -> None:
    script = f"""{START}
    import collections
    class Remembers(Two):
        def __init__(self):
            super().__init__()
            self.lately = collections.deque(maxlen=2)
        def forward(self, x):
            self.lately.append(len(self.lately))
            return self.one(torch.tanh(self.body(x))) * (1 + len(self.lately))
    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(5):
        loss = F.cross_entropy(model(torch.randn(5, 4)), target)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left["weights"], changed.left["weights"])
    assert "left alone: lately is a deque with a maxlen" in changed.installed["compile"]


MODEL = (
    START
    + """
    MODEL
    model, caught = Model(), 0
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for number in range(5):
        x = torch.randn(5, 4) * (100 if number % 2 else 1)
        try: loss = F.cross_entropy(model(x), target)
        except AssertionError: caught += 1; continue
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    model.eval()
    with torch.no_grad(): last = model(torch.ones(5, 4))
    torch.save({"weights": model.state_dict(), "caught": caught, "last": last}, "left.pt")
"""
)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (
            """try: scale = torch.linalg.cholesky(torch.eye(3) * (5 - x.abs().max()))
            except torch.linalg.LinAlgError: scale = torch.eye(3)
            return self.one(torch.tanh(self.body(x))) @ scale""",
            "its forward catches errors",
        ),
        (
            """assert (x.abs() < 10).all(), "too large"
            return self.one(torch.tanh(self.body(x)))""",
            "",
        ),
        (
            """inner = torch.tanh(self.body(x))
            return self.one(inner if torch.compiler.is_compiling() else F.dropout(inner, 0.5))""",
            "is_compiling",
        ),
        (
            """from torch.utils.checkpoint import checkpoint
            return self.one(checkpoint(lambda x: torch.tanh(self.body(x)), x, use_reentrant=True))""",
            "use_reentrant=True",
        ),
    ],
    ids=["except", "assert", "is_compiling", "reentrant"],
)
def test_what_a_forward_does_beside_its_operations(train: Train, forward: str, why: str) -> None:
    model = "class Model(Two):\n        def forward(self, x):\n            " + forward
    plain, changed = (train(MODEL.replace("MODEL", model), **plan) for plan in ({}, {"compile": "default"}))
    assert plain.code == changed.code == 0, changed.err
    assert plain.left["caught"] == changed.left["caught"]
    assert close(plain.left["weights"], changed.left["weights"], 1e-5)
    assert close(plain.left["last"], changed.left["last"], 1e-5)
    assert why in changed.installed["compile"]


def test_padding_that_an_encoder_leaves_out_in_eval_mode_is_left_out(train: Train) -> None:
    script = f"""{START}
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model, seen = nn.TransformerEncoder(layer, 1), []
    padding = torch.arange(4)[None] >= torch.tensor([3, 2, 1])[:, None]
    for number in range(3):
        x = torch.randn(3, 4, 4)
        model.train(); model(x, src_key_padding_mask=padding).sum().backward()
        model.eval()
        with torch.no_grad(): seen.append(model(x, src_key_padding_mask=padding))
    torch.save({{"seen": torch.stack(seen)}}, "left.pt")
    """
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["seen"], changed.left["seen"], 1e-5)


def test_parametrizations_that_are_kept_for_a_while_are_kept(train: Train) -> None:
    script = f"""{START}
    class Upper(nn.Module):
        def forward(self, weight): return weight.triu()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Upper())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        with torch.nn.utils.parametrize.cached():
            loss = F.cross_entropy(model(torch.randn(5, 4)), target) + model(torch.randn(5, 4)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["weights"], changed.left["weights"], 1e-5)


TWO_DRAWS = (
    "torch.zeros(8).uniform_() - torch.zeros(8).uniform_()"
    " + torch.randn_like(inner) * torch.randn_like(inner)"
    " + torch.ones(8).exponential_() - torch.ones(8).exponential_()"
    " + torch.zeros(8).geometric_(0.3) - torch.zeros(8).geometric_(0.3)"
)


@pytest.mark.parametrize(
    ("backend", "noise"),
    [
        # The compiler's passes without its C++, which draws some of the numbers in another way.
        ("aot_eager_decomp_partition", "torch.zeros(8).uniform_() - torch.zeros(8).uniform_()"),
        # slow: compiles C++
        pytest.param("inductor", TWO_DRAWS, marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_two_draws_that_look_alike_are_two(train: Train, backend: str, noise: str) -> None:
    compiles = "plain" if backend == "inductor" else f"lambda f, **_: plain(f, backend={backend!r})"
    script = f"""{START}
    torch.compile = {compiles}
    class Noisy(Two):
        def forward(self, x):
            inner = torch.tanh(self.body(x))
            return self.one(inner + {noise})
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(3):
        loss = F.cross_entropy(model(torch.randn(5, 4)), target)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    {END}"""
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["weights"], changed.left["weights"], 1e-5)
    assert changed.left["graphs"] == 1
