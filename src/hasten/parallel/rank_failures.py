"""Find out how the ranks that this process started have ended, and which of them caused the failure.

When a rank dies, the others fail too, with errors of gloo, NCCL or the store. Such an error is a symptom
(`is_symptom`); a rank with any other error, or ended by a signal from outside, is guilty.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import psutil

from hasten.errors import HastenError

# In an error message, these mean that another rank is gone or does not answer.
_SYMPTOMS = (
    "gloo/transport", "ProcessGroupNCCL", "ProcessGroupGloo", "ncclRemoteError", "ncclSystemError", "DistBackendError",
    "DistNetworkError", "DistStoreError", "Connection closed by peer", "Connection reset by peer",
)  # fmt: skip


class RankProcess(Protocol):
    """A rank in a child process of this one."""

    rank: int
    pid: int

    def code(self) -> int | None:
        """Return its exit code: -N after signal N, None while it runs."""

    def last_words(self) -> str:
        """Return the end of its stderr, or the error it reported; may be empty."""


def is_symptom(text: str) -> bool:
    """Return whether an error only means that another rank is gone or does not answer."""
    return any(word in text for word in _SYMPTOMS)


def settle(children: Sequence[RankProcess], seconds: float = 5.0) -> None:
    """Wait until a guilty or stopped rank is found, every rank has ended, or the time (seconds) is over.

    Ranks that lost a partner fail too, and their end may be noticed before the guilty rank's.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(_guilty(child) for child in children) or all(child.code() is not None for child in children):
            return
        if any(_stopped(child.pid) for child in children if child.code() is None):
            return
        time.sleep(0.05)


def verdict(children: Sequence[RankProcess], size: int) -> HastenError | None:
    """Return the error that names the rank to blame; None if no rank has ended or is stopped.

    In order: a guilty rank, a stopped one, one that ended early without error, one that does not answer, any that
    ended.

    Args:
        children: The ranks that this process started.
        size: Number of ranks, including those that it did not start.
    """
    ended = [child for child in children if child.code() is not None]
    alive = [child for child in children if child.code() is None]
    if guilty := [child for child in ended if _guilty(child)]:
        return _error(guilty[0], size, how_it_ended(guilty[0].code() or 0))
    if stopped := [child for child in alive if _stopped(child.pid)]:
        return _error(stopped[0], size, f"is stopped (process {stopped[0].pid}, by SIGSTOP or a debugger)")
    if early := [child for child in ended if child.code() == 0]:
        return _error(early[0], size, "ended (exit code 0) while the others were still training")
    if ended and alive:  # all that ended have lost a partner: probably one that still runs but hangs
        return _error(alive[0], size, f"does not answer (process {alive[0].pid})")
    if ended:
        return _error(ended[0], size, how_it_ended(ended[0].code() or 0))
    return None


def lost_partner(rank: int, size: int, message: str) -> HastenError:
    """Return the error for a rank that lost a partner under another launcher, and so cannot see how the others ended.

    Args:
        rank: This rank.
        size: Number of ranks.
        message: torch's error message.
    """
    return HastenError(
        f"Rank {rank} of {size} on {socket.gethostname()} has lost another rank: that has ended, its machine or the "
        f"network is gone, or it did not answer in time. torch says: {(message.splitlines() or ['nothing'])[0]}",
        "Look at what the other ranks wrote: one with another error is to blame; if none has one, look at the machines "
        "and the network. `timeout` of the strategy is how long a rank is waited for. When it is mended, start all "
        'ranks again with ckpt_path="last".',
        code=1,
    )


def end_all(children: Sequence[RankProcess]) -> None:
    """End all ranks that still run, by SIGTERM and after 3 seconds by SIGKILL; wait for them, at most 10 seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            if child.code() is None:
                send(child, number)
        end = time.monotonic() + (3.0 if number == signal.SIGTERM else 10.0)
        while any(child.code() is None for child in children) and time.monotonic() < end:
            if all(child.code() is not None or _stopped(child.pid) for child in children):
                break  # a stopped process reacts to SIGKILL only
            time.sleep(0.02)


def send(child: RankProcess, number: int) -> None:
    """Send a signal to a rank, which may have ended already."""
    with suppress(ProcessLookupError):
        os.kill(child.pid, number)


def _guilty(child: RankProcess) -> bool:
    """Return whether a rank failed for a reason of its own, as opposed to losing a partner."""
    code = child.code()
    if not code:
        return False
    # torch aborts a process whose partners are gone; any other signal came from outside or from a crash.
    return (code < 0 and code != -signal.SIGABRT) or not is_symptom(child.last_words())


def _stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
    except psutil.Error:  # gone
        return False


def how_it_ended(code: int) -> str:
    """Return how a process with this exit code ended, in words (-N: by signal N)."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was ended by signal {-code} ({name})"


def _error(child: RankProcess, size: int, how: str) -> HastenError:
    """Return the error that blames a rank; `how` says how it ended ("ended with exit code 1")."""
    code = child.code()
    output = "\n".join(f"    {line}" for line in child.last_words().strip().splitlines()[-15:])
    if code == -signal.SIGKILL:
        fix = (
            "Nobody but the system or a person sends SIGKILL: look for lack of memory with `dmesg` or `journalctl -k`."
        )
    elif code is None:
        fix = f"See where it is: py-spy dump --pid {child.pid} (or `timeout` was too short for what it was doing)."
    elif code == 0:
        fix = "All ranks must take the same steps: look for code that leaves early on some ranks."
    elif code < 0:
        fix = "A crash in native code leaves no traceback: run with PYTHONFAULTHANDLER=1, or devices=1."
    else:
        fix = "Mend that error; devices=1 often shows it more plainly."
    message = f"Rank {child.rank} of {size} {how}, so all ranks were ended."
    return HastenError(message + (f" It said last:\n{output}" if output else ""), fix, code=1)
