"""Optimizers do without torch._dynamo until something is compiled, and compute the same to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.taps.scripts import HASTEN, PYTHON, execute, write

TRAIN = """
import sys
import torch
from torch.optim.optimizer import _use_grad_for_differentiable
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(model[2].parameters())]
schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]

class Halving(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"differentiable": False})
    @_use_grad_for_differentiable
    def step(self, closure=None):
        assert not torch.is_grad_enabled()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)

offset = torch.nn.Parameter(torch.ones(1))
optimizers.append(Halving([offset]))

def train(steps, model=model):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(torch.randn(8, 6)) + offset).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        assert torch.is_grad_enabled()

def tell(what):
    state = [optimizer.state_dict() for optimizer in optimizers]
    print(what, [p.double().sum().item() for p in [*model.parameters(), offset]], state)

train(5)
tell("plain")
optimizers[1].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
optimizers[0].load_state_dict(optimizers[0].state_dict())
try:
    torch.optim.SGD(model.parameters(), lr=-1)
except ValueError as error:
    print(error)
print("there", "torch._dynamo" in sys.modules, file=sys.stderr)
"""
COMPILES = """
import inspect
train(3, torch.compile(model, backend="eager"))
tell("compiled")
step = torch.compile(lambda: [optimizer.step() for optimizer in optimizers], backend="eager")
for _ in range(3):
    model(torch.randn(8, 6)).square().mean().backward()
    step()
tell("compiled steps")
optimizers[0].zero_grad()
zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
print("torch's own", getattr(zero_grad, "__dynamo_disable") is not zero_grad)
"""


@pytest.mark.parametrize("more", [
    pytest.param("", id="nothing is compiled"),
    # slow: compiles a model and three optimizers, twice
    pytest.param(COMPILES, id="then it compiles", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_training_is_the_same_to_the_bit_and_imports_it_only_to_compile(tmp_path: Path, more: str) -> None:
    write(tmp_path, "train.py", TRAIN + more)
    write(tmp_path, "hasten.toml", "[hasten]\nversion = 1\n\n[techniques]\nset_to_none = true\n")
    plain = execute(PYTHON, "train.py", cwd=tmp_path)
    under = execute(HASTEN, "run", "--quiet", "train.py", cwd=tmp_path)
    assert (plain.code, under.code) == (0, 0), plain.err + under.err
    assert under.out == plain.out
    assert "there True" in plain.err, "torch spares its import itself: this is needless"
    assert "there False" in under.err
    assert ("torch's own True" in under.out) == bool(more)


RELIES = """
import torch
parameter = torch.nn.Parameter(torch.ones(2))
def there():
    print([hasattr(torch.distributed, name) for name in ("fsdp", "nn", "tensor", "no_such_name")])
there()
torch.optim.SGD([parameter], lr=0.1)
torch.testing.assert_close(parameter, parameter)  # imports torch.distributed.tensor by itself, as torch.jit.trace does
print(torch.distributed.nn.__name__, torch.distributed.fsdp.FullyShardedDataParallel.__name__)
print(torch.fx.experimental.symbolic_shapes.__name__)
there()
try:
    torch.distributed.no_such_name
except AttributeError as error:
    print(error)
"""


def test_modules_that_torch_dynamo_would_have_brought_by_then_are_there(tmp_path: Path) -> None:
    """A script may name what nobody imported: it works in plain Python from the first optimizer on, not before."""
    write(tmp_path, "train.py", RELIES)
    write(tmp_path, "hasten.toml", "[hasten]\nversion = 1\n\n[techniques]\nset_to_none = true\n")
    plain = execute(PYTHON, "train.py", cwd=tmp_path)
    under = execute(HASTEN, "run", "--quiet", "train.py", cwd=tmp_path)
    assert plain.code == 0, plain.err
    assert (under.code, under.out) == (0, plain.out), under.err
    assert plain.out.startswith("[False, False, False, False]")


@pytest.mark.parametrize("name", ["no such name", "another body"])
def test_where_torch_does_otherwise_it_is_left_alone(tmp_path: Path, name: str) -> None:
    """Another version of torch, played by a module in the place of its optimizers' own."""
    folder = tmp_path / "torch" / "optim"
    folder.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("import torch.optim\n")
    (folder / "__init__.py").write_text("import torch.optim.optimizer\n")
    body = "def _use_grad_for_differentiable(step):\n    def through(*args):\n        return other(step(*args))\n"
    body += "    return through\nplain = _use_grad_for_differentiable\nclass Optimizer: pass\n"
    (folder / "optimizer.py").write_text("" if name == "no such name" else body)
    write(
        tmp_path,
        "asks.py",
        "from hasten.taps.late_dynamo import optimizers_without_dynamo\noptimizers_without_dynamo()\nimport torch\n"
        "module = torch.optim.optimizer\n"
        "print(getattr(module, '_use_grad_for_differentiable', None) is getattr(module, 'plain', None))\n",
    )
    done = execute(sys.executable, "asks.py", cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, "True"), done.err
    assert ("its taps could not be set" in done.err) is False
