"""SIGTERM, SIGUSR1 and Ctrl-C: the training saves and ends with an exit code that says why.

Exit codes: 143 after SIGTERM, 138 after SIGUSR1, 130 after Ctrl-C, as shells count them. A second Ctrl-C ends at once,
without saving. Of several ranks, any one may get the signal; they stop at the same batch (see `Agreement`).
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

_ASKS = (int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGUSR1))
_JOIN_SECONDS = 2.0


@contextlib.contextmanager
def watched(trainer: Trainer) -> Iterator[None]:
    """While this lasts, SIGTERM, SIGUSR1 and Ctrl-C only ask the trainer to stop at the end of the batch."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    stopping = trainer.engine.stopping
    agreement = stopping.agreement = Agreement(trainer) if trainer.world.size > 1 else None
    watchdog = Watchdog(trainer)
    process = os.getpid()
    heard = 0  # by this process; of what another rank was told it hears from the store, perhaps before that one's word

    def asked(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            _in_a_fork(number)
            return
        nonlocal heard
        worker_signals.training_stops()
        if heard and number == signal.SIGINT:
            if is_interactive():
                raise KeyboardInterrupt
            watchdog.end_now(number, "stopped at once, nothing was saved")
        first = not stopping.signal
        stopping.signal = heard = number
        if first:
            _tell(trainer, number)
        own = before.get(number)
        if number != signal.SIGINT and callable(own):  # a script's own handler is called too
            own(number, frame)

    for number in _ASKS:
        if signal.getsignal(number) is signal.SIG_IGN:  # whoever started us wants this signal ignored
            continue
        if number == signal.SIGUSR1 and _is_handled(number):  # it may mean anything to a script
            continue
        before[number] = signal.signal(number, asked)
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
    """Whether a signal does something here already: a handler of Python's, or of `faulthandler.register`."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # no Linux: leave it alone
        return True
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _in_a_fork(number: int) -> None:
    """A process was forked while training: the training decides about Ctrl-C; SIGTERM ends what was forked."""
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _tell(trainer: Trainer, number: int) -> None:
    """Say what happens next; a handler may run in the middle of a print."""
    forward(number)
    if trainer.is_global_zero:
        again = "; Ctrl-C again quits at once" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        messages.tell_from_handler(f"hasten: {name}: saving at the end of this batch, then stopping{again}")


class Agreement:
    """Ranks agree through their store on the batch at which they stop; costs nothing until a rank is asked to.

    A rank that was asked to stop leaves the number of batches it has done, and goes on. A thread in each of the others
    sees that, and they do likewise. All stop at the first optimizer step after the latest of those numbers: ranks meet
    in each step, so by then each of them has seen all the numbers.

    Args:
        trainer: Of a world of several ranks.
    """

    _runs = 0

    def __init__(self, trainer: Trainer) -> None:
        Agreement._runs += 1  # the same on all ranks, which run the same stages
        self._trainer = trainer
        self._stopping = trainer.engine.stopping
        self._name = f"stop/{Agreement._runs}"
        self._store: Any = trainer.world.store
        self._left = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hasten-stop", daemon=True)

    def listen(self) -> None:
        """Begin to look whether another rank was asked to stop."""
        self._thread.start()

    def close(self) -> None:
        """The stage is over."""
        self._over.set()
        self._thread.join(_JOIN_SECONDS)  # where the network is cut, it waits for an answer of the store's machine

    def _look(self) -> None:
        while not self._over.wait(0.25):
            try:
                if self._store.check([self._name]):
                    self._stopping.signal = self._stopping.signal or int(self._store.get(self._name))
                    return
            except RuntimeError:  # who served the store is gone; ranks notice that by other means
                return

    def tell(self) -> None:
        """Ask the other ranks to stop, too."""
        if not self._left:
            self._left = True
            world, number = self._trainer.world, self._stopping.signal
            self._store.set(f"{self._name}/{world.rank}", f"{self._trainer.progress.total_batches} {number}")
            self._store.set(self._name, str(number))
            self._store.add(f"{self._name}/left", 1)  # unlike `set`, this waits until it is there

    def is_now(self, stepped: bool) -> int:
        """The signal, if this is the batch at which all ranks stop; 0 if it is not.

        Args:
            stepped: Whether the optimizer stepped in the batch just done, and so the ranks have met.
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
    """The training was asked to stop, and has saved."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def stopped(number: int) -> Stopped:
    """Return the exception that ends a training; after SIGTERM, also the one of another framework that is in use."""
    kind: Any = adapter().stopped(Stopped) if number == signal.SIGTERM else Stopped
    return kind(number)  # type: ignore[no-any-return]


def stop_if_asked(trainer: Trainer, stepped: bool = True, together: bool = False) -> None:
    """Save and end, if somebody asked for it.

    Args:
        trainer: Whose run it is.
        stepped: Whether the batch just done ended with an optimizer step.
        together: All ranks are at this point now.
    """
    stopping, world = trainer.engine.stopping, trainer.world
    asked = stopping.signal
    if world.size > 1 and together:
        asked = int(world.reduce(torch.tensor(float(asked)), "max"))
    elif asked and stopping.agreement is not None:
        if trainer.stage.fn != "fit":
            stopping.agreement.tell()
        elif trainer.validating:  # ranks do not meet in its batches: after it
            return
        else:
            asked = stopping.agreement.is_now(stepped)
    if asked:
        stopping.signal = asked
        _stop(trainer)


def _stop(trainer: Trainer) -> None:
    """Save, and leave with an exit code."""
    number = trainer.engine.stopping.signal
    trainer.engine.stopping.interrupted = True
    ending()
    path = trainer.checkpointing.save_interrupted() if trainer.stage.fn == "fit" else None
    name = signal.Signals(number).name
    if path is not None:
        trainer.say(f'{name}: saved {path}; go on with fit(..., ckpt_path="last")')
    else:
        why = "" if trainer.checkpoint_callbacks else "checkpoints are off, so "
        trainer.say(f"{name}: stopped; {why}nothing was saved")
    if number == signal.SIGINT and is_interactive():
        raise KeyboardInterrupt
    raise stopped(number)
