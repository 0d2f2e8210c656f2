"""Saves checkpoints while the training goes on: a quick copy now, the file from a thread."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.trainer.checkpoint.files import write
from hasten.trainer.checkpoint.plain import Packed, pack, type_name
from hasten.trainer.checkpoint.tensors import contiguous_strides, is_dense

Done = Callable[[Path, list[str]], object]


class Saver:
    """Writes and removes checkpoints in the order in which it was told to.

    In the background, `save` copies the state to memory that is kept for the next save, and one thread writes it. There
    is one copy: a save waits for the one before. The thread ends when nothing is left to do; the interpreter does not
    exit before that. Use it from one thread, and not from signal handlers.

    Args:
        background: Write in a thread; otherwise `save` returns when the file is there, and raises if it is not.
        format: "hasten" or "torch".
    """

    def __init__(self, background: bool = True, format: str = "hasten") -> None:
        self._background = background
        self._format = format
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Callable[[], None], bool]] = deque()  # what to do, and whether it writes
        self._thread: threading.Thread | None = None
        self._failures: list[HastenError] = []
        self._copies: dict[str, torch.Tensor] = {}
        # Belong to whoever runs tasks:
        self._last_failed = False
        self._held: list[Path] = []  # to be removed once a later write was good

    def save(self, path: str | Path, state: dict[Any, Any], done: Done | None = None) -> None:
        """Saves a state as it is now; it may change as soon as this returns.

        Args:
            path: The file, replaced when the new one is whole.
            state: See `write`. Tensors on any device.
            done: Called with the path and what `write` returned when the file is there; in the thread.

        Raises:
            HastenError: In the foreground, the write failed. In the background, `check` and `wait` raise that.
        """
        path = Path(path)
        if not self._background:
            self._write(path, pack(state), done)
            return
        with self._changed:
            self._changed.wait_for(lambda: not any(writes for _, writes in self._tasks))
        with torch.inference_mode(False), torch.no_grad():  # whatever mode the training is in
            packed = self._copied(pack(state))
        self._add(lambda: self._write(path, packed, done), writes=True)

    def remove(self, path: str | Path) -> None:
        """Removes a checkpoint, after all that was told before. If the write before failed, once a later one is good.

        One that is not there is no failure.
        """
        path = Path(path)
        if self._background:
            self._add(lambda: self._remove(path))
        else:
            self._remove(path)

    @property
    def works(self) -> bool:
        """Whether something is still to be written or removed; answered at once, also while another thread hangs."""
        return bool(self._tasks)

    @property
    def failures(self) -> tuple[HastenError, ...]:
        """Return background failures that were not raised yet, oldest first."""
        with self._changed:
            return tuple(self._failures)

    def check(self) -> None:
        """Raises the first background failure that was not raised yet, if any; does not wait.

        Raises:
            HastenError: What failed; how many more did, is in its message.
        """
        with self._changed:
            failures, self._failures = self._failures, []
        _unreported.discard(self)
        if failures:
            first = failures[0]
            if len(failures) > 1:
                first.message += f" (And {len(failures) - 1} more after it.)"
            raise first

    def wait(self) -> None:
        """Waits until everything is written and removed.

        Raises:
            HastenError: As `check`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks)
        self.check()

    def __reduce__(self) -> tuple[type[Saver], tuple[bool, str]]:
        return Saver, (self._background, self._format)  # a copy has nothing to write

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self.wait()
        else:
            with self._changed:  # the error on its way matters more than that of a write
                self._changed.wait_for(lambda: not self._tasks)

    def _copied(self, packed: Packed) -> Packed:
        """The state with its tensors copied into this saver's memory."""
        copies: dict[str, torch.Tensor] = {}
        devices = set()
        for name, tensor in packed.tensors.items():
            copy = self._copies.pop(name, None)
            # Memory used before is several times quicker to copy to than new memory.
            strides = _strides_of_copy(tensor)
            if copy is None or (copy.shape, copy.dtype, copy.stride()) != (tensor.shape, tensor.dtype, strides):
                copy = torch.empty_strided(
                    tensor.shape, strides, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
            copies[name] = copy
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._copies = copies
        return replace(packed, tensors=dict(copies))

    def _add(self, task: Callable[[], None], writes: bool = False) -> None:
        interrupted: BaseException | None = None
        with self._changed:
            self._tasks.append((task, writes))
            alone = False
            while self._thread is None and not alone:
                # Not a daemon, so that the interpreter waits for it; it ends with its work, so it does so only then.
                self._thread = threading.Thread(target=self._work, name="hasten-saver")
                try:
                    self._thread.start()
                except BaseException as error:
                    self._thread = None  # if it did begin, it sees that another works, and ends
                    alone = isinstance(error, RuntimeError) and "new thread" in str(error)
                    if not alone:  # a signal's handler raised it, as a DataLoader's does when a worker was killed
                        # Thread.start forgets a thread that has begun already, and fails on that.
                        hidden = error.__context__ if isinstance(error, KeyError) else None
                        interrupted = hidden or error
        if alone:  # the interpreter is on its way out: work here
            self._work()
        if interrupted is not None:
            raise interrupted

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._thread not in (None, threading.current_thread()):
                    return
                if not self._tasks:
                    self._thread = None
                    return
                task, _ = self._tasks[0]
            try:
                task()
            except BaseException as error:  # must not end the thread: somebody waits for the rest
                self._failed(error)
            with self._changed:
                self._tasks.popleft()
                self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, HastenError):
            found = HastenError(
                f"Saving a checkpoint failed: {type_name(error)}: {error}.", "The files saved before are kept."
            )
            found.__cause__ = error
            error = found
        with self._changed:
            self._failures.append(error)
        _unreported.add(self)

    def _write(self, path: Path, packed: Packed, done: Done | None) -> None:
        self._last_failed = True
        notes = write(path, packed, self._format)
        self._last_failed = False
        held, self._held = self._held, []
        try:
            for old in held:
                if old != path:
                    self._remove(old)
        finally:
            if done is not None:
                done(path, notes)

    def _remove(self, path: Path) -> None:
        if self._last_failed:
            self._held.append(path)
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise HastenError(f"Cannot remove {path}: {error.strerror}.", "Remove it by hand.") from error


def _strides_of_copy(tensor: torch.Tensor) -> tuple[int, ...]:
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.stride()
    return contiguous_strides(tensor.shape)


_unreported: set[Saver] = set()


def _report() -> None:
    for saver in _unreported:
        for failure in saver.failures:
            messages.tell(f"hasten: {failure}")


atexit.register(_report)
