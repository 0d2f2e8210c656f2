"""The schedule of switches of a run that was tuned while it went on: a JSON object a line. No torch.

The first line says what the file is. Each further one says what was on from a place in the training on: behind so many
steps and so many passes that trained. The same run, switched at the same places, gives the same numbers.
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
_ELSE = "name the file that `hasten run --auto` wrote"


@dataclass(frozen=True)
class Switched:
    """A switch.

    Attributes:
        step: Steps that were over.
        passes: Passes through loaders that trained and were over.
        on: What was on from there on: name -> setting.
    """

    step: int
    passes: int
    on: Mapping[str, Setting]


class Schedule:
    """Writes one, each switch before it is made. One that cannot be written to its end is left empty.

    Args:
        path: The file; there is none yet.
        command: The training's command line.
        process: What `process_of` says of this process; None where it does not matter who repeats the run.

    Raises:
        FileExistsError: Another process writes it.
        OSError: It cannot be written.
    """

    def __init__(self, path: str, command: Sequence[str], process: Sequence[str] | None = None) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._identity = _identity(os.fstat(self._file))
        head: dict[str, object] = {"schema": f"{_KIND}/1", "command": list(command)}
        self._write(head if process is None else {**head, "process": list(process)})

    def write(self, switched: Switched) -> None:
        """Write one, whole."""
        self._write({"step": switched.step, "passes": switched.passes, "on": dict(switched.on)})

    def _write(self, data: dict[str, object]) -> None:
        left = (json.dumps(data) + "\n").encode()
        try:
            # A script may close all files that it does not know (`os.closerange(3, 256)`), and then open its own: the
            # descriptor is one of those.
            if _identity(os.fstat(self._file)) != self._identity:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            while left:  # a disk that is nearly full takes a part
                left = left[os.write(self._file, left) :]
        except OSError:
            # What is on here would stay on in a replay, where this run goes on without: no replay is better.
            if _identity(Path(self._path).stat()) == self._identity:
                os.truncate(self._path, 0)
            raise


def process_of(root: int) -> list[str]:
    """Return what tells this process from others of its run, in each repetition: its arguments; [] for the first one.

    Args:
        root: Process id of the first, which `hasten run` became.
    """
    if os.getpid() == root:
        return []
    # DeepSpeed's launcher gives ranks, which are switched together, a number among their arguments.
    return [word for word in sys.orig_argv[1:] if not word.startswith(("--local_rank", "--local-rank"))]


def process_in(path: Path) -> list[str] | None:
    """Return the process that wrote a schedule, as `process_of` told it; None where it does not matter."""
    process = parse_json(read_bytes(path).partition(b"\n")[0]).get("process")
    return [str(word) for word in process] if isinstance(process, list) else None


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino


def is_schedule(content: bytes) -> bool:
    """Whether this is a schedule that hasten wrote."""
    try:
        head = parse_json(content.partition(b"\n")[0])
    except ValueError:
        return False
    return isinstance(head, dict) and str(head.get("schema", "")).partition("/")[0] == _KIND


def read_schedule(path: Path, say: Callable[[str], None] | None = None) -> list[Switched]:
    """Read one; a last line that a run which was killed left half written is none: `say` is told.

    Raises:
        HastenError: It cannot be read, is none, or names what this hasten does not know.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        raise HastenError(f"cannot read the schedule {path}: {error.strerror or error}", _ELSE) from None
    if not is_schedule(content):
        raise HastenError(f"{path} is no schedule of switches", _ELSE)
    end = content.rfind(b"\n") + 1
    whole = content[:end].splitlines()
    if content[end:] and say is not None:
        say(f"replay: the last line of {path} is half a line, of a switch that was never made: it is dropped")
    return [_switched(line, f"{path}:{number}") for number, line in enumerate(whole[1:], 2)]


def _switched(line: bytes, where: str) -> Switched:
    try:
        data = parse_json(line)
        read = Switched(int(data["step"]), int(data["passes"]), dict(data["on"]))
    except (ValueError, TypeError, KeyError):
        raise HastenError(f"{where}: no line of a schedule", _ELSE) from None
    check(Plan(read.on, path=Path(where)))
    return read
