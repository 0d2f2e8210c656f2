"""Mixed precision: float32 outside, 16 bits inside, and loss scaling that nobody sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hasten.evidence import Evidence
from hasten.techniques import CATALOGUE, Choices, Refusal
from hasten.techniques.compute.precision import Precision
from tests.techniques.conftest import CPU, FLAGS, GPU, MODEL, OLD_CPU, Train, close, evidence_of, identical

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
    assert "slower" in precision.useless("16-mixed", CPU)
    assert "slower" in precision.useless("bf16-mixed", OLD_CPU)
