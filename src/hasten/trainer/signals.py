"""Handles SIGTERM, SIGUSR1 and Ctrl-C: the training saves a checkpoint and exits with a code that says why.

A handler only records the request; the loops call `stop_if_asked` at safe points, which saves and raises. Exit codes:
143 after SIGTERM, 138 after SIGUSR1, 130 after Ctrl-C, as shells count them. A second Ctrl-C ends the process at once,
without saving. With several ranks, any rank may get the signal; all stop at the same batch (see `Agreement`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.parallel import ending, forward
from hasten.trainer import worker_signals
from hasten.trainer.adapter import adapter
from hasten.trainer.watchdog import Watchdog
from hasten.trainer.watchdog import is_interactive as is_interactive

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_SIGNALS = (int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGUSR1))
_JOIN_SECONDS = 2.0


@contextlib.contextmanager
def watched(trainer: Trainer) -> Iterator[None]:
    """Make SIGTERM, SIGUSR1 and Ctrl-C a request to stop at the end of the batch, inside this context."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers in the main thread only
        return
    before: dict[int, Any] = {}
    stopping = trainer.engine.stopping
    agreement = stopping.agreement = Agreement(trainer) if trainer.world.size > 1 else None
    watchdog = Watchdog(trainer)
    process = os.getpid()
    received = 0  # this process's own signal. `stopping.signal` may be set first by another rank's, through the store

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            _in_a_fork(number)
            return
        nonlocal received
        worker_signals.training_stops()
        if received and number == signal.SIGINT:
            if is_interactive():
                raise KeyboardInterrupt
            watchdog.end_now(number, "stopped at once, nothing was saved")
        first = not stopping.signal
        stopping.signal = received = number
        if first:
            _announce(trainer, number)
        script_handler = before.get(number)
        if number != signal.SIGINT and callable(script_handler):  # not for Ctrl-C: Python's own would raise
            script_handler(number, frame)

    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:  # the parent process wants this signal ignored (nohup)
            continue
        if number == signal.SIGUSR1 and _is_handled(number):  # the script uses SIGUSR1 for something else
            continue
        before[number] = signal.signal(number, on_signal)
    watchdog.start(before)
    try:
        if agreement is not None:
            agreement.listen()
        with worker_signals.ignoring_sigterm():
            yield
    finally:
        if agreement is not None:
            agreement.close()
        watchdog.close()
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _is_handled(number: int) -> bool:
    """Return whether a signal already has a handler: Python's, or one set in C, as by `faulthandler.register`."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux: assume that it has
        return True
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _in_a_fork(number: int) -> None:
    """Handle a signal in a process forked while training: ignore Ctrl-C, which the training handles; end on SIGTERM."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _announce(trainer: Trainer, number: int) -> None:
    """Announce the stop, from a handler that may have interrupted a print; pass the signal to launched ranks."""
    forward(number)
    if trainer.is_global_zero:
        again = "; Ctrl-C again quits at once" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        messages.tell_from_handler(f"hasten: {name}: saving at the end of this batch, then stopping{again}")


class Agreement:
    """Lets ranks agree, through their store, on the batch at which all stop. Costs nothing until a rank is asked to.

    Ranks must stop at the same batch, or the others would wait for them forever in the next gradient exchange. A rank
    that is asked to stop writes the number of batches it has done, and continues. A thread in each other rank sees
    that, and its rank does the same. All stop at the first optimizer step after the largest of these numbers: ranks
    synchronize in each step, so by then each has seen all the numbers.

    Args:
        trainer: A Trainer with several ranks.
    """

    _runs = 0

    def __init__(self, trainer: Trainer) -> None:
        Agreement._runs += 1  # the same on all ranks, which run the same stages
        self._trainer = trainer
        self._stopping = trainer.engine.stopping
        self._name = f"stop/{Agreement._runs}"
        self._store: Any = trainer.world.store
        self._has_told = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hasten-stop", daemon=True)

    def listen(self) -> None:
        """Start watching for a request to another rank."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching, at the end of the stage."""
        self._over.set()
        self._thread.join(_JOIN_SECONDS)  # with a timeout: if the network is down, the thread waits for the store

    def _look(self) -> None:
        """Poll the store, in a thread, until another rank was asked to stop."""
        while not self._over.wait(0.25):
            try:
                if self._store.check([self._name]):
                    self._stopping.signal = self._stopping.signal or int(self._store.get(self._name))
                    return
            except RuntimeError:  # the store's process has ended; ranks notice that in their collectives
                return

    def tell(self) -> None:
        """Ask the other ranks to stop too."""
        if not self._has_told:
            self._has_told = True
            world, number = self._trainer.world, self._stopping.signal
            self._store.set(f"{self._name}/{world.rank}", f"{self._trainer.progress.total_batches} {number}")
            self._store.set(self._name, str(number))
            self._store.add(f"{self._name}/left", 1)  # unlike `set`, `add` returns only when the store has it

    def is_now(self, stepped: bool) -> int:
        """Return the signal if this is the batch at which all ranks stop, else 0.

        Args:
            stepped: Whether the last batch ended with an optimizer step, which synchronizes the ranks.
        """
        self.tell()
        world = self._trainer.world
        if not stepped or self._store.add(f"{self._name}/left", 0) < world.size:
            return 0
        entries = [self._store.get(f"{self._name}/{rank}").split() for rank in range(world.size)]
        if self._trainer.progress.total_batches <= max(int(batches) for batches, _ in entries):
            return 0
        return max(int(number) for _, number in entries)


class Stopped(SystemExit):
    """Exit of a training that was asked to stop, raised after it has saved."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def stopped(number: int) -> Stopped:
    """Return the exception that ends a training; after SIGTERM, it also derives from the framework's in use, if any."""
    exception: Any = adapter().stopped(Stopped) if number == signal.SIGTERM else Stopped
    return exception(number)  # type: ignore[no-any-return]


def stop_if_asked(trainer: Trainer, stepped: bool = True, together: bool = False) -> None:
    """Save and exit, if a signal requested it.

    Args:
        trainer: The Trainer.
        stepped: Whether the last batch ended with an optimizer step.
        together: Whether all ranks are at this point now, so that one reduction can decide.
    """
    stopping, world = trainer.engine.stopping, trainer.world
    number = stopping.signal
    if world.size > 1 and together:
        number = int(world.reduce(torch.tensor(float(number)), "max"))
    elif number and stopping.agreement is not None:
        if trainer.stage.fn != "fit":
            stopping.agreement.tell()
        elif trainer.validating:  # ranks do not synchronize in validation batches: stop after it
            return
        else:
            number = stopping.agreement.is_now(stepped)
    if number:
        stopping.signal = number
        _stop(trainer)


def _stop(trainer: Trainer) -> None:
    """Save, and raise the exit."""
    number = trainer.engine.stopping.signal
    trainer.engine.stopping.interrupted = True
    ending()
    path = trainer.checkpointing.save_interrupted() if trainer.stage.fn == "fit" else None
    name = signal.Signals(number).name
    if path is not None:
        trainer.say(f'{name}: saved {path}; resume with fit(..., ckpt_path="last")')
    else:
        why = "" if trainer.checkpoint_callbacks else "checkpoints are off, so "
        trainer.say(f"{name}: stopped; {why}nothing was saved")
    if number == signal.SIGINT and is_interactive():
        raise KeyboardInterrupt
    raise stopped(number)
