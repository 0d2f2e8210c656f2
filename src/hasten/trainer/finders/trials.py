"""`Trainer.find_batch_size`: trial fits in this process, on copies, for the search of `hasten batch`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hasten.batch.attempt import Attempt, Guard, free_bytes
from hasten.batch.result import BatchSizes
from hasten.batch.search import search
from hasten.batch.trial_observer import memory_figure, peak_bytes, reset_peak, tensor_bytes
from hasten.data import rng
from hasten.errors import HastenError, is_out_of_memory
from hasten.parallel import choose_devices
from hasten.trainer.callbacks.base import Callback
from hasten.trainer.finders.copies import TRIED, copied_fit, refuse_to_try, trainer_on_trial, with_datamodule
from hasten.trainer.finders.resizing import Resizing

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def find(trainer: Trainer, fit: dict[str, Any], train: Any, val: Any, memory: int | None, timeout: float) -> BatchSizes:
    """Find the largest safe batch size; see `Trainer.find_batch_size`."""
    instead = "call it in a process of its own; each rank then takes a batch of that size"
    refuse_to_try(trainer, "find_batch_size", instead)
    trials = _Trials(trainer, fit, {"train": train, "val": val}, memory, timeout)
    count = len(choose_devices(trainer.config.accelerator, trainer.config.devices))
    if count > 1:
        trainer.say(f"trying on one of {count} devices: what they exchange or share among them is not counted")
    before = rng.state()
    try:
        return BatchSizes(search(trials, 0, trainer.say))
    finally:
        trials.resizing.restore()
        rng.restore(before)


class _Trials:
    """Tries batch sizes by fits of copies: the `Trials` that `hasten.batch.search` asks.

    Args:
        trainer: The Trainer whose flags, techniques and precision are tried. Its callbacks and loggers are not used.
        fit: The arguments of `fit`, without loaders.
        loaders: "train" and "val" loaders, or None where hooks return them.
        memory: Limit in bytes; None: the free memory.
        timeout: Seconds per attempt.
    """

    leans = False

    def __init__(
        self, trainer: Trainer, fit: dict[str, Any], loaders: dict[str, Any], memory: int | None, timeout: float
    ) -> None:
        self._trainer, self._timeout = trainer, timeout
        self._fit, self._loaders = with_datamodule(fit, loaders)
        self._device = trainer.device
        self.on_gpu = self._device.type == "cuda"
        self.attempts: list[Attempt] = []
        self.resizing = Resizing()
        self._resident = _resident(fit["model"], self._device)
        self.limit = memory or self._free()

    def _free(self) -> int:
        """Return the bytes that a fit may use: the free memory, and what this process holds already."""
        if self.on_gpu:
            free, _ = torch.cuda.mem_get_info(self._device)
            return free + torch.cuda.memory_reserved(self._device)
        return free_bytes() + memory_figure("VmRSS")

    def own_size(self, first: Attempt, argument_value: int) -> tuple[int, int]:
        """Return the training loader's batch size, and the samples in its dataset (0: unknown)."""
        if not self.resizing.batch_size:
            raise HastenError(
                "the training loader is no DataLoader, so its batch size cannot be changed",
                "give a DataLoader; or use `hasten batch --argument` on the script",
            )
        return self.resizing.batch_size, self.resizing.samples

    def run(self, size: int = 0, former: int = 0, lean: bool = False) -> Attempt:
        """Fit a copy for a few steps, and validate, for three passes.

        Args:
            size: Samples in a batch; 0: the training loader's own size.
            former: The loader's own size.
            lean: Try again with an allocator that returns memory sooner. That needs a separate process: here, the
                earlier attempt of this size is returned.
        """
        if lean:
            return next(attempt for attempt in self.attempts if attempt.size == size)
        attempt = self._attempt(size)
        if not self.attempts and attempt.outcome == "out of memory":
            raise HastenError(
                f"the training does not fit into {self.limit / 1e9:.2f} GB with its own batch size ({attempt.reason})",
                "allow more memory, or make the model or the batch size smaller",
            )
        self.attempts.append(attempt)
        return attempt

    # -- an attempt ------------------------------------------------------------------------------------

    def _attempt(self, size: int) -> Attempt:
        """Fit a copy, and return its peak memory, time and outcome."""
        reason = ""
        self._give_back()
        guard = Guard(os.getpid(), None)
        clock = Clock(self._timeout)
        parts: dict[str, int] = {}
        names: tuple[str, ...] = ()
        try:
            with tempfile.TemporaryDirectory(prefix="hasten-") as folder, self._limited():
                fit = self._copied(size)
                trainer = self._tried(clock, folder)
                trainer.fit(**fit)
                parts = tensor_bytes([trainer.model], trainer.optimizers)
                names = tuple(type(optimizer).__name__ for optimizer in trainer.optimizers)
        except Exception as error:
            out = is_out_of_memory(error)
            if not out and not self.attempts:
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            outcome = "out of memory" if out else "failed"
        else:
            outcome = "ok" if clock.seconds else "timeout"
        finally:
            # Free the copies before memory is measured and the next attempt starts.
            fit = trainer = None  # type: ignore[assignment]
            _, workers = guard.stop()
        peak = torch.cuda.max_memory_reserved(self._device) if self.on_gpu else peak_bytes() + workers
        total = torch.cuda.get_device_properties(self._device).total_memory if self.on_gpu else 0
        self._give_back()
        return Attempt(
            size,
            outcome,
            max(0, peak - self._resident),
            seconds=clock.seconds,
            reason=reason,
            split=parts,
            optimizers=names,
            device=self._device.type,
            device_bytes=total,
        )

    def _give_back(self) -> None:
        """Return cached memory to the system, so that the attempt starts as a fit does, and reset the peak."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        reset_peak()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """On a CPU under Linux, make the allocator fail at the limit: otherwise the kernel would kill this process."""
        if self.on_gpu or sys.platform != "linux":
            yield
            return
        import resource

        before = resource.getrlimit(resource.RLIMIT_DATA)
        room = self.limit + self._resident - memory_figure("VmRSS")
        allowed = memory_figure("VmData") + max(0, room)
        most = allowed if before[1] == resource.RLIM_INFINITY else min(allowed, before[1])
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    def _tried(self, clock: Clock, folder: str) -> Any:
        """Return the Trainer of an attempt."""
        flags = TRIED | {"limit_val_batches": 0 if self._trainer.user_config.limit_val_batches == 0 else 2}
        flags |= {"limit_train_batches": BATCHES, "max_epochs": PASSES}
        if self._trainer.user_config.microbatch == "auto":
            flags["microbatch"] = None  # "auto" splits batches that do not fit, so every size would fit
        return trainer_on_trial(self._trainer, flags, clock, folder)

    def _copied(self, size: int) -> dict[str, Any]:
        """Return the arguments for a trial `fit` with loaders of another batch size."""

        def resized(loaders: Any, kind: str) -> Any:
            return self.resizing.loaders(loaders, size, kind)

        return copied_fit(self._trainer, self._fit, self._loaders, resized)


def _resident(model: Any, device: torch.device) -> int:
    """Return the bytes of the user's module on the device: they are subtracted from an attempt's peak."""
    if not isinstance(model, torch.nn.Module):
        return 0
    tensors = {
        id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()] if tensor.device.type == device.type
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


BATCHES = 8
"""Batches per pass."""
PASSES = 3
"""Passes per attempt; the first is warm-up."""


class Clock(Callback):
    """Times batches, without validation, and ends a fit that takes too long.

    Attributes:
        seconds: Per batch, in the fastest pass; 0 until a pass after the first is over.
    """

    def __init__(self, timeout: float) -> None:
        self.seconds = 0.0
        self._until = time.monotonic() + timeout
        self._started = 0.0
        self._pass = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Start a pass's clock at its second batch, if it has one: the first waits for workers to start."""
        if batch_idx <= 1:
            _wait_for(trainer)
            self._started, self._first = time.perf_counter(), batch_idx

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the pass's clock at its last batch; stop training after the timeout."""
        self._last = batch_idx
        if time.monotonic() > self._until:
            trainer.should_stop = True
        if trainer.engine.loop.last or batch_idx + 1 == BATCHES:
            _wait_for(trainer)
            self._ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Note the seconds per batch of this pass, unless it is the first, which was warm-up."""
        self._pass += 1
        if self._pass > 1 and not trainer.should_stop:
            seconds = (self._ended - self._started) / (self._last - self._first + 1)
            self.seconds = min(self.seconds or seconds, seconds)


def _wait_for(trainer: Any) -> None:
    """Wait for the device's kernels."""
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
