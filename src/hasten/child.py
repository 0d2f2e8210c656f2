"""Start a process so that nothing of it outlives this one, and end it with all that it has started.

A child gets a session of its own and a mark in its environment, which all that it starts inherits. A watcher, a small
process per hasten process, holds one end of a pipe: when this process is gone, whatever it died of, the pipe closes,
and the watcher ends every process with the mark of a child that had not been ended. Run by its path, this file is that
watcher; so it imports nothing but the standard library.
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

_ABOUT_TO_START = 0.2  # seconds within which a process that was forked bears its mark
_UNTIL_GONE = 5.0  # seconds after which a process that SIGKILL does not end (in a broken file system) is given up


class Child:
    """A process, with all that it starts, which does not outlive this one.

    Args:
        arguments: Its command line.
        env: Its environment.
        options: For `subprocess.Popen`.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        self._mark = _MARK + secrets.token_hex(8)
        _watcher.tell(f"+{self._mark}")  # before it starts, so that there is no moment without
        try:
            self.process = subprocess.Popen(arguments, env={**env, self._mark: "1"}, start_new_session=True, **options)
        except OSError:
            _watcher.tell(f"-{self._mark}")
            raise
        except BaseException:  # a Ctrl-C, which may come when it has been started already
            _end_unknown(self._mark)
            _watcher.tell(f"-{self._mark}")
            raise
        self.pid = self.process.pid
        _watcher.tell(f"+{self._mark} {self.pid}")

    def wait(self, seconds: float | None = None) -> int | None:
        """Return its exit code, -N after signal N; None if it still runs after so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, patience: float = PATIENCE) -> None:
        """End it and all that it started: asked with SIGTERM, and after `patience` seconds with SIGKILL."""
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
    """Start a child that prints to `log` and reads nothing.

    Raises:
        HastenError: It cannot be started.
    """
    from hasten.errors import HastenError  # not above: the watcher runs this file without hasten

    try:
        return Child(arguments, env, stdin=stdin, stdout=log, stderr=log)
    except OSError as error:
        raise HastenError(f"cannot start {arguments[0]}: {error.strerror or error}") from None


def running_for() -> float:
    """Return the seconds since this process was started; its CPU seconds where the system does not tell that."""
    try:
        started = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return time.process_time()


def how_it_ended(code: int) -> str:
    """Return an exit code as `Popen` gives it in words: "exit code 1", "signal SIGSEGV"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def end_family(mark: str, pid: int) -> None:
    """Kill a child that has this mark, and all that it started; returns when none is left."""
    end = time.monotonic() + _UNTIL_GONE
    while time.monotonic() < end:
        with suppress(ProcessLookupError, PermissionError):
            if pid:
                os.killpg(pid, signal.SIGKILL)
        left = family(mark, pid)
        if not left:
            return
        for member in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.02)  # one that was being forked meanwhile is seen in the next round


@contextmanager
def scratch_folder(prefix: str = "hasten-", within: Path | None = None) -> Iterator[Path]:
    """Make a folder for temporary files; it is removed at the end, also where SIGKILL ends this process."""
    import tempfile  # which the watcher does not need

    with tempfile.TemporaryDirectory(prefix=prefix, dir=within, ignore_cleanup_errors=True) as folder:
        _watcher.tell(f"~{folder}")
        yield Path(folder)


@contextmanager
def ended_with_us(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Give an environment to a process that is no `Child`: what has it when this process is killed is ended, too."""
    mark = _MARK + secrets.token_hex(8)
    _watcher.tell(f"+{mark}")
    try:
        yield {**env, mark: "1"}
    finally:
        _watcher.tell(f"-{mark}")


def _end_unknown(mark: str) -> None:
    """Kill a child of which nobody knows yet whether it was started."""
    end_family(mark, 0)
    time.sleep(_ABOUT_TO_START)
    end_family(mark, 0)


def family(mark: str, session: int = 0) -> list[int]:
    """Return the processes that live and have a mark in their environment, or belong to a session.

    Empty where there is no /proc: there the process group is all that is known.
    """
    found = []
    with suppress(OSError):
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                state, *numbers = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if state in (b"Z", b"X"):
                    continue
                marked = mark.encode() in (folder / "environ").read_bytes()
            except OSError:  # gone meanwhile, or somebody else's
                continue
            if marked or (session and int(numbers[2]) == session):
                found.append(int(folder.name))
    return found


def die_with_parent() -> None:
    """Have the kernel kill this process, started by multiprocessing, when its parent dies, whatever of (Linux only).

    A loader's worker looks for its parent between two samples, so one that hangs in a sample would stay for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not parent.is_alive():  # it died before this process said so; under a fork server it is not our parent's number
        os._exit(1)


class _Watcher:
    """This process's end of the pipe to its watcher, which is started with the first child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe: IO[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def tell(self, line: str) -> None:
        """Tell the watcher of a child; without one (no more processes allowed) children are ended from here only."""
        with self._lock, suppress(OSError):
            if self._pipe is None:
                self._pipe = self._start()
            self._pipe.write(os.fsencode(line) + b"\n")

    def _start(self) -> IO[bytes]:
        reader, writer = os.pipe()  # neither is inherited by what is executed
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
        process.returncode = 0  # nobody waits for it: it ends after us
        return os.fdopen(writer, "wb", buffering=0)

    def _forget(self) -> None:
        """A fork of this process must not keep the pipe open."""
        self._lock = threading.Lock()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


_watcher = _Watcher()


def _watch() -> None:
    """Read of children, one a line, until the process that started them is gone; then end what is left of them."""
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
