"""SIGTERM and Ctrl-C: the training saves and ends with an exit code that says why.

Exit codes: 143 after SIGTERM, 130 after Ctrl-C, as shells count them. A second Ctrl-C ends at once, without saving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from hasten.trainer.flags import uses_lightning

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def is_interactive() -> bool:
    """Whether a person types into this process: there Ctrl-C must not end it."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


@contextlib.contextmanager
def watched(trainer: Trainer) -> Iterator[None]:
    """While this lasts, SIGTERM and Ctrl-C only ask the trainer to stop at the end of the batch."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def asked(number: int, frame: FrameType | None) -> None:
        if trainer.asked_to_stop and number == signal.SIGINT:
            os.write(2, b"\nhasten: stopped at once, nothing was saved\n")
            os._exit(128 + number)
        first = not trainer.asked_to_stop
        trainer.asked_to_stop = number
        if first:
            _tell(trainer, number)
        own = before.get(number)
        if number != signal.SIGINT and callable(own):  # a script's own handler is called too
            own(number, frame)

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        if signal.getsignal(number) is signal.SIG_IGN:  # whoever started us wants this signal ignored
            continue
        before[number] = signal.signal(number, asked)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _tell(trainer: Trainer, number: int) -> None:
    """Say what happens next; with `os.write`, since a handler may run in the middle of a print."""
    from hasten.parallel import forward

    forward(number)
    if trainer.is_global_zero:
        again = "; Ctrl-C again quits at once" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        os.write(2, f"\nhasten: {name}: saving at the end of this batch, then stopping{again}\n".encode())


class Stopped(SystemExit):
    """The training was asked to stop, and has saved."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def stopped(number: int) -> Stopped:
    """The exception that ends a training; after SIGTERM, where Lightning is in use, also the one that it raises."""
    if number != signal.SIGTERM or not uses_lightning():
        return Stopped(number)
    from hasten.trainer.lightning import stopped_kind

    kind: Any = stopped_kind(Stopped)
    return kind(number)  # type: ignore[no-any-return]
