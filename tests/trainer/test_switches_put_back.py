"""What a Trainer sets for the whole process holds for its own stages alone."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import Any

import pytest
import torch

from benchmarks.exact.rows import SETTINGS
from hasten.plan import Plan
from hasten.techniques.transfer.device_prefetch import DevicePrefetch
from hasten.techniques.transfer.pin_memory import PinMemory
from tests.taps.scripts import OURS
from tests.trainer.trainings import Regression, loader, quiet


def switches() -> tuple[Any, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.get_num_threads(),
    )


class Looking(Regression):
    """Notes the switches in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(switches())
        return super().training_step(batch, batch_idx)


def test_a_training_leaves_the_process_as_it_was() -> None:
    before = switches()
    threads = before[3] + 1
    plan = {"matmul_precision": "medium", "cudnn_benchmark": True, "attention": "math", "cpu_threads": threads}
    trainer, module = quiet(plan=Plan(plan), max_epochs=1, limit_train_batches=1, limit_val_batches=0), Looking()
    for epochs in (1, 2):
        trainer.max_epochs = epochs
        trainer.fit(module, loader())
        assert module.seen == [("medium", True, False, threads)] * epochs
        assert switches() == before
    other = Looking()
    quiet(limit_train_batches=1, limit_val_batches=0).fit(other, loader())
    assert other.seen == [before]


def test_they_hold_while_it_runs_and_what_others_set_stays() -> None:
    before = switches()

    class Setting(Looking):
        def on_train_end(self) -> None:
            torch.set_float32_matmul_precision("high")

    try:
        plan = {"matmul_precision": "medium", "attention": "math"}
        module = Setting()
        quiet(plan=Plan(plan), limit_train_batches=1, limit_val_batches=0).fit(module, loader())
        assert module.seen == [("medium", before[1], False, before[3])]
        assert switches() == ("high", *before[1:])
    finally:
        torch.set_float32_matmul_precision(before[0])


def test_torchs_own_update_is_put_back() -> None:
    module = sys.modules[torch.optim.SGD.__module__]
    plain, trainer = module.sgd, quiet(fused_optimizer=True, max_epochs=1, limit_val_batches=0)

    class Within(Looking):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert module.sgd is not plain
            if batch_idx == 0:  # a training within this one does not end the fused updates of this one
                flags = {"fused_optimizer": True, "limit_train_batches": 1, "limit_val_batches": 0}
                quiet(**flags).fit(Looking(), loader())

    for epochs in (1, 2):
        trainer.max_epochs = epochs
        trainer.fit(Within(), loader())
        assert module.sgd is plain
        assert "_init_group" not in vars(trainer.optimizers[0])


class Convolving(Looking):
    """Looks for torch's own functions in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 2, 1)
        self.found: tuple[Any, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images = batch[0].reshape(len(batch[0]), 1, 1, -1)
        loss = super().training_step(batch, batch_idx) + self.convolution(images).flatten(1).mean()
        self.found = functions()  # some are replaced once a convolution has laid something out
        return loss


def functions() -> tuple[Any, ...]:
    tensor = torch.Tensor
    return torch.flatten, torch.nn.functional.conv2d, tensor.view, tensor.__getitem__, tensor.normal_, torch.rand_like


def test_torchs_own_functions_are_put_back_after_channels_last() -> None:
    plain, module = functions(), Convolving()
    inherited = "view" in vars(torch.Tensor)
    trainer = quiet(channels_last=True, limit_train_batches=2, limit_val_batches=0)
    for epochs in (1, 2):
        trainer.max_epochs, module.found = epochs, ()
        trainer.fit(module, loader())
        assert functions() == plain
        assert ("view" in vars(torch.Tensor)) is inherited
        assert all(ours is not torchs for ours, torchs in zip(module.found, plain, strict=True))


class Busy(Regression):
    """Gives each technique something to act on."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 1), torch.nn.Flatten(), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images = batch[0].reshape(len(batch[0]), 1, 1, -1)
        return super().training_step(batch, batch_idx) + self.rest(images).mean()


KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
KINDS += (types.MethodType, staticmethod, classmethod, property, functools.partial)


def callables() -> dict[tuple[str, str], Any]:
    """What can be called in torch's modules and classes, and in those that techniques may have to do with."""
    owners: dict[int, tuple[Any, str]] = {}  # each once, however many modules import it
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "numpy", "random", "os", "io", "builtins", "pickle"):
            owners[id(module)] = module, name
            classes = [value for value in vars(module).values() if inspect.isclass(value)]
            owners.update((id(owner), (owner, f"{owner.__module__}.{owner.__qualname__}")) for owner in classes)
    return {
        (label, key): value
        for owner, label in owners.values()
        for key, value in vars(owner).items()
        if type(value) in KINDS
    }


def is_hastens(value: Any) -> bool:
    """Whether a function is hasten's, even where it bears the name of torch's."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is not None and code.co_filename.startswith(OURS)


PLANS: dict[str, Any] = {**SETTINGS, "allocator": "glibc", "cudnn_benchmark": True}


# slow: compiles C++
SLOW = {"compile": pytest.mark.slow}
EACH = [pytest.param(name, setting, marks=SLOW.get(name, ())) for name, setting in PLANS.items()]


@pytest.mark.parametrize(("technique", "setting"), [*EACH, ("precision", "16-mixed")])
def test_no_technique_leaves_a_function_replaced(technique: str, setting: Any) -> None:
    trainer = quiet(plan=Plan({technique: setting}), limit_train_batches=2, limit_val_batches=1)
    before, read = callables(), vars(torch.Tensor).get("grad")
    for epochs in (1, 2):  # also in a second training by the same Trainer
        trainer.max_epochs = epochs
        trainer.fit(Busy(), loader(), loader())
        after = callables()
        # torch replaces some itself: an optimizer's `step` as the first one is built, `manual_seed` by dynamo.
        left = [place for place, now in after.items() if is_hastens(now) and before.get(place) is not now]
        assert not left, left
        assert vars(torch.Tensor).get("grad") is read  # a property, no function
        before = after


@pytest.mark.parametrize("technique", [PinMemory, DevicePrefetch])
def test_torchs_ways_to_copy_are_put_back_with_a_gpu(technique: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # there is none here; nothing is copied
    monkeypatch.setattr(torch.cuda, "Stream", object)
    plain = torch.Tensor.to, torch.Tensor.cuda
    acting = technique(True)
    for _ in range(2):
        acting.process()
        assert torch.Tensor.to is not plain[0]
        assert torch.Tensor.cuda is not plain[1]
        assert torch.zeros(2).to(torch.float64).dtype is torch.float64
        acting.restore()
        assert (torch.Tensor.to, torch.Tensor.cuda) == plain


def test_techniques_that_replace_the_same_function_are_put_back_in_any_order() -> None:
    """`channels_last` and `precision` both stand before random draws, whichever the plan names first."""
    for names in (("channels_last", "precision"), ("precision", "channels_last")):
        plan = {name: SETTINGS[name] for name in names}
        plain, module = functions(), Convolving()
        quiet(plan=Plan(plan), limit_train_batches=2, limit_val_batches=0).fit(module, loader())
        assert functions() == plain, names
        assert all(ours is not torchs for ours, torchs in zip(module.found, plain, strict=True))
