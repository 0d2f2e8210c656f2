"""What a Trainer sets for the whole process holds for its own stages alone."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hasten.plan import Plan
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
        self.found = functions()
        return super().training_step(batch, batch_idx) + self.convolution(images).flatten(1).mean()


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
