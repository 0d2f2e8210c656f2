"""A block that is run again in the backward is run as it was, or says that it cannot be."""

from __future__ import annotations

import pytest

from tests.techniques.conftest import Train, close, identical

TRAINING = """
    import random, types
    import numpy as np
    import torch
    from torch import nn
    F = nn.functional
    random.seed(1); np.random.seed(1); torch.manual_seed(1)
    own, numbers, lucky = torch.Generator().manual_seed(3), np.random.default_rng(3), random.Random(3)
    noted, count = [], 0
    config = types.SimpleNamespace(scale=1.0, seen=[])

    other, table, log = torch.Generator().manual_seed(5), np.zeros(2), {}
    def note(x):
        global count
        count += 1; log.setdefault("mean", []).append(x.mean().item()); table[0] += 1
        return torch.rand(x.shape, generator=other)
    class Meter:
        __slots__ = ("n",)
    meter = Meter(); meter.n = 0
    class Stats:
        total, seen, long = 0, [], [0] * 600
        @classmethod
        def add(cls, x): cls.total += 1; return x * cls.total
        def say(self, number): print(number)
    settings, stats = types.ModuleType("settings"), Stats()  # settings as another file of the script's
    settings.count = 0
    def scaled(x, noted=[0]): noted[0] += 1; scaled.calls += 1; return x * noted[0] * scaled.calls
    scaled.calls = 0

    class Block(nn.Module):
        total = 0
        def __init__(self, number):
            super().__init__()
            self.number, self.scale, self.calls, self.aux, self.own = number, 1.0, 0, [], own
            self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)
            self.register_buffer("mean", torch.zeros(8))
            self.config, self.state, self.before = config, {"n": {"m": 0}}, torch.zeros(8)
        def forward(self, x, cache=None):
            h = self.up(x + 0)
            BODY
            return x + self.drop(self.down(h.tanh()))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block(i) for i in range(3)), nn.Linear(8, 1)
        def forward(self, x, cache=None):
            for block in self.blocks:
                x = block(x, cache)
            return self.head(x)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    def forward(x):
        return model(x).pow(2).mean()
    for step in range(6):
        x = torch.randn(4, 8)
        STEP
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        model.train()
        losses.append(loss.item())
    left = {"losses": losses, "model": model.state_dict(), "noted": noted, "count": [count, Block.total],
            "random": [random.random(), np.random.rand(), torch.rand(1), numbers.random(), lucky.random()],
            "blocks": [[b.calls, len(b.aux), b.scale, b.state["n"]["m"]] for b in model.blocks],
            "seen": len(config.seen), "log": log, "table": table.tolist(), "meter": meter.n,
            "others": [Stats.total, Stats.seen, settings.count, scaled.calls, scaled.__defaults__, Stats.long[7]]}
    torch.save(left, "left.pt")
"""
LOSS = "loss = forward(x)"
# name: (what the block does, what the step does)
THE_SAME = {
    "python": ("h = h * random.random() if random.random() < 0.7 else h", LOSS),
    "numpy": ("h = h * float(np.random.rand())", LOSS),
    "numpy's spare gauss": ("h = h * float(np.random.randn())", LOSS),
    "python's late": ("h = h * random.random() if len(losses) > 4 else h", LOSS),
    "numpy's late": ("h = h * np.random.rand() if len(losses) > 4 else h", LOSS),
    "own generator": ("h = h * torch.rand(h.shape, generator=self.own)", LOSS),
    "global generators": ("h = h * float(numbers.random()) * lucky.random()", LOSS),
    "layer drop": ("if random.random() < 0.5: return x", LOSS),
    "draws before the backward": ("h = h.sin()", LOSS + " * (1 + random.random() + np.random.rand())"),
    "eval before the backward": ("h = F.dropout(h, 0.3, self.training)", LOSS + "; model.eval()"),
    "attribute switched": (
        "h = h * self.scale",
        "first = forward(x); [setattr(b, 'scale', 0.5) for b in model.blocks]; loss = first + forward(x)",
    ),
    "object switched": ("h = h * self.config.scale", LOSS + "; config.scale *= 0.9"),
    "global switched": ("h = h * (1 + 0.1 * count)", LOSS + "; count += 1"),
    "functional_call": (
        "h = h.sin()",
        """fast = {n: p * 0.5 for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, fast, (x,)).pow(2).mean() + forward(x)""",
    ),
    "weights swapped for others": (
        "h = h.sin()",
        """loss = forward(x); block = model.blocks[1]; old = block.up.weight
        block.up.weight = nn.Parameter(old.detach() * 2); loss.backward(); block.up.weight = old
        losses.append(old.grad.sum().item()); loss = forward(x)""",
    ),
    "counters and lists": (
        """global count; count += 1; Block.total += 1; self.calls += 1; self.aux.append(h.mean())
            noted.append(self.number); self.config.seen.append(1); self.state['n']['m'] += 1""",
        LOSS + " + sum(b.aux[-1] for b in model.blocks)",
    ),
    "notes of a function of its own": ("h = h * note(h); meter.n += 1", LOSS),
    "counts of another class": ("h = Stats.add(h); Stats.total += 1; Stats.seen.append(1)", LOSS),
    "counts of another file": ("settings.count += 1; h = h * settings.count", LOSS),
    "counts of a function": ("h = scaled(h)", LOSS),
    "a forward replaced in its class": (
        "h = h.sin()",
        """if step == 3: Block.forward = lambda self, x, cache=None: x + self.down(self.up(x).cos())
        loss = forward(x)""",
    ),
    "a mode that sees each operation": (
        "h = h.sin()",
        """class Twice(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {})) * (2 if function is torch.Tensor.sin else 1)
        with Twice(): loss = forward(x)""",
    ),
    "state from before": ("h = h + self.before.mean(); self.before = h.detach()", LOSS),
    "statistics": ("self.mean.mul_(0.9).add_(x.detach().mean(0)); h = h + self.mean.mean()", LOSS),
    "statistics late": ("self.mean.add_(1) if len(losses) > 3 else 0; h = h + self.mean.mean()", LOSS),
    "tensor attribute in place": ("self.before += 1; h = h + self.before.mean()", LOSS),
    "input in place": ("F.relu(x, inplace=True)", "loss = forward(x.clone())"),
    "a cache it was given": (
        "cache.append(h); h = h + sum(c.mean() for c in cache)",
        "loss = model(x, []).pow(2).mean()",
    ),
    "gradient inside": ("h = h + torch.autograd.grad(self.up(x).pow(2).sum(), self.up.weight)[0].mean()", LOSS),
    "torch.func inside": ("h = h + torch.func.grad(lambda w: (x @ w.T).pow(2).sum())(self.up.weight).mean()", LOSS),
    "hooks inside": (
        "h = h.sin()",
        """step or model.blocks[0].up.register_forward_hook(lambda *_: noted.append(1))
        loss = forward(x)""",
    ),
    "hooks for saved tensors": (
        "h = h.sin()",
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(decimals=1), lambda t: t): loss = forward(x)",
    ),
    "script's own checkpoint": (
        "h = torch.utils.checkpoint.checkpoint(lambda h: F.dropout(h.sin(), 0.2), h, use_reentrant=False)",
        LOSS,
    ),
    "inside a checkpoint": (
        "h = F.dropout(h, 0.3)",
        """run = lambda x: model(x)
        loss = torch.utils.checkpoint.checkpoint(run, x.requires_grad_(), use_reentrant=True).pow(2).mean()""",
    ),
    "double backward": (
        "h = h.sin()",
        "x.requires_grad_(); g, = torch.autograd.grad(forward(x), x, create_graph=True); loss = g.pow(2).sum()",
    ),
    "two forwards": ("h = F.dropout(h, 0.2)", "loss = forward(x) * forward(x + 1)"),
    "autocast": (
        "h = h.sin()",
        "with torch.autocast('cpu', torch.bfloat16): loss = forward(x).float()",
    ),
    "pooled images": ("h = h[:, :, None, None].sin().sin()[:, :, 0, 0]", LOSS),
    "data clamped": ("self.down.weight.data.clamp_(-0.1, 0.1)", LOSS),
}


def script_of(body: str, step: str) -> str:
    return TRAINING.replace("BODY", body).replace("STEP", step)


# What a block does that nobody can take back, and what is said of it.
KEPT = {
    "print": ("print(self.number)", "print"),
    "a function that prints": ("say(self.number)", "print"),
    "an object that prints": ("stats.say(self.number)", "print"),
    "an entry of a long list": ("Stats.long[7] += 1; h = h * Stats.long[7]", "list of 600 entries"),
    "a queue": ("q.put(1); h = h * q.qsize()", "SimpleQueue"),
    "a file": ("out.write(str(self.number))", "write"),
    "an iterator": ("h = h * next(numbered)", "is a count"),
    "a logger": ("logger.warning(self.number)", "logger"),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_would_happen_twice_keeps_its_activations(train: Train, case: str) -> None:
    body, said = KEPT[case]
    script = script_of(body, LOSS).replace(
        "    class Block(nn",
        """    import io, itertools, logging
    import queue
    q = queue.SimpleQueue()
    out, numbered, logger = io.StringIO(), itertools.count(), logging.getLogger("mine")
    def say(number): print(number)
    class Block(nn""", 1).replace('"log": log', '"log": out.getvalue()')  # fmt: skip
    plain, changed = train(script), train(script, activation_checkpointing=True)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left, changed.left)
    assert plain.out == changed.out
    assert changed.err.count("activations are kept: Block") == 1
    assert said in changed.err


@pytest.mark.parametrize("case", THE_SAME)
def test_the_same_to_the_bit(train: Train, case: str) -> None:
    script = script_of(*THE_SAME[case])
    plain, changed = train(script), train(script, activation_checkpointing=True)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left, changed.left)


COMPILED = ("numpy", "own generator", "statistics", "counters and lists")


@pytest.mark.parametrize("case", COMPILED)
def test_the_same_where_the_model_is_compiled_as_well(train: Train, case: str) -> None:
    script = script_of(*THE_SAME[case]).replace(
        "F = nn.functional",
        """F, plain = nn.functional, torch.compile
    torch.compile = lambda f, **_: plain(f, backend="aot_eager")""",
    )
    plain, changed = train(script), train(script, activation_checkpointing=True, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["model"], changed.left["model"], 1e-5)
    assert identical(plain.left["blocks"], changed.left["blocks"])
    assert identical(plain.left["random"], changed.left["random"])


LOUD = {
    "weights clamped": "loss = forward(x); [p.data.mul_(0.5) for p in model.parameters()]",
    "weights stepped": "loss = forward(x)\n        with torch.no_grad(): model.blocks[0].up.bias.add_(1)",
    "weights' memory replaced": "loss = forward(x); w = model.blocks[2].up.weight; w.data = w.data + 1",
    "hook set in between": "loss = forward(x); model.blocks[0].up.register_forward_hook(lambda *_: None)",
    "what nobody sees": "loss = forward(x); torch.nn.functional.gelu = torch.sin",
}


@pytest.mark.parametrize("case", LOUD)
def test_what_cannot_be_put_back_is_an_error(train: Train, case: str) -> None:
    changed = train(script_of("h = F.gelu(h)", LOUD[case]), activation_checkpointing=True)
    assert changed.code == 1
    assert "the activations of Block cannot be computed again" in changed.err
    assert "Take activation_checkpointing out of the plan, or name other blocks" in changed.err


def test_modules_inside_are_no_models_when_they_run_again(train: Train) -> None:
    """(Else mixed precision would widen what they hand on, and compile would compile them one by one.)"""
    script = script_of("h = F.gelu(h)", LOSS)
    alone = train(script, precision="bf16-mixed")
    both = train(script, precision="bf16-mixed", activation_checkpointing=True)
    assert alone.code == both.code == 0, both.err
    assert identical(alone.left, both.left)
    assert both.evidence is not None
    assert [model.name for model in both.evidence.models] == ["Net"]
