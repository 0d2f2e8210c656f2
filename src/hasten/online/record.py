"""The record that a process leaves while it is tuned: a JSON object a line, so that a crash loses nothing. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hasten.evidence.plain import tuples


@dataclass(frozen=True)
class Measured:
    """A block that is over.

    Attributes:
        began: Moment (`time.monotonic`) at which its first measured step began.
        seconds: Of its measured steps.
        steps: How many they are.
        on: Indices of the candidates that were on.
        part: "baseline", "all on", "search", "compile", "plain" or "plan" (the two sides of the claim).
        phases: Mean seconds of each phase of a step.
        trouble: Why it does not count; "" for a good one.
        taken: Share of the CPU that others took meanwhile, from 0 to 1; None where that cannot be seen.
        disturbed: Whether its pace may be due to that: see `hasten.online.cpu_contention`.
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
        """Mean seconds of a step."""
        return self.seconds / self.steps


@dataclass(frozen=True)
class Event:
    """Something else that happened.

    Attributes:
        kind: "switch" (about to have `on` on; a crash behind it is blamed on what is new), "broken" (these
            candidates are off for good), "alone" (they leave this training alone, and are off too), "chosen" (the
            plan), "compiled" (`seconds` is what it cost), "validated" (`seconds` a batch of validation), "over".
        on: Indices of the candidates it is about.
        seconds: If it took time.
        text: What else there is to say.
    """

    kind: str
    on: tuple[int, ...] = ()
    seconds: float = 0.0
    text: str = ""


class Writes(Protocol):
    """Takes blocks and events as they come."""

    def write(self, one: Measured | Event) -> None:
        """Take one."""


class Record:
    """Writes them.

    Args:
        path: The file; it is added to.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, one: Measured | Event) -> None:
        """Write one, whole."""
        data = {"is": type(one).__name__, **dataclasses.asdict(one)}
        os.write(self._file, (json.dumps(data) + "\n").encode())


def read(path: Path, offset: int = 0) -> tuple[list[Measured | Event], int]:
    """Read what was written behind `offset`; and where to go on. A last line that is not whole is left for later."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    return [_of(tuples(json.loads(line))) for line in whole.splitlines()], offset + len(whole)


def _of(data: dict[str, Any]) -> Measured | Event:
    return Measured(**data) if data.pop("is") == "Measured" else Event(**data)
