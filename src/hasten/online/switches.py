"""The schedule of switches that `hasten run --auto` writes: one JSON object per line. No torch.

The first line identifies the file. Each further line says which techniques were on from some place in the training,
given as the number of steps and of training passes completed. The same run, switched at the same places, gives the same
numbers: that is what `--replay` does.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.errors import HastenError
from hasten.files import parse_json, read_bytes
from hasten.plan import Plan, Setting
from hasten.techniques import check

_KIND = "hasten-schedule"
_FIX = "name the file that `hasten run --auto` wrote"


@dataclass(frozen=True)
class RecordedSwitch:
    """One switch of techniques.

    Attributes:
        step: Number of steps completed before it.
        passes: Number of training passes completed before it.
        on: Techniques that were on from there: name -> setting.
    """

    step: int
    passes: int
    on: Mapping[str, Setting]


class Schedule:
    """Writes the schedule of a run, each switch before it is made. If a write fails, the file is left empty.

    Args:
        path: The file, which must not exist.
        command: The training's command line.
        process: Result of `process_of` for this process; None if any process may repeat the run.

    Raises:
        FileExistsError: Another process writes this file.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str, command: Sequence[str], process: Sequence[str] | None = None) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._identity = _identity(os.fstat(self._file))
        head: dict[str, object] = {"schema": f"{_KIND}/1", "command": list(command)}
        self._write(head if process is None else {**head, "process": list(process)})

    def write(self, switched: RecordedSwitch) -> None:
        """Append a switch."""
        self._write({"step": switched.step, "passes": switched.passes, "on": dict(switched.on)})

    def _write(self, data: dict[str, object]) -> None:
        remaining = (json.dumps(data) + "\n").encode()
        try:
            # A script may close all descriptors that it does not know (`os.closerange(3, 256)`) and open files of its
            # own: then this descriptor may belong to one of those.
            if _identity(os.fstat(self._file)) != self._identity:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            while remaining:  # a nearly full disk accepts only part of a write
                remaining = remaining[os.write(self._file, remaining) :]
        except OSError:
            # A replay would keep the last written set on, while this run continues with all off: better no replay.
            if _identity(Path(self._path).stat()) == self._identity:
                os.truncate(self._path, 0)
            raise


def process_of(root: int) -> list[str]:
    """Return what identifies this process among those of its run, the same in each repetition.

    Args:
        root: Process id of the first process, which `hasten run` became by exec.

    Returns:
        [] for the first process; for others, their arguments.
    """
    if os.getpid() == root:
        return []
    # Ranks are switched together, but DeepSpeed's launcher passes each its number as an argument: leave that out.
    return [argument for argument in sys.orig_argv[1:] if not argument.startswith(("--local_rank", "--local-rank"))]


def process_in(path: Path) -> list[str] | None:
    """Return the process that wrote a schedule, as `process_of` returned it; None if any process may repeat it."""
    process = parse_json(read_bytes(path).partition(b"\n")[0]).get("process")
    return [str(argument) for argument in process] if isinstance(process, list) else None


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino


def is_schedule(content: bytes) -> bool:
    """Return whether this is the content of a schedule that hasten wrote."""
    try:
        head = parse_json(content.partition(b"\n")[0])
    except ValueError:
        return False
    return isinstance(head, dict) and str(head.get("schema", "")).partition("/")[0] == _KIND


def read_schedule(path: Path, say: Callable[[str], None] | None = None) -> list[RecordedSwitch]:
    """Read a schedule. Drop a half-written last line, which a killed run leaves, and call `say` with a note.

    Raises:
        HastenError: The file cannot be read, is not a schedule, or names techniques or settings that do not exist.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        raise HastenError(f"cannot read the schedule {path}: {error.strerror or error}", _FIX) from None
    if not is_schedule(content):
        raise HastenError(f"{path} is no schedule of switches", _FIX)
    end = content.rfind(b"\n") + 1
    lines = content[:end].splitlines()
    if content[end:] and say is not None:
        say(f"replay: the last line of {path} is half a line, of a switch that was never made: it is dropped")
    return [_parse_switch(line, f"{path}:{number}") for number, line in enumerate(lines[1:], 2)]


def _parse_switch(line: bytes, location: str) -> RecordedSwitch:
    try:
        data = parse_json(line)
        switch = RecordedSwitch(int(data["step"]), int(data["passes"]), dict(data["on"]))
    except (ValueError, TypeError, KeyError):
        raise HastenError(f"{location}: no line of a schedule", _FIX) from None
    check(Plan(switch.on, path=Path(location)))
    return switch
