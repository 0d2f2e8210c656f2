"""`in_place`: an optimizer's first step is watched, and the optimizer is as it was before afterwards."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from hasten.parallel.in_place import FirstStep, Watch, explained


class Seeing(torch.optim.SGD):
    """Notes whether its steps are watched."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.watched = []

    @torch.no_grad()
    def step(self, closure=None):
        stack = [torch._C._get_dispatch_stack_at(at) for at in range(torch._C._len_torch_dispatch_stack())]
        self.watched.append(any(isinstance(one, Watch) for one in stack))
        return super().step(closure)


def _trained():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return weight, Seeing([weight])


def test_the_first_step_alone_is_watched():
    weight, optimizer = _trained()
    first = FirstStep(optimizer)
    for _ in range(3):
        optimizer.step()
    assert optimizer.watched == [True, False, False]
    torch.testing.assert_close(weight, torch.full((3,), 0.7), check_dtype=False)
    first.remove()
    assert "step" not in vars(optimizer)


def test_a_closure_is_the_trainings_own_and_is_compiled():
    weight, optimizer = _trained()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def loss():
        return (weight * 2).sum()

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    FirstStep(optimizer)
    optimizer.step(closure)
    assert optimizer.watched == [True]
    assert len(graphs) == 1
    torch.testing.assert_close(weight, torch.full((3,), 0.8), check_dtype=False)


def test_a_step_that_is_compiled_is_not_watched():
    _, optimizer = _trained()
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    FirstStep(optimizer)
    optimizer.step()
    assert optimizer.watched == [False]


def test_a_first_step_that_fails_is_watched_again():
    _, optimizer = _trained()
    FirstStep(optimizer)

    def broken():
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        optimizer.step(broken)
    optimizer.step()
    assert optimizer.watched == [True, True]


def test_a_scheduler_that_counts_steps_keeps_its_count_and_is_put_back():
    _, optimizer = _trained()
    StepLR(optimizer, 1)
    counted = optimizer.step
    first = FirstStep(optimizer)
    assert optimizer.step._wrapped_by_lr_sched  # it warns where somebody has taken that away
    optimizer.step()
    assert optimizer._opt_called
    first.remove()
    assert optimizer.step is counted


def test_what_has_wrapped_it_since_stays():
    _, optimizer = _trained()
    first = FirstStep(optimizer)
    inner = optimizer.step
    optimizer.step = lambda: inner()
    first.remove()
    optimizer.step()
    assert optimizer.watched == [True]


def _refused():
    raise RuntimeError("aten.pow_: in-place operations that require placement changes are not supported")


class Refused(torch.optim.SGD):
    def step(self, closure=None):
        _refused()


def test_only_what_an_optimizer_does_is_laid_at_its_door():
    with pytest.raises(RuntimeError) as stepped:
        Refused([torch.nn.Parameter(torch.zeros(2))]).step()
    assert "use AdamW" in str(explained(stepped.value))
    with pytest.raises(RuntimeError) as elsewhere:
        _refused()  # as a model's forward may meet it
    assert explained(elsewhere.value) is None


class Model(torch.nn.Module):
    def forward(self):
        _refused()


def test_a_closures_forward_is_not_the_optimizers():
    """As LBFGS and `optimizer_step` have it run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(RuntimeError) as within:
        optimizer.step(Model())
    assert explained(within.value) is None
