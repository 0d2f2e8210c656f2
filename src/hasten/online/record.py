"""The record of a tuned process: blocks and events, one JSON object per line, so a crash loses nothing. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hasten.evidence.plain import tuples


@dataclass(frozen=True)
class MeasuredBlock:
    """Measured block.

    Attributes:
        began: Moment (`time.monotonic`) at which its first measured step began.
        seconds: Total seconds of its measured steps.
        steps: Number of measured steps.
        on: Indices of the candidates that were on.
        part: "baseline", "all on", "search", "compile", "plain" or "plan" (the two sides of the claim).
        phases: Mean seconds of each phase of a step.
        trouble: Why it does not count; "" if it does.
        taken: Share of the CPU that other processes took, from 0 to 1; None if that cannot be seen.
        disturbed: Whether that may have changed its pace: see `hasten.online.cpu_contention`.
    """

    began: float
    seconds: float
    steps: int
    on: tuple[int, ...]
    part: str
    phases: tuple[float, ...] = ()
    trouble: str = ""
    taken: float | None = None
    disturbed: bool = False

    @property
    def step_seconds(self) -> float:
        """Mean seconds per step."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class Event:
    """Something that happened between blocks.

    Attributes:
        kind: "switch" (`on` is about to be switched on; a crash after it is blamed on what is new), "broken" (these
            candidates are off for good), "alone" (these leave the training alone, and are off too), "chosen" (the
            plan), "compiled" (`seconds` is what it cost), "validated" (`seconds` per batch of validation), "over".
        on: Indices of the candidates concerned.
        seconds: Duration, if there is one.
        text: Details.
    """

    kind: str
    on: tuple[int, ...] = ()
    seconds: float = 0.0
    text: str = ""


class BlockWriter(Protocol):
    """Receiver of blocks and events."""

    def write(self, entry: MeasuredBlock | Event) -> None:
        """Take a block or an event."""


class Record:
    """Appends blocks and events to a file.

    Args:
        path: The file; created if it does not exist.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, entry: MeasuredBlock | Event) -> None:
        """Append one line, in a single write."""
        data = {"is": type(entry).__name__, **dataclasses.asdict(entry)}
        os.write(self._file, (json.dumps(data) + "\n").encode())


def read(path: Path, offset: int = 0) -> tuple[list[MeasuredBlock | Event], int]:
    """Return the entries after `offset`, and the offset to continue from. An incomplete last line is left for later."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], offset
    complete = content[: content.rfind(b"\n") + 1]
    return [_parse(tuples(json.loads(line))) for line in complete.splitlines()], offset + len(complete)


def _parse(data: dict[str, Any]) -> MeasuredBlock | Event:
    return MeasuredBlock(**data) if data.pop("is") == MeasuredBlock.__name__ else Event(**data)
