"""Retries: errors that may pass are retried within a bounded time, and others are raised at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from hasten.data.remote.options import Remote, RemoteError
from hasten.messages import warn

T = TypeVar("T")

_FIRST, _LONGEST = 0.25, 8.0  # seconds between attempts
_LONGEST_WAIT = 30.0  # longest wait, in seconds, that a server's Retry-After may ask for
_QUIET = 60.0  # seconds between warnings
_STRANGERS = 3  # attempts at a host that never answered, whose name may be wrong
_draw = random.Random()  # a separate generator, so that retries do not move the training's random numbers
_warned_at = [-_QUIET]  # time of the last warning


class PassingError(Exception):
    """A failed attempt that may succeed when repeated.

    Args:
        reason: What happened.
        wait: Seconds that the server asks to wait.
        unknown: Whether the host was not reached at all.
    """

    def __init__(self, reason: str, wait: float = 0.0, unknown: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait
        self.unknown = unknown


class Retries:
    """Retries requests to one server or store.

    Args:
        remote: The number of retries.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._answered = False

    def until_it_works(self, name: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it succeeds, with growing pauses; return its result.

        Args:
            name: Name of the file, for messages.
            attempt: Raises `PassingError` if another attempt may succeed.

        Raises:
            RemoteError: All attempts failed.
        """
        started, most = time.monotonic(), self._remote.retries + 1
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
            time.sleep(max(pause, min(wait, _LONGEST_WAIT)))
        seconds = time.monotonic() - started
        raise RemoteError(
            f"{name} cannot be read: {reason} ({number} attempts in {seconds:.0f} s)",
            "check the URL, the server and the network; ParquetDataset(remote=Remote(retries=, timeout=)) waits longer",
        )

    def _tell(self, name: str, reason: str, number: int, most: int) -> None:
        """Warn of a server that fails repeatedly, at most once a minute."""
        if number < 2:
            return
        if time.monotonic() - _warned_at[0] < _QUIET:
            return
        _warned_at[0] = time.monotonic()
        warn(f"{name}: {reason}; attempt {number} of {most} failed, trying again", stacklevel=3)
