"""Record the stacks of a running Python process with py-spy, an optional tool (`pip install 'hasten[flame]'`)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from hasten.evidence.libraries import is_library

_RATE = 200  # samples per second
_GRACE = 10.0  # seconds that py-spy may take beyond the recording
# Frames above which (outside of which) all is process start: a worker's loop, and the bench's in the main process.
_BEGINS = re.compile(r"(_worker_loop \(torch|_Bench\._record_stacks \(hasten)")
# Innermost frames of a process that only waits, such as a worker for its next indices.
_WAITS = re.compile(r"^[\w.]*\b_?(wait|accept|select|poll) \((threading|socket|selectors|multiprocessing/\w+)\.py")

_FRAME = re.compile(r"^\s+\S.* \((?P<file>[^()]+):(?P<line>\d+)\)$")


def record(pid: int, seconds: float, out: Path) -> tuple[str, str]:
    """Record a process's stacks.

    Args:
        pid: The process.
        seconds: How long to record, at least 1.
        out: A file for py-spy to write to.

    Returns:
        The folded stacks ("outer;inner 12" per line) and a note on what they show; or "" and why there are none.
    """
    program = _py_spy()
    if program is None:
        return "", "no flame graph: py-spy is not there; pip install 'hasten[flame]'"
    duration = str(max(1, round(seconds)))
    command = [program, "record", "-f", "raw", "-r", str(_RATE), "-d", duration, "-o", str(out), "-p", str(pid)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds + _GRACE, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no flame graph: py-spy did not end within {seconds + _GRACE:.0f} s"
    except OSError as error:
        return "", f"no flame graph: {program}: {error.strerror}"
    stacks = loading_stacks(out.read_text(errors="replace")) if out.is_file() else ""
    if stacks:
        return stacks, f"{_RATE} samples per second of a process that only loads, while it was not waiting (py-spy)"
    output = " ".join((process.stderr or process.stdout).split())
    if any(word in output.lower() for word in ("permission", "operation not permitted", "ptrace", "root")):
        return "", (
            "no flame graph: this system does not let py-spy look into another process (ptrace). In a container: "
            "docker run --cap-add SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=0, or run hasten as root"
        )
    return "", f"no flame graph: py-spy saw nothing{f': {output[-200:]}' if output else ''}"


def loading_stacks(stacks: str) -> str:
    """Return only the folded stacks in which batches are made or passed on, without the frames of process start.

    >>> loading_stacks("main (a.py:1);_worker_loop (torch/utils/data/_utils/worker.py:3);fetch (b.py:2) 7")
    'fetch (b.py:2) 7'
    """
    folded = []
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        if not frames[-1] or _WAITS.match(frames[-1]):
            continue
        begins = max((index for index, frame in enumerate(frames[:-1]) if _BEGINS.search(frame)), default=-1)
        folded.append(f"{';'.join(frames[begins + 1 :])} {count}")
    return "\n".join(folded)


def script_line_of(pid: int) -> str:
    """Return `file:line` of the script's innermost frame in a process's main thread; "" if that is unknown."""
    program = _py_spy()
    if program is None:
        return ""
    command = [program, "dump", "--full-filenames", "--nonblocking", "--pid", str(pid)]
    try:
        dump = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    main = dump.partition('"MainThread"')[2].split("\nThread ")[0]
    frames = [match for command in main.splitlines() if (match := _FRAME.match(command))]
    script_frames = [match for match in frames if not (match["file"].startswith("<") or is_library(match["file"]))]
    return f"{script_frames[0]['file']}:{script_frames[0]['line']}" if script_frames else ""


def _py_spy() -> str | None:
    """Return py-spy's path: beside this Python, or found on PATH; None without it."""
    bundled = Path(sys.executable).with_name("py-spy")
    return str(bundled) if bundled.is_file() else shutil.which("py-spy")
