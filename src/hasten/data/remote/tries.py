"""Trying again: what may pass is tried again in bounded time, and what will not is said at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from hasten.data.remote.options import Remote, RemoteError
from hasten.messages import warn

T = TypeVar("T")

_FIRST, _LONGEST = 0.25, 8.0  # seconds between attempts
_ASKED = 30.0  # seconds that a server may ask to wait for
_QUIET = 60.0  # seconds between warnings
_STRANGERS = 3  # attempts at a host that never answered: its name may be wrong
_draw = random.Random()  # not the training's: a wait must not move its random numbers
_told = [-_QUIET]


class PassingError(Exception):
    """An attempt that failed, and of which the next may not.

    Args:
        reason: What happened.
        wait: Seconds the server asks to wait.
        unknown: The host was not reached at all.
    """

    def __init__(self, reason: str, wait: float = 0.0, unknown: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait
        self.unknown = unknown


class Tries:
    """Attempts at one server or store.

    Args:
        remote: How often and how long.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._answered = False

    def until_it_works(self, name: str, attempt: Callable[[], T]) -> T:
        """Return what an attempt returns.

        Args:
            name: What is read, for messages.
            attempt: Raises `PassingError` where another one may succeed.

        Raises:
            RemoteError: All attempts failed.
        """
        began, most = time.monotonic(), self._remote.retries + 1
        for number in range(1, most + 1):
            try:
                value = attempt()
            except PassingError as error:
                reason, wait = error.reason, error.wait
                stranger = error.unknown and not self._answered
                if number == (min(most, _STRANGERS) if stranger else most):
                    break
                if not stranger:
                    self._tell(name, reason, number, most)
            else:
                self._answered = True
                return value
            pause = min(_FIRST * 2 ** (number - 1), _LONGEST) * _draw.uniform(0.5, 1.0)
            time.sleep(max(pause, min(wait, _ASKED)))
        seconds = time.monotonic() - began
        raise RemoteError(
            f"{name} cannot be read: {reason} ({number} attempts in {seconds:.0f} s)",
            "check the URL, the server and the network; ParquetDataset(remote=Remote(retries=, timeout=)) waits longer",
        )

    def _tell(self, name: str, reason: str, number: int, most: int) -> None:
        """Warn of a server that fails again and again, once a minute."""
        if number < 2:
            return
        if time.monotonic() - _told[0] < _QUIET:
            return
        _told[0] = time.monotonic()
        warn(f"{name}: {reason}; attempt {number} of {most} failed, trying again", stacklevel=3)
