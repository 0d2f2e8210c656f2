"""Saver: save checkpoints during training, by a quick copy in memory and a write in a background thread.

`save` copies the state to host memory that is reused from save to save, and queues the write; one thread works off the
queue. A failure is kept until `check` or `wait` raises it, or is printed when the interpreter exits.
"""

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

OnWritten = Callable[[Path, list[str]], object]


class Saver:
    """Writes and removes checkpoints, in the order of the calls.

    In the background, `save` copies the state to memory that is reused for the next save, and one thread writes it.
    There is only one copy, so a save waits for the previous write. The thread ends when its queue is empty; the
    interpreter does not exit before that. Use a Saver from one thread, and not from signal handlers.

    Args:
        background: Write in a thread; otherwise `save` returns when the file is written, and raises if that fails.
        format: "hasten" or "torch".
    """

    def __init__(self, background: bool = True, format: str = "hasten") -> None:
        self._background = background
        self._format = format
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Callable[[], None], bool]] = deque()  # the task, and whether it is a write
        self._thread: threading.Thread | None = None
        self._failures: list[HastenError] = []
        self._copies: dict[str, torch.Tensor] = {}
        # Used only by the thread that runs the tasks:
        self._last_failed = False
        self._remove_later: list[Path] = []  # to be removed once a later write succeeds

    def save(self, path: str | Path, state: dict[Any, Any], on_written: OnWritten | None = None) -> None:
        """Save the current state; the caller may change it as soon as this returns.

        Args:
            path: The file, replaced once the new one is complete.
            state: See `write`. Tensors on any device.
            on_written: Called with the path and the result of `write` once the file is written; in the thread.

        Raises:
            HastenError: In the foreground, the write failed. In the background, `check` and `wait` raise that error.
        """
        path = Path(path)
        if not self._background:
            self._write(path, pack(state), on_written)
            return
        with self._changed:
            self._changed.wait_for(lambda: not any(writes for _, writes in self._tasks))
        with torch.inference_mode(False), torch.no_grad():  # whatever mode the training is in
            packed = self._copied(pack(state))
        self._add(lambda: self._write(path, packed, on_written), writes=True)

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, after all earlier calls are done. A missing file is no failure.

        If the previous write failed, the checkpoint is kept until a later write succeeds.
        """
        path = Path(path)
        if self._background:
            self._add(lambda: self._remove(path))
        else:
            self._remove(path)

    @property
    def works(self) -> bool:
        """Whether something is still to be written or removed. Takes no lock, so it never waits for the thread."""
        return bool(self._tasks)

    @property
    def failures(self) -> tuple[HastenError, ...]:
        """Background failures that were not raised yet, oldest first."""
        with self._changed:
            return tuple(self._failures)

    def check(self) -> None:
        """Raise the first background failure that was not raised yet, if any; does not wait.

        Raises:
            HastenError: The failure; its message says how many more there are.
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
        """Wait until everything is written and removed.

        Raises:
            HastenError: As `check`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks)
        self.check()

    def __reduce__(self) -> tuple[type[Saver], tuple[bool, str]]:
        return Saver, (self._background, self._format)  # a copy starts with an empty queue

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self.wait()
        else:
            with self._changed:  # do not replace the exception in flight by a write error
                self._changed.wait_for(lambda: not self._tasks)

    def _copied(self, packed: Packed) -> Packed:
        """Return the state with its tensors copied into this Saver's memory."""
        copies: dict[str, torch.Tensor] = {}
        devices = set()
        for name, tensor in packed.tensors.items():
            copy = self._copies.pop(name, None)
            # Reuse the memory: copying to it is several times faster than to new memory.
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
        """Queue a task, and start the thread unless it runs."""
        interrupted: BaseException | None = None
        with self._changed:
            self._tasks.append((task, writes))
            alone = False
            while self._thread is None and not alone:
                # Not a daemon: the interpreter then waits for the thread, which ends when its queue is empty.
                self._thread = threading.Thread(target=self._work, name="hasten-saver")
                try:
                    self._thread.start()
                except BaseException as error:
                    self._thread = None  # if it did start after all, it sees that it is not this thread, and ends
                    alone = isinstance(error, RuntimeError) and "new thread" in str(error)
                    if not alone:  # raised by a signal handler, such as DataLoader's when a worker was killed
                        # Thread.start may fail to forget a thread that started after all: a KeyError hides it.
                        hidden = error.__context__ if isinstance(error, KeyError) else None
                        interrupted = hidden or error
        if alone:  # the interpreter is shutting down and starts no threads: work here
            self._work()
        if interrupted is not None:
            raise interrupted

    def _work(self) -> None:
        """Run the queued tasks until there are none."""
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
            except BaseException as error:  # must not end the thread: `wait` waits for the other tasks
                self._failed(error)
            with self._changed:
                self._tasks.popleft()
                self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        """Keep a failure for `check` and `wait`."""
        if not isinstance(error, HastenError):
            wrapped = HastenError(
                f"Saving a checkpoint failed: {type_name(error)}: {error}.", "The files saved before are kept."
            )
            wrapped.__cause__ = error
            error = wrapped
        with self._changed:
            self._failures.append(error)
        _unreported.add(self)

    def _write(self, path: Path, packed: Packed, on_written: OnWritten | None) -> None:
        """Write a checkpoint, then remove those that waited for a successful write."""
        self._last_failed = True
        notes = write(path, packed, self._format)
        self._last_failed = False
        outdated, self._remove_later = self._remove_later, []
        try:
            for old in outdated:
                if old != path:
                    self._remove(old)
        finally:
            if on_written is not None:
                on_written(path, notes)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, or put that off if the previous write failed."""
        if self._last_failed:
            self._remove_later.append(path)
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise HastenError(f"Cannot remove {path}: {error.strerror}.", "Remove it by hand.") from error


def _strides_of_copy(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides for a copy: those of the tensor if it has no gaps or overlaps, else contiguous ones."""
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.stride()
    return contiguous_strides(tensor.shape)


_unreported: set[Saver] = set()


def _report() -> None:
    """Print failures that nobody raised, when the interpreter exits."""
    for saver in _unreported:
        for failure in saver.failures:
            messages.tell(f"hasten: {failure}")


atexit.register(_report)
