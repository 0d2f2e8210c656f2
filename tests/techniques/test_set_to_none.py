"""Large gradients are dropped behind the script's back only where it cannot tell."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from hasten.techniques import Choices, Refusal
from hasten.techniques.memory import zero_pages
from hasten.techniques.memory.set_to_none import SetToNone
from tests.techniques.conftest import FLAGS, Train, evidence_of, identical

# Gradients of 2^20 elements, the least that is dropped. `late` has one in every other step.
TRAINING = """
    import hashlib
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle = nn.Linear(4, 1024), nn.Linear(1024, 1024)
            self.late, self.last = nn.Linear(1024, 1024), nn.Linear(1024, 1)
            self.table = nn.Embedding(1024, 1024, sparse=SPARSE)
        def forward(self, x, ids):
            hidden = self.middle(self.first(x).tanh()).tanh()
            if number % 2: hidden = self.late(hidden).tanh()
            return self.last(hidden) + self.table(ids).sum(1, keepdim=True)
    model = Net()
    optimizer = torch.optim.OPTIMIZER
    losses, seen, flat, number = [], [], None, 0
    SETUP
    for number in range(5):
        loss = model(torch.randn(8, 4), torch.randint(0, 1024, (8,))).pow(2).mean()
        optimizer.zero_grad(set_to_none=False)
        BETWEEN
        loss.backward()
        AFTER
        optimizer.step()
        losses.append(loss.item())
    def digest(tensors):  # every -0.0 made 0.0, which is all that the technique may change
        whole = [t.detach().to_dense() + 0 for t in tensors if isinstance(t, torch.Tensor)]
        return [hashlib.sha1(t.numpy().tobytes()).hexdigest() for t in whole]
    torch.save({"losses": losses, "seen": seen, "model": digest(model.parameters()),
                "gradients": digest(p.grad for p in model.parameters()),
                "state": digest(t for one in optimizer.state.values() for t in one.values()),
                "none": [p.grad is None for p in model.parameters()]}, "left.pt")
"""
ADAM = "Adam(model.parameters(), weight_decay=0.1)"
SGD = "SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)"


def script(optimizer: str = ADAM, **parts: str) -> str:
    made = TRAINING.replace("OPTIMIZER", optimizer)
    for name in ("SPARSE", "SETUP", "BETWEEN", "AFTER"):
        made = made.replace(name, parts.get(name.lower(), "False" if name == "SPARSE" else "pass"))
    return made


FLAT = """if number == 0:
            sizes = [p.numel() for p in model.parameters()]
            flat = torch.zeros(sum(sizes))
            for p, part in zip(model.parameters(), flat.split(sizes)):
                part.copy_(p.grad.view(-1) if p.grad is not None else part); p.grad = part.view_as(p)"""
AGAIN = "model(torch.randn(8, 4), torch.tensor([1] * 8)).sum().backward"
ACTS: dict[str, dict[str, str]] = {
    "Adam, clipping": {"after": "seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())"},
    "momentum, the module's zero_grad": {"optimizer": SGD, "setup": "optimizer.zero_grad = model.zero_grad"},
    "accumulation, a sparse gradient": {"sparse": "True", "optimizer": "SGD(model.parameters(), lr=0.1)",
                                       "after": f"{AGAIN}()"},
    "read in between": {"between": "seen.append([p.grad is None or p.grad.abs().sum().item() for p in "
                        "optimizer.param_groups[0]['params']])"},
    "written by NumPy": {"between": "if number: model.middle.weight.grad.numpy()[0] += 0.5"},
    "some inputs": {"after": f"optimizer.zero_grad(False); w = model.middle.weight; {AGAIN}(inputs=[w])"},
    "held": {"setup": "held = []", "after": "w = model.middle.weight; held = held or [w.grad, model.table.weight.grad."
             "detach()]; seen.append([g.norm().item() for g in held])"},
    "a graph of gradients": {"after": "sum(p.pow(2).sum() for p in model.parameters()).backward(create_graph=True)"},
}  # fmt: skip
LEFT_ALONE: dict[str, dict[str, str]] = {
    "views of a flat buffer": {"after": FLAT + "\n        flat.clamp_(-1e-3, 1e-3); seen.append(flat.norm().item())"},
    "noise before the backward": {"between": "for p in model.parameters():\n            "
                                  "if p.grad is not None: p.grad.add_(0.01)"},
    "written through .data": {"between": "for p in model.parameters():\n            "
                              "if p.grad is not None: p.grad.data.add_(p.data, alpha=0.1)"},
    "set before the backward": {"between": "for p in model.parameters(): p.grad = torch.full_like(p, 0.01)"},
    "a hook that reads": {"setup": "model.middle.weight.register_hook(lambda g: seen.append(model.late.weight.grad is "
                          "None))"},
    "a module's hook": {"setup": "model.last.register_full_backward_hook(lambda *_: seen.append(model.middle.weight."
                        "grad is None))"},
    "a function of its own": {"setup": """
    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): seen.append(model.middle.weight.grad is None); return g
    model.last.register_forward_hook(lambda module, args, output: Look.apply(output))
    """},
    "a graph of gradients": {"after": "sum(p.pow(2).sum() for p in model.parameters()).backward(create_graph=True)"},
}  # fmt: skip


@pytest.mark.parametrize("case", [*ACTS, *LEFT_ALONE])
def test_a_training_stays_the_same(train: Train, case: str) -> None:
    made = script(**{**ACTS, **LEFT_ALONE}[case])
    plain, changed = train(made), train(made, set_to_none=True)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert identical(plain.left, changed.left)
    assert ("optimizer" in changed.installed.get("set_to_none", "")) == (case in ACTS), changed.installed


def test_gradients_are_handed_over_and_not_added(train: Train) -> None:
    made = script(setup="import weakref", between="old = [weakref.ref(model.middle.weight.grad)] if number else []",
                  after="seen.append([one() is None for one in old])")  # fmt: skip
    plain, changed = train(made), train(made, set_to_none=True)
    assert plain.left["seen"] == [[], *[[False]] * 4]
    assert changed.left["seen"] == [[], *[[True]] * 4]


def test_zeros_take_no_memory_until_they_are_touched(train: Train) -> None:
    made = script(
        setup="from hasten.techniques.memory.zero_pages import is_untouched",
        between="g = model.middle.weight.grad; seen.append(g is not None and [is_untouched(g.data_ptr(), g.nbytes), "
        "g.any().item(), is_untouched(g.data_ptr(), g.nbytes)]); del g",
    )
    changed = train(made, set_to_none=True)
    assert changed.left["seen"] == [False, *[[True, False, False]] * 4], changed.err


@pytest.mark.parametrize("size", [1, 4096, 4097, 1 << 20])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_every_write_to_such_zeros_is_seen(size: int, place: float) -> None:
    like = torch.zeros(size, dtype=torch.int8)
    zeros = zero_pages.zeros_like(like)
    assert zeros.dtype is torch.int8
    assert zeros.shape == (size,)
    assert zero_pages.is_untouched(zeros.data_ptr(), size)
    zeros.numpy()[round(place * (size - 1))] = 1  # no new version
    assert not zero_pages.is_untouched(zeros.data_ptr(), size)


def test_a_fork_sees_its_own_pages() -> None:
    zeros = zero_pages.zeros_like(torch.zeros(1 << 20))
    if not (child := os.fork()):
        zeros[5] = 1.0
        os._exit(not zero_pages.is_untouched(zeros.data_ptr(), zeros.nbytes))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert zero_pages.is_untouched(zeros.data_ptr(), zeros.nbytes)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dataclasses.replace(FLAGS, zeroed_gradients="train.py:9"), "train.py:9"),
        (FLAGS, "already"),
        (dataclasses.replace(FLAGS, zeroed_gradients="train.py:9", missing_gradients=True), "zeros and None differ"),
    ],
    ids=["zeros", "none", "missing"],
)
def test_worth_trying(flags: object, expected: str) -> None:
    answer = SetToNone.settings(evidence_of(flags=flags))  # type: ignore[arg-type]
    if expected == "train.py:9":
        assert isinstance(answer, Choices)
        assert expected in answer.why
    else:
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
