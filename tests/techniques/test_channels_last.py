"""Images laid out pixel by pixel: the same model, the same names, the same numbers to rounding."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import pytest
import torch

from hasten.techniques import Choices, Refusal
from hasten.techniques.compute.channels_last import ChannelsLast
from tests.techniques.conftest import MODEL, Train, close, evidence_of, identical

TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layouts = []
    def Look():
        part = nn.Identity()
        part.register_forward_hook(lambda _, inputs, x: layouts.append(
            x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()))
        return part
    model = MODEL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    same = [id(p) for p in model.parameters()]
    losses = []
    for number in range(5):
        x = torch.randn(INPUT)
        loss = model(x).pow(2).mean()
        assert x.is_contiguous()  # the script's own tensor stays as it is
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict(), "layouts": set(layouts),
                "same": same == [id(p) for p in model.parameters()]}, "left.pt")
"""
CNN = "nn.Sequential(Look(), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Look(), nn.Flatten(), nn.Linear(288, 2))"


def test_convolutions_read_pixel_by_pixel(train: Train) -> None:
    script = TRAINING.replace("MODEL", CNN).replace("INPUT", "4, 3, 8, 8")
    plain, changed = train(script), train(script, channels_last=True)
    assert plain.code == changed.code == 0, changed.err
    assert (plain.left["layouts"], changed.left["layouts"]) == ({False}, {False, True})  # the input is the script's
    assert changed.left["same"]  # the optimizer still has the model's parameters
    assert list(plain.left["model"]) == list(changed.left["model"])
    assert close(plain.left["losses"], changed.left["losses"], 1e-4)
    assert close(plain.left["model"], changed.left["model"], 1e-4)
    assert changed.installed == {"channels_last": "model"}


def test_views_and_draws_are_torchs_own_until_a_convolution_lays_something_out(train: Train) -> None:
    script = """
    import torch
    from torch import nn
    class Compiled(nn.Module):  # where the compiler's code runs, no convolution of torch's is called
        def __init__(self):
            super().__init__()
            self.convolution, self.calls = nn.Conv2d(1, 2, 1), 0
        def forward(self, x):
            self.calls += 1
            return self.convolution(x) if self.calls > 1 else x * self.convolution.weight.mean()
    model, own, seen = Compiled(), (torch.Tensor.permute, torch.flatten, torch.rand_like), []
    for _ in range(2):
        model(torch.ones(2, 1, 2, 2)).sum().backward()
        seen.append([one is now for one, now in zip(own, (torch.Tensor.permute, torch.flatten, torch.rand_like))])
    torch.save(seen, "left.pt")
    """
    assert train(script, channels_last=True).left == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("nn.Sequential(Look(), nn.Linear(5, 2))", "2, 3, 4, 5"),
        ("nn.Sequential(Look(), nn.Conv1d(3, 4, 2))", "2, 3, 9"),
    ],
    ids=["linear", "1-D"],
)
def test_a_model_without_2d_convolutions_is_left_alone(train: Train, model: str, shape: str) -> None:
    script = TRAINING.replace("MODEL", model).replace("INPUT", shape)
    plain, changed = train(script), train(script, channels_last=True)
    assert identical(plain.left, changed.left)
    assert changed.installed == {}


LOOP = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    extra, more = [], []
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
            self.body = nn.Conv2d(8, 8, 3, groups=2)
            self.up, self.head = nn.ConvTranspose2d(8, 4, 2), nn.Linear(100, 2)
        def forward(self, x):
            h = F.relu(self.norm(self.stem(x)))
            h = self.between(self.body(h))
            return self.head(self.up(h).flatten(1))
        def between(self, h):
            return h
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    def run(x): return model(x).pow(2).mean()
    def after(number): pass
    SETUP
    losses = []
    for number in range(4):
        loss = run(torch.randn(4, 3, 8, 8))
        optimizer.zero_grad(); loss.backward(); after(number); optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict(), "state": optimizer.state_dict(), "extra": extra,
                "random": torch.rand(3),
                "strides": [p.grad.stride() for p in model.parameters() if p.grad is not None]}, "left.pt")
"""
HOSTILE = {
    "nothing else": "",
    "views of activations": """
        def between(h):
            h.view(-1)[3] = 7.0
            h.flatten(2)[:, 0] *= 2
            h.reshape(4, 8, -1).mul_(0.5)
            h.contiguous().add_(1)
            assert h[:2].view(2, -1).sum() + h.detach().mean(3).view(-1).sum()
            h.as_strided((2, 2), (2, 1)).zero_()
            return h.clone().view_as(h)
        model.between = between""",
    "random numbers for activations": """
        def between(h):
            h = F.dropout(h, 0.3) + 0.1 * torch.randn_like(h) + torch.empty_like(h).uniform_()
            h = F.alpha_dropout(h, 0.2) * torch.bernoulli(torch.sigmoid(h)) + torch.rand_like(h)
            return F.dropout(h * 2, 0.1, inplace=True)
        model.between = between""",
    "random numbers for parts of activations": """
        def between(h):
            a, b = h.chunk(2, 1)
            h = torch.cat([F.dropout(a, 0.3), torch.bernoulli(torch.sigmoid(b).expand(2, *b.shape)).mean(0)], 1)
            h = model.body(F.relu(h)[:, :, :4, :4].repeat(1, 1, 2, 2)).narrow(2, 0, 5)
            h = F.pad(h, (0, 0, 0, 1))
            return F.dropout(h.permute(0, 2, 3, 1), 0.3).permute(0, 3, 1, 2)[..., :4, :4]
        model.between = between""",
    "parts that are written to": """
        def between(h):
            gate, flat = h[:, :1], torch.flatten(input=h, start_dim=1)
            gate.mul_(0.1)
            for at in range(1, 4): h.select(0, at).mul_(2)
            more.append(h.detach()); h[1] *= 2; extra.append(more[-1].clone())
            return flat.view_as(h)
        model.between = between""",
    "activations that hooks keep": """
        model.stem.register_forward_hook(lambda module, args, out: extra.append(out.detach()))
        model.body.register_forward_hook(lambda module, args, out: more.append(out))
        def after(number):
            loss.tolist(); torch.save(more[-1], "more.pt")
            extra.append(list(torch.load("more.pt").stride()))""",
    "activations that are kept": """
        def between(h):
            more.append(h)
            return h + 1
        model.between = between
        def after(number):
            more[-1].view(-1)
            extra.append(more[-1].detach().clone())""",
    "an input that is clamped in place": """
        forward = model.forward
        def clamping(x):
            x.clamp_(-0.5, 0.5)
            return forward(x)
        model.forward = clamping
        def run(x):
            loss = model(x).pow(2).mean()
            extra.append(x.clone())
            return loss""",
    "gradients of the input": """
        def run(x):
            x.requires_grad_()
            out = model(x)
            grad, = torch.autograd.grad(out.sum(), x, create_graph=True)
            weights = torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True)
            extra.append(torch.cat([one.view(-1) for one in weights]))
            return out.pow(2).mean() + grad.view(4, -1).norm(dim=1).mean()""",
    "an image that comes out": """
        model.head = nn.Conv2d(4, 1, 1)
        model.forward = lambda x: {"image": model.head(model.up(model.body(model.stem(x)))), "x": [x]}
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        def run(x):
            with torch.inference_mode():
                extra.append(model(x)["image"].view(4, -1).clone())
                extra.append(model.stem(x).permute(0, 2, 3, 1).reshape(-1).clone())
            out = model(x)
            assert out["image"].is_contiguous() and out["x"][0] is x
            return out["image"].view(4, -1).pow(2).mean()""",
    "weights tied by their data": """
        twin = nn.Conv2d(3, 8, 3, bias=False)
        twin.weight.data = model.stem.weight.data
        forward = model.forward
        model.forward = lambda x: forward(x) + twin(x).mean()
        model.twin = twin""",
    "weights in shared memory": """
        model.share_memory()
        shared = dict(model.named_parameters())
        twin = Net()
        for (name, p), q in zip(shared.items(), twin.parameters()): q.data = p.data
        def after(number): extra.append(twin.stem.weight.detach().clone())""",
    "activations that are made once more": """
        from torch.utils.checkpoint import checkpoint
        block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(0.5), nn.ReLU(), nn.Conv2d(8, 8, 1))
        model.block = block
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model.between = lambda h: checkpoint(block, h, use_reentrant=False)""",
    "its own fused kernel, before the first forward": """
        optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
        for p in model.parameters(): p.grad = torch.ones_like(p)
        optimizer.step()""",
    "parts that are called by themselves": """
        def run(x):
            h = model.stem(x)
            assert h.is_contiguous()
            return model.head(model.up(model.body(h)).view(4, -1)).pow(2).mean()""",
    "code that is compiled": """
        def between(h):
            flat = F.conv2d(h, model.body.weight, groups=2, padding=1).view(4, -1)
            return F.dropout(flat, 0.0).view_as(h)
        model.between = between
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        def run(x): return (compiled(x) + model(x)).pow(2).mean()""",
    "functional transforms": """
        def run(x):
            weights = {name: p.detach() for name, p in model.named_parameters()}
            buffers = dict(model.named_buffers())
            call = lambda w, x: torch.func.functional_call(model.eval(), ({**w, **buffers},), (x[None],)).sum()
            extra.append(torch.func.vmap(torch.func.grad(call), (None, 0))(weights, x)["stem.weight"])
            return model.train()(x).pow(2).mean()""",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_the_script_sees_what_it_sees_without(train: Train, case: str) -> None:
    script = textwrap.dedent(LOOP).replace("SETUP", textwrap.dedent(HOSTILE[case]))
    plain, changed = train(script), train(script, channels_last=True, fused_optimizer=True)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert close(plain.left["losses"], changed.left["losses"], 1e-4)
    assert close(plain.left["model"], changed.left["model"], 1e-3)
    assert all(close(one, other, 1e-3) for one, other in zip(plain.left["extra"], changed.left["extra"], strict=True))
    assert identical(plain.left["random"], changed.left["random"])
    assert plain.left["strides"] == changed.left["strides"]
    assert _strides(plain.left) == _strides(changed.left)
    assert changed.installed["channels_last"] in ("model", "2 x model", "3 x model")


def _strides(left: dict[str, Any]) -> list[Any]:
    states = [tensor for state in left["state"]["state"].values() for tensor in state.values()]
    return [tensor.stride() for tensor in (*left["model"].values(), *states) if torch.is_tensor(tensor)]


def test_processes_go_on_training_the_weights_that_they_share(train: Train) -> None:
    """Hogwild, one process after the other: beside each other, which of them comes first would be chance."""
    script = """
        import multiprocessing
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1)).share_memory()
        images = torch.randn(4, 3, 8, 8)
        def work():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for _ in range(3):
                optimizer.zero_grad(); model(images).pow(2).mean().backward(); optimizer.step()
        codes = []
        for _ in range(2):
            process = multiprocessing.get_context("fork").Process(target=work)
            process.start(); process.join(); codes.append(process.exitcode)
        torch.save({"model": model.state_dict(), "codes": codes}, "left.pt")
    """
    plain, changed = train(script), train(script, channels_last=True, fused_optimizer=True)
    assert plain.code == changed.code == 0, changed.err
    assert plain.left.pop("codes") == changed.left.pop("codes") == [0, 0]
    assert close(plain.left["model"], changed.left["model"], 1e-4)


@pytest.mark.parametrize("own", ["model.to(memory_format=torch.channels_last)", "last = torch.channels_last"])
def test_a_script_that_lays_out_its_images_itself_is_left_alone(train: Train, own: str) -> None:
    script = textwrap.dedent(LOOP).replace("SETUP", own).replace("run(torch.randn(4, 3, 8, 8))", "run(x)")
    script = script.replace(
        "    loss = run", "    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)\n    loss = run"
    )
    plain, changed = train(script), train(script, channels_last=True)
    assert identical(plain.left, changed.left)
    assert "itself" in changed.installed["channels_last"]
    assert "hasten: channels_last does not act from here on" in changed.err


def test_what_is_scripted_traced_and_pickled_is_as_without(train: Train) -> None:
    script = """
        import io
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.drop = nn.Conv2d(3, 4, 3), nn.Dropout(0.5)
            def forward(self, x):
                x = torch.nn.functional.conv2d(self.conv(x), self.conv.weight[:, :1], groups=4)
                return torch.flatten(self.drop(x), 1)
        model = Net()
        x = torch.randn(2, 3, 8, 8)
        model(x)
        scripted = torch.jit.script(model.eval())
        traced = torch.jit.trace(model, x)
        whole = io.BytesIO()
        torch.save(model, whole)
        graphs = str(scripted.inlined_graph).count("\\n"), str(traced.inlined_graph).count("contiguous")
        torch.save({"scripted": scripted(x), "graphs": graphs, "hasten": b"hasten" in whole.getvalue()}, "left.pt")
    """
    plain, changed = train(script), train(script, channels_last=True)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert close(plain.left.pop("scripted"), changed.left.pop("scripted"), 1e-4)
    assert plain.left == changed.left
    assert changed.left["hasten"] is False


@pytest.mark.parametrize(
    "first", [{}, {"channels_last": True, "fused_optimizer": True}], ids=["plain first", "plan first"]
)
def test_a_checkpoint_goes_on_under_the_other(train: Train, first: dict[str, Any]) -> None:
    second = {} if first else {"channels_last": True, "fused_optimizer": True}
    started = train(textwrap.dedent(LOOP).replace("SETUP", ""), **first)
    resume = """
        left = torch.load("../run1/left.pt", weights_only=False)
        model.load_state_dict(left["model"])
        optimizer.load_state_dict(left["state"])"""
    script = textwrap.dedent(LOOP).replace("SETUP", textwrap.dedent(resume))
    other, same = train(script, **second), train(script, **first)
    assert started.code == other.code == same.code == 0, other.err
    assert close(other.left["losses"], same.left["losses"], 1e-4)
    assert close(other.left["model"], same.left["model"], 1e-4)
    assert _strides(other.left) == _strides(same.left)
    assert str(other.left["state"]["param_groups"]) == str(same.left["state"]["param_groups"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True,)),
        ({"layers": {"ConvTranspose2d": 1}}, (True,)),
        ({"layers": {"Linear": 2}}, "no 2-D convolution"),
        ({"input_shapes": ((32, 3, 32),)}, "4-D"),
    ],
)
def test_worth_trying(changes: dict[str, Any], expected: Any) -> None:
    answer = ChannelsLast.settings(evidence_of(models=(dataclasses.replace(MODEL, **changes),)))
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected
