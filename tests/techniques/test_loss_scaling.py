"""Loss scaling for fp16: exact, seen by nobody, and let go where a script would see it."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn

from hasten.techniques.compute.loss_scaling import LossScaler
from tests.techniques.conftest import Train, close, identical
from tests.techniques.whole_steps import Driven, batches

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
    "the script looks": (ADAM, ("norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)\n        "
                         "if not norm.isfinite(): continue\n        steps += 1; optimizer.step()"),
                         "this step is skipped", 0),
    "the script skips": (f"{ADAM}; x *= 50", "if not loss.isfinite(): continue\n        steps += 1; optimizer.step()",
                         "the script dropped gradients that overflowed", 17),
    "before the backward": (f"{ADAM}; x *= 50", "steps += 1; optimizer.step()",
                            "overflow in fp16 in the forward, and no backward follows", 8),
    "no number is large enough": (f"{ADAM}; x *= 50", "steps += 1; optimizer.step()", "overflow in fp16 with no scale",
                                  0),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_overflow_never_reaches_a_weight_nor_stops_the_training(train: Train, case: str) -> None:
    setup, step, said, lost = OVERFLOWS[case]
    script = OVERFLOWING.replace("SETUP", setup).replace("STEP", step)
    script = script.replace("BIG", "Big()" if "x *= 50" in setup else "nn.Identity()")
    if case == "before the backward":
        script = script.replace("model.zero_grad()", "if not loss.isfinite(): continue\n        model.zero_grad()")
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert changed.err.count(said) >= 1
    assert math.isfinite(changed.left["losses"])
    assert plain.left["steps"] - lost <= changed.left["steps"] <= plain.left["steps"]
    assert all(value.isfinite().all() for value in changed.left["model"].values())


AVERAGED = (
    "grads = [p.grad.clone() for p in model.parameters()]\n        "
    "kept = grads if kept is None else [0.9 * old + 0.1 * new for old, new in zip(kept, grads)]\n        "
    "for p, one in zip(model.parameters(), kept): p.grad += one\n        optimizer.step()"
)
FLAT = (
    "flat, at = torch.zeros(sum(p.numel() for p in model.parameters())), 0\n    for p in model.parameters():\n        "
    "p.grad = flat[at:at + p.numel()].view_as(p); at += p.numel()"
)
OWN_SUMS = (
    "torch._foreach_add_(kept, [p.grad for p in model.parameters()])\n        if number % 4 == 3:\n            "
    "for p, one in zip(model.parameters(), kept): p.grad = one / 4\n            "
    "optimizer.step(); kept = [torch.zeros_like(p) for p in model.parameters()]"
)
KEEPERS = {  # what is set up, what is done behind the backward, and what is said
    "an average of gradients": (f"{ADAM}; kept = None", AVERAGED, "the script itself reads gradients"),
    "an average of norms": (
        f"{ADAM}; kept = [torch.zeros(())]",
        "kept = [0.9 * kept[0] + 0.1 * nn.utils.clip_grad_norm_(model.parameters(), 1e4)]; optimizer.step()",
        "this step is skipped",
    ),
    "an average of a flat tensor": (
        f"{ADAM}; kept = [torch.zeros(())]\n    {FLAT}",
        "kept = [0.9 * kept[0] + 0.1 * flat]; optimizer.step()",
        "this step is skipped",
    ),
    "sums of its own": (
        f"{ADAM}; kept = [torch.zeros_like(p) for p in model.parameters()]",
        OWN_SUMS,
        "the script itself reads gradients",
    ),
}


@pytest.mark.parametrize("case", KEEPERS)
def test_what_a_script_keeps_of_gradients_takes_in_no_overflow(train: Train, case: str) -> None:
    setup, body, said = KEEPERS[case]
    script = OVERFLOWING.replace("SETUP", setup).replace("STEP", body).replace("BIG", "nn.Identity()")
    script = script.replace('"steps": steps', '"kept": kept').replace(
        "model.zero_grad()", "optimizer.zero_grad(not FLAT)"
    )
    script = script.replace("not FLAT", str("flat tensor" not in case))
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert "this step is skipped" in changed.err
    assert said in changed.err
    assert all(one.isfinite().all() for one in (*changed.left["kept"], *changed.left["model"].values()))
    assert close(plain.left["losses"] / 1e4, changed.left["losses"] / 1e4, 0.01)


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
