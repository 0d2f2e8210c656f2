"""Start a child process that cannot outlive this one, and end it with all of its descendants.

A child runs in its own session, and its environment carries a unique mark (`HASTEN_CHILD_...`) that its descendants
inherit; so they are found in /proc even after they left the session. Each hasten process that starts children also
starts a watcher, a small process that reads from a pipe. When the hasten process dies, from whatever cause, the pipe
closes, and the watcher kills every process that carries the mark of a child that was not ended yet. The watcher runs
this very file by its path, so this file imports only the standard library at the top.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_MARK = "HASTEN_CHILD_"
_PR_SET_PDEATHSIG = 1
PATIENCE = 2.0
"""Seconds between SIGTERM and SIGKILL."""

_ABOUT_TO_START = 0.2  # seconds within which a forked process has called exec, and so carries its mark
_UNTIL_GONE = 5.0  # seconds after which to give up on a process that SIGKILL does not end (stuck in a dead file system)


class Child:
    """A child process that, with all of its descendants, does not outlive this process.

    Args:
        arguments: The child's command line.
        env: The child's environment.
        options: Further arguments for `subprocess.Popen`.

    Raises:
        OSError: The child cannot be started.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        self._mark = _MARK + secrets.token_hex(8)
        _watcher.tell(f"+{self._mark}")  # before the child starts, so that it is never unwatched
        try:
            self.process = subprocess.Popen(arguments, env={**env, self._mark: "1"}, start_new_session=True, **options)
        except OSError:
            _watcher.tell(f"-{self._mark}")
            raise
        except BaseException:  # Ctrl-C, which may interrupt `Popen` after the child was forked
            _end_unknown(self._mark)
            _watcher.tell(f"-{self._mark}")
            raise
        self.pid = self.process.pid
        _watcher.tell(f"+{self._mark} {self.pid}")

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the child's exit code, -N after signal N; None if it still runs after this many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, patience: float = PATIENCE) -> None:
        """End the child and its descendants: by SIGTERM, then after `patience` seconds by SIGKILL."""
        with suppress(ProcessLookupError, PermissionError):
            if patience and self.process.poll() is None:
                os.killpg(self.pid, signal.SIGTERM)
                self.wait(patience)
        end_family(self._mark, self.pid)
        self.wait(_UNTIL_GONE)
        _watcher.tell(f"-{self._mark}")


def start_logged(
    arguments: Sequence[str], env: Mapping[str, str], log: IO[bytes], stdin: int | None = subprocess.DEVNULL
) -> Child:
    """Start a child whose stdout and stderr go to `log`, and whose stdin is empty by default.

    Raises:
        HastenError: The child cannot be started.
    """
    from hasten.errors import HastenError  # not at the top: the watcher runs this file without the hasten package

    try:
        return Child(arguments, env, stdin=stdin, stdout=log, stderr=log)
    except OSError as error:
        raise HastenError(f"cannot start {arguments[0]}: {error.strerror or error}") from None


def running_for() -> float:
    """Return the seconds since this process started; its CPU seconds where there is no /proc."""
    try:
        # Field 22 of /proc/self/stat is the start in clock ticks since boot. Split behind the last ")": field 2 is the
        # command's name in parentheses, which may hold spaces.
        started = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return time.process_time()


def how_it_ended(code: int) -> str:
    """Return an exit code of `Popen` in words: "exit code 1", "signal SIGSEGV"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def end_family(mark: str, pid: int) -> None:
    """Kill the child with this mark and its descendants; return when none is left, or after five seconds."""
    deadline = time.monotonic() + _UNTIL_GONE
    while time.monotonic() < deadline:
        with suppress(ProcessLookupError, PermissionError):
            if pid:
                os.killpg(pid, signal.SIGKILL)
        members = family(mark, pid)
        if not members:
            return
        for member in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.02)  # the next round finds processes that were forked during this one


@contextmanager
def scratch_folder(prefix: str = "hasten-", within: Path | None = None) -> Iterator[Path]:
    """Make a folder for temporary files and remove it at the end, even if SIGKILL ends this process."""
    import tempfile  # not at the top: the watcher does not need it

    with tempfile.TemporaryDirectory(prefix=prefix, dir=within, ignore_cleanup_errors=True) as folder:
        _watcher.tell(f"~{folder}")
        yield Path(folder)


@contextmanager
def ended_with_us(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield an environment for a process that is no `Child`. All processes that have it end if this one is killed."""
    mark = _MARK + secrets.token_hex(8)
    _watcher.tell(f"+{mark}")
    try:
        yield {**env, mark: "1"}
    finally:
        _watcher.tell(f"-{mark}")


def _end_unknown(mark: str) -> None:
    """Kill a child that may or may not have been started, by its mark alone, since its process id is unknown."""
    end_family(mark, 0)
    time.sleep(_ABOUT_TO_START)
    end_family(mark, 0)


def family(mark: str, session: int = 0) -> list[int]:
    """Return the ids of the live processes that carry a mark in their environment, or belong to a session.

    Returns [] on systems without /proc, where only the process group is known.
    """
    members = []
    with suppress(OSError):
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                state, *numbers = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if state in (b"Z", b"X"):  # zombie or dead
                    continue
                marked = mark.encode() in (folder / "environ").read_bytes()
            except OSError:  # it has just ended, or is another user's
                continue
            if marked or (session and int(numbers[2]) == session):
                members.append(int(folder.name))
    return members


def die_with_parent() -> None:
    """Have the kernel kill this multiprocessing child when its parent dies, from whatever cause (Linux only).

    A DataLoader worker checks for its parent only between two samples, so a worker that hangs in a sample would
    otherwise stay forever.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before `prctl`, which then does nothing. `os.getppid()` would not tell: under a fork
    # server the system's parent is the server.
    if not parent.is_alive():
        os._exit(1)


class _Watcher:
    """The writing end of the pipe to this process's watcher, which is started with the first child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe: IO[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def tell(self, line: str) -> None:
        """Send the watcher a line: `+MARK [PID]` for a child, `-MARK` once it was ended, `~FOLDER` to remove later.

        If no watcher can be started (the limit of processes is reached), only this process ends its children.
        """
        with self._lock, suppress(OSError):
            if self._pipe is None:
                self._pipe = self._start()
            self._pipe.write(os.fsencode(line) + b"\n")

    def _start(self) -> IO[bytes]:
        reader, writer = os.pipe()  # Python closes both on exec, so children do not keep the pipe open
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C, or a kill of this process's group, must not reach it
                cwd="/",
            )  # fmt: skip
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        process.returncode = 0  # the watcher ends after us: keep Popen from warning that it still runs
        return os.fdopen(writer, "wb", buffering=0)

    def _forget(self) -> None:
        """Close the pipe in a fork of this process: an open copy would hide this process's death from the watcher."""
        self._lock = threading.Lock()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


_watcher = _Watcher()


def _watch() -> None:
    """Read lines from `_Watcher.tell` until the starting process dies; then kill the children not yet ended.

    Afterwards the scratch folders are removed.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    children: dict[str, int] = {}
    folders: list[str] = []
    for line in sys.stdin.buffer:
        mark, _, pid = os.fsdecode(line).rstrip("\n")[1:].partition(" ")
        if line.startswith(b"~"):
            folders.append(os.fsdecode(line).rstrip("\n")[1:])
        elif line.startswith(b"+"):
            children[mark] = int(pid or 0)
        else:
            children.pop(mark, None)
    for mark, process in children.items():
        if process:
            end_family(mark, process)
        else:
            _end_unknown(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch()
