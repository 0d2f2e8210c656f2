"""Mixed precision: float32 outside, 16 bits inside, and loss scaling that nobody sees."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.run import Run
from hasten.techniques import CATALOGUE, Choices, Refusal, build
from hasten.techniques.compute.loss_scaling import LossScaler
from hasten.techniques.compute.precision import Precision
from tests.techniques.conftest import (
    CPU,
    FLAGS,
    GPU,
    MODEL,
    OLD_CPU,
    Train,
    close,
    evidence_of,
    identical,
)

TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        def forward(self, x):
            hidden = self.first(x)
            inside.append(str(hidden.dtype))
            return {"out": self.last(hidden.relu()), "hidden": [hidden], "count": 3}
    inside, dtypes, losses, norms = [], set(), [], []
    model = Net()
    optimizer = torch.optim.OPTIMIZER
    xs, ys = torch.randn(12, 8, 16), torch.randint(0, 4, (12, 8))
    for x, y in zip(xs, ys):
        output = model(x)
        dtypes |= {str(output["out"].dtype), str(output["hidden"][0].dtype)}
        loss = nn.functional.cross_entropy(output["out"], y)
        optimizer.zero_grad(); loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "norms": norms, "inside": set(inside), "dtypes": dtypes, "model": model.state_dict(),
                "kinds": {str(p.dtype) for p in model.parameters()}}, "left.pt")
"""
SGD = TRAINING.replace("OPTIMIZER", "SGD(model.parameters(), lr=0.1, momentum=0.9)")


@pytest.mark.parametrize(("setting", "inside"), [("bf16-mixed", "torch.bfloat16"), ("16-mixed", "torch.float16")])
def test_outputs_weights_and_gradients_are_float32_and_close(train: Train, setting: str, inside: str) -> None:
    plain, changed = train(SGD), train(SGD, precision=setting)
    assert changed.code == 0, changed.err
    assert (plain.left["inside"], changed.left["inside"]) == ({"torch.float32"}, {inside})
    assert changed.left["dtypes"] == changed.left["kinds"] == {"torch.float32"}
    assert not identical(plain.left["losses"], changed.left["losses"])
    assert close(plain.left["losses"], changed.left["losses"], 0.02)
    assert close(plain.left["norms"], changed.left["norms"], 0.05)  # clipping sees gradients of their true size
    assert close(plain.left["model"], changed.left["model"], 0.02)
    assert changed.installed == {"precision": "model"}


# The same training with a float64 model, which is not cast: what loss scaling does is then seen alone.
EXACT = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    for p in model.parameters(): p.data = p.data.double().round(decimals=3)
    model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen, losses = [], []
    xs = torch.randn(8, 5, 6, dtype=torch.float64)
    SETUP
    for number, x in enumerate(xs):
        loss = model(x).pow(2).mean()
        BODY
        losses.append(loss.item())
    torch.save({"losses": losses, "seen": seen, "model": model.state_dict()}, "left.pt")
"""
BODIES = {
    "plain": "optimizer.zero_grad(); loss.backward(); optimizer.step()",
    "accumulated": "(loss / 2).backward()\n        if number % 2: optimizer.step(); optimizer.zero_grad()",
    "logged": "optimizer.zero_grad(); loss.backward(); seen.append(model[0].weight.grad.clone()); optimizer.step()",
    "twice": "optimizer.zero_grad(); loss.backward(retain_graph=True); loss.backward(); optimizer.step()",
    "two roots": "optimizer.zero_grad(); torch.autograd.backward([loss, model(x).sum()]); optimizer.step()",
    "with a gradient": "optimizer.zero_grad(); model(x).backward(torch.ones(5, 1).double()); optimizer.step()",
    "some inputs": "optimizer.zero_grad(); loss.backward(inputs=[model[2].weight]); optimizer.step()",
    "autograd.grad": "g = torch.autograd.grad(loss, list(model.parameters())); seen.append(g[0])\n"
    "        for p, one in zip(model.parameters(), g): p.grad = one\n        optimizer.step()",
    "closure": "optimizer.step(lambda: (optimizer.zero_grad(), (l := model(x).pow(2).mean()).backward(), l)[2])",
    "None for a closure": "optimizer.zero_grad(); loss.backward(); optimizer.step(None)",
}
SETUPS = {
    "gradient hooks": "for p in model.parameters(): p.register_hook(lambda g: g.clamp(-0.01, 0.01))",
    "post-accumulate hooks": "def clamp(p): p.grad.clamp_(-0.01, 0.01)\n"
    "    for p in model.parameters(): p.register_post_accumulate_grad_hook(clamp)",
    "LBFGS": "optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)",
    "a schedule": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)",
}


@pytest.mark.parametrize("case", [*BODIES, *SETUPS])
def test_loss_scaling_is_exact_and_invisible(train: Train, case: str) -> None:
    body = BODIES.get(case, BODIES["plain"])
    if case == "LBFGS":
        body = BODIES["closure"]
    if case == "a schedule":
        body += "; schedule.step()"
    script = EXACT.replace("BODY", body).replace("SETUP", SETUPS.get(case, ""))
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left, changed.left)


DRAWING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 65), nn.Linear(65, 1)
        def forward(self, x):
            hidden = self.first(x)
            kinds.add(hidden.dtype)
            mean, wide = hidden.detach() * 0, torch.ones_like(hidden)
            drawn.extend(one.float() for one in [
                torch.randn_like(hidden), torch.rand_like(hidden), torch.empty_like(hidden).normal_(1.0, 2.0),
                torch.empty_like(hidden).uniform_(-1, 1), torch.empty_like(hidden).exponential_(),
                torch.empty_like(hidden).bernoulli_(0.3), torch.distributions.Normal(mean, wide).rsample(),
                torch.randn(65, dtype=hidden.dtype), torch.randn_like(hidden, dtype=torch.float32),
                torch.bernoulli(wide * 0.5), nn.functional.dropout(wide), nn.functional.gumbel_softmax(mean),
            ])
            states.append(torch.get_rng_state())
            return self.last(hidden)
    model, drawn, states, kinds = Net(), [], [], set()
    model(torch.randn(7, 8)).sum().backward()
    torch.save({"drawn": drawn, "states": states, "kinds": kinds}, "left.pt")
"""


def test_random_numbers_are_those_of_float32(train: Train) -> None:
    plain, changed = train(DRAWING), train(DRAWING, precision="bf16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert changed.left["kinds"] == {torch.bfloat16}
    assert identical(plain.left["states"], changed.left["states"])
    for one, other in zip(plain.left["drawn"], changed.left["drawn"], strict=True):
        assert close(one, other, 0.01)


@pytest.mark.parametrize("setting", ["bf16-mixed", "16-mixed"])
def test_a_script_under_autocast_is_left_as_it_is(train: Train, setting: str) -> None:
    script = SGD.replace("output = model(x)", "with torch.autocast('cpu', torch.bfloat16): output = model(x)").replace(
        "cross_entropy(output[\"out\"], y)", "cross_entropy(output[\"out\"].float(), y)"
    )  # fmt: skip
    plain, changed = train(script), train(script, precision=setting)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.left["dtypes"] == {"torch.bfloat16"}
    assert identical(plain.left, changed.left)
    assert "under autocast itself" in changed.installed["precision"]


SEES_INSIDE = {  # what is set up, what is done with the loss, and what is said
    "retain_grad": ("", "h.retain_grad(); loss.backward(); seen.append(h.grad)", "retain_grad sees"),
    "tensor": ("", "h.register_hook(lambda g: seen.append(g.clone())); loss.backward()", "a hook on a tensor"),
    "node": ("", "h.grad_fn.register_hook(lambda i, o: seen.append(o[0])); loss.backward()", "a backward hook"),
    "module": ("model[0].register_full_backward_hook(SEE)", "loss.backward()", "a backward hook"),
    "function": ("h_of = Clip.apply", "loss.backward()", "the backward of Clip sees"),
    "checkpoint": ("h_of = lambda h: checkpoint(torch.tanh, h, use_reentrant=True)", "loss.backward()", "Checkpoint"),
    "penalty": (
        "",
        "g, = torch.autograd.grad(loss, h, create_graph=True); (loss + g.norm()).backward()",
        "autograd.grad",
    ),
    "create_graph": ("", "loss.backward(create_graph=True); NORMS.backward()", "create_graph"),
    "inputs": ("", "loss.backward(inputs=[h, *model.parameters()]); seen.append(h.grad)", "inside the graph"),
    "scaler": (
        "s = torch.amp.GradScaler('cpu')",
        "s.scale(loss).backward(); s.unscale_(optimizer); s.update()",
        "itself",
    ),
    "in the backward": ("for p in model.parameters(): POST", "loss.backward()", "a hook on a parameter"),
    "LBFGS": ("optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)", "optimizer.step(closure)", "more than once"),
    "failure": ("", "loss.backward(); k = h.tanh(); k.register_hook(fail); again(k)", "a hook on a tensor"),
}
SHORT = {
    "SEE": "lambda m, i, o: seen.append(o[0])",
    "NORMS": "sum(p.grad.norm() for p in model.parameters())",
    "POST": "p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))",
}
INSIDE = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): return g.clamp(-0.01, 0.01)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))DOUBLE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, losses, h_of = [], [], lambda h: h
    def fail(g):
        raise ValueError
    def again(tensor):
        try: tensor.sum().backward()
        except ValueError: pass
    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss
    SETUP
    for x in torch.randn(6, 5, 6)DOUBLE:
        optimizer.zero_grad()
        h = h_of(model[0](x))
        loss = (model[2](h.tanh()) * 1e-2).pow(2).mean()
        BODY
        if "LBFGS" not in repr(optimizer): optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "seen": seen, "model": model.state_dict()}, "left.pt")
"""


def inside(case: str, double: bool) -> str:
    """A float64 model is not cast: scaling is seen alone, from the first step on."""
    setup, body, _ = SEES_INSIDE[case]
    script = INSIDE.replace("SETUP", setup).replace("BODY", body).replace("DOUBLE", ".double()" if double else "")
    return functools.reduce(lambda made, name: made.replace(name, SHORT[name]), SHORT, script)


@pytest.mark.parametrize("case", SEES_INSIDE)
def test_fp16_lets_go_where_scaled_gradients_would_be_seen(train: Train, case: str) -> None:
    plain, changed = train(inside(case, double=True)), train(inside(case, double=True), precision="16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left, changed.left)
    assert SEES_INSIDE[case][2] in changed.err
    assert changed.err.count("precision does not act from here on") == 1


def test_after_fp16_was_let_go_all_is_float32(train: Train) -> None:
    script = inside("module", double=False).replace("seen.append(o[0])", "seen.append(o[0].dtype)").replace(
        "losses.append(", "seen.append(model(x).dtype); losses.append("
    )  # fmt: skip
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert set(changed.left["seen"][1:]) == {torch.float32}  # the first backward was of an fp16 graph
    assert close(plain.left["losses"], changed.left["losses"], 0.01)


def test_a_loss_in_fp16_and_a_failed_backward() -> None:
    scaler, weight = LossScaler(), nn.Parameter(torch.ones(3))
    scaler.backward(torch.autograd.backward, weight.half().sum())  # 3 * 2^15 is no number in fp16
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0] * 3
    loss = weight.pow(2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        scaler.backward(torch.autograd.backward, loss)
    assert weight.grad.tolist() == [3.0] * 3


def test_accumulated_gradients_are_those_of_the_whole_batch(train: Train) -> None:
    script = SGD.replace(
        "optimizer.zero_grad(); loss.backward()", "(loss / 3).backward(); scaled = model.first.weight.grad"
    ).replace("optimizer.step()", "len(losses) % 3 == 2 and (optimizer.step(), optimizer.zero_grad())")
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["losses"], changed.left["losses"], 0.02)
    assert close(plain.left["norms"], changed.left["norms"], 0.05)


@pytest.mark.parametrize("listen", [True, False])
def test_a_step_that_overflowed_is_skipped_for_every_optimizer_once(train: Train, listen: bool) -> None:
    script = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        models = [nn.Linear(4, 1), nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
        x, moved = torch.ones(2, 4), []
        for number in range(6):
            before = [model.weight.detach().clone() for model in models]
            for which, (model, optimizer) in enumerate(zip(models, optimizers)):
                optimizer.zero_grad()
                size = 1e34 if (number, which) in OVERFLOWS else 1.0
                ((model(x) - which) * 0.001 * size).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            moved.append([not torch.equal(old, model.weight) for old, model in zip(before, models)])
            finite = all(p.isfinite().all() for model in models for p in model.parameters())
            assert finite
        late = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(late.parameters(), lr=0.125)
        before = late.weight.detach().clone()
        late(x).mean().backward(); optimizer.step()
        moved.append(not torch.equal(before, late.weight))
        torch.save({"moved": moved, "gradient": models[0].weight.grad}, "left.pt")
    """
    plain = train(script.replace("OVERFLOWS", "()"), listen, precision="16-mixed")
    changed = train(script.replace("OVERFLOWS", "{(2, 0), (4, 1)}"), listen, precision="16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.left["moved"] == [[True, True]] * 6 + [True]
    kept = [number for number, moved in enumerate(changed.left["moved"]) if moved == [False, False]]
    assert kept == [2, 4]
    assert changed.left["moved"][6] is True
    assert identical(plain.left["gradient"], changed.left["gradient"])  # whatever the scale is by then


OVERFLOWING = """
    import copy, math
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Big(nn.Module):
        def forward(self, x): return x * 3000.0
    hidden = [nn.Linear(16, 32), nn.ReLU()]
    model = nn.Sequential(*hidden, BIG, nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randn(8, 4) * 300
    losses, steps = [], 0
    optimizer = None
    SETUP
    for number in range(40):
        loss = (model(x) - y).pow(2).sum() / 100
        model.zero_grad()
        loss.backward()
        STEP
        losses.append(loss.item())
    torch.save({"losses": losses[-1], "steps": steps, "model": model.state_dict()}, "left.pt")
"""
ADAM = "optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)"
OVERFLOWS = {  # what is set up, how the script steps, what is said, steps that may be lost
    "steps by hand": ("pass", "steps += 1\n        for p in model.parameters(): p.data.add_(p.grad, alpha=-1e-4)",
                      "no optimizer of torch's steps 4 of", 0),
    "a copy steps": (f"{ADAM}; model, optimizer = copy.deepcopy((model, optimizer))", "steps += 1; optimizer.step()",
                     "no optimizer of torch's steps 4 of", 0),
    "the script skips": (ADAM, ("norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)\n        "
                         "if not norm.isfinite(): continue\n        steps += 1; optimizer.step()"),
                         "the script dropped gradients that overflowed", 10),
    "no number is large enough": (f"{ADAM}; x *= 50", "steps += 1; optimizer.step()", "overflow in fp16 with no scale",
                                  0),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_overflow_never_reaches_a_weight_nor_stops_the_training(train: Train, case: str) -> None:
    setup, step, said, lost = OVERFLOWS[case]
    script = OVERFLOWING.replace("SETUP", setup).replace("STEP", step)
    script = script.replace("BIG", "Big()" if "x *= 50" in setup else "nn.Identity()")
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert changed.err.count(said) >= 1
    assert math.isfinite(changed.left["losses"])
    assert plain.left["steps"] - lost <= changed.left["steps"] <= plain.left["steps"]
    assert all(value.isfinite().all() for value in changed.left["model"].values())


def test_sparse_gradients_are_unscaled_too(train: Train) -> None:
    script = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        table, head = nn.Embedding(10, 4, sparse=True).double(), nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
        losses = []
        for number in range(5):
            loss = head(table(torch.tensor([1, 2, 2, number]))).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
        torch.save({"losses": losses, "table": table.state_dict()}, "left.pt")
    """
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)


# -- as the Trainer drives it: whole steps, optimizers and schedules that were built before --------------------


class Stepping(nn.Module):
    """A module with a step that takes a whole batch and gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: dict[str, Any], number: int) -> Any:
        x, weights = batch["x"], batch["more"][0]
        output = self.net(x)
        self.seen = {"x": x.dtype, "weights": weights.dtype, "output": output.dtype, "new": torch.ones(1).dtype}
        return {
            "loss": (nn.functional.cross_entropy(output, batch["y"], reduction="none") * weights).mean(),
            "o": output,
        }


def batches(count: int = 8) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(4, 6, generator=drawn),
            "y": torch.randint(0, 3, (4,), generator=drawn),
            "more": (torch.rand(4, generator=drawn), "name"),
        }
        for _ in range(count)
    ]


class Driven:
    """A training as the Trainer drives it."""

    def __init__(self, double: bool = False, **plan: Any) -> None:
        torch.manual_seed(0)
        self.run = Run(build(plan, CATALOGUE))
        self.module = Stepping().double() if double else Stepping()
        self.run.process()
        for technique in self.run.techniques:
            technique.prepare(self.module)
        self.step = self.run.wrapped("forward", lambda module, args, kwargs: module.training_step(*args, **kwargs))
        self.backward = self.run.wrapped("backward", torch.autograd.backward)
        first, second = list(self.module.net[0].parameters()), list(self.module.net[1:].parameters())
        self.optimizers = [torch.optim.AdamW(first, 0.01), torch.optim.SGD(second, 0.1, momentum=0.9)]
        self.schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            self.run.optimizer(optimizer)
        self.run.model(self.module, ())
        self.losses: list[float] = []

    def fit(self, batches: list[dict[str, Any]], closures: bool = False) -> Driven:
        """Two batches a step, gradients clipped, both optimizers and schedules stepped."""
        for number, batch in enumerate(batches):

            def gradients(batch: dict[str, Any] = batch, number: int = number) -> Any:
                loss = self.step(self.module, (batch, number), {})["loss"]
                self.backward(loss / 2)
                self.losses.append(loss.item())
                if number % 2:
                    nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)
                return loss

            if not closures or not number % 2:
                gradients()
            if number % 2:
                for which, optimizer in enumerate(self.optimizers):
                    optimizer.step(*([gradients] if closures and which == 0 else []))
                for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                    optimizer.zero_grad()
                    schedule.step()
        return self

    def left(self) -> dict[str, Any]:
        """What is to be compared."""
        return {
            "losses": self.losses,
            "model": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }


def test_a_whole_step_under_autocast_is_a_plain_loop_under_autocast_bit_by_bit() -> None:
    driven, plain = Driven(precision="bf16-mixed").fit(batches()), Driven()
    for number, batch in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain.module.training_step(batch, number)["loss"]
        (loss / 2).backward()
        plain.losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(plain.module.parameters(), 0.1)
            for optimizer, schedule in zip(plain.optimizers, plain.schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    assert driven.module.seen["output"] is torch.bfloat16
    assert identical(driven.left(), plain.left())


@pytest.mark.parametrize("closures", [False, True])
def test_loss_scaling_survives_accumulation_clipping_schedules_and_closures(
    closures: bool, recwarn: pytest.WarningsRecorder
) -> None:
    # A float64 model is not cast, so that scaling is seen alone; it must leave no trace.
    inputs = [{**batch, "x": batch["x"].double(), "more": (batch["more"][0].double(),)} for batch in batches()]
    driven = Driven(double=True, precision="16-mixed").fit(inputs, closures)
    assert identical(driven.left(), Driven(double=True).fit(inputs, closures).left())
    scales = [technique.state_dict() for technique in driven.run.techniques]
    assert scales == [{"scale": 2.0**15, "clean_steps": 8}]
    assert not [warning for warning in recwarn if "lr_scheduler.step()" in str(warning.message)]


def test_fp16_on_the_cpu_and_going_on_from_its_checkpoint() -> None:
    given = batches(12)
    given[3] = {**given[3], "more": (given[3]["more"][0] * 1e38,)}  # overflows: the scale is halved
    whole = Driven(precision="16-mixed").fit(given)
    begun = Driven(precision="16-mixed").fit(given[:6])
    (state,) = [technique.state_dict() for technique in begun.run.techniques]
    assert state["scale"] == 2.0**14
    assert state["clean_steps"] > 0
    resumed = Driven(precision="16-mixed")
    resumed.run.techniques[0].load_state_dict(state)
    resumed.module.load_state_dict(begun.module.state_dict())
    for kind in ("optimizers", "schedules"):
        for new, old in zip(getattr(resumed, kind), getattr(begun, kind), strict=True):
            new.load_state_dict(copy.deepcopy(old.state_dict()))
    resumed.fit(given[6:])
    resumed.losses[:0] = begun.losses
    assert identical(resumed.left(), whole.left())
    assert resumed.run.techniques[0].state_dict() == whole.run.techniques[0].state_dict()
    assert Driven(precision="bf16-mixed").run.techniques[0].state_dict() == {}


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


def on_gpu(**changes: Any) -> Evidence:
    model = dataclasses.replace(MODEL, device="cuda")
    return evidence_of(machine=GPU, models=(model,), flags=dataclasses.replace(FLAGS, **changes))


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (evidence_of(), ("bf16-mixed",)),
        (evidence_of(machine=OLD_CPU), "no instructions"),
        (on_gpu(bf16=True), ("bf16-mixed",)),
        (on_gpu(bf16=False), ("16-mixed",)),
        (on_gpu(grad_scaler=True), "scales its gradients itself"),
        (evidence_of(models=(dataclasses.replace(MODEL, autocast="bfloat16"),)), "under autocast (bfloat16)"),
        (evidence_of(models=(dataclasses.replace(MODEL, dtype="float64"),)), "in float64"),
        (evidence_of(models=(dataclasses.replace(MODEL, layers={"Embedding": 2}),)), "no layer"),
        (evidence_of(models=(dataclasses.replace(MODEL, train_calls=0),)), "no module's forward"),
        (evidence_of(models=()), "no module's forward"),
    ],
)
def test_worth_trying(evidence: Evidence, expected: Any) -> None:
    answer = Precision.settings(evidence)
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


def test_useless_without_the_instructions() -> None:
    precision = CATALOGUE["precision"]
    assert precision.useless("bf16-mixed", CPU) == ""
    assert precision.useless("16-mixed", GPU) == ""
    assert precision.useless("bf16-true", CPU) == ""
    assert "slower" in precision.useless("64-true", GPU)
    assert "slower" in precision.useless("16-true", CPU)
    assert "slower" in precision.useless("16-mixed", CPU)
    assert "slower" in precision.useless("bf16-mixed", OLD_CPU)
