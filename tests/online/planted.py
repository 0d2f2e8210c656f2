"""Techniques that help, harm, crash, hang or spoil a training, for scripts that wait as long as they are told.

The scripts wait in each forward for the sum of `torch.waits`: so much of a step a planted technique can save or add,
whatever else the machine does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import Call, Choices, Effect, Liveness, Resource, Technique


class _Planted(Technique):
    relieves = Resource.COMPUTE
    effect = Effect.EXACT
    liveness = Liveness.STEP
    wait = 0.0  # seconds that it adds to a step

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices:
        """It applies everywhere."""
        return Choices((True,), "it was planted")

    def process(self) -> None:
        self.on()

    def on(self) -> None:
        super().on()
        _waits()[self.name] = self.wait

    def off(self) -> None:
        super().off()
        _waits().pop(self.name, None)


class Helps(_Planted):
    """Saves half of the wait."""

    name = "helps"
    wait = -0.006


class HelpsLittle(_Planted):
    """Saves a fifth of the wait."""

    name = "helps_little"
    wait = -0.0025


class Harms(_Planted):
    """Adds half of the wait."""

    name = "harms"
    wait = 0.006


class RoundsAndHarms(Harms):
    """The same, as a technique that rounds."""

    name = "rounds_and_harms"
    effect = Effect.ROUNDING


class Compiles(Helps):
    """Saves half of the wait, and is tried last, on top of what won."""

    name = "compiles"
    liveness = Liveness.LAST


class CannotBeSwitchedOn(_Planted):
    """Fails when it is switched on."""

    name = "cannot_be_switched_on"

    def on(self) -> None:
        raise RuntimeError("planted: not on this machine")


class DiesWhenSwitchedOn(_Planted):
    """Takes the process down when it is switched on."""

    name = "dies_when_switched_on"

    def on(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class FailsInAPass(_Planted):
    """Fails where it should act, in the pass that begins; until then it seemed to work."""

    name = "fails_in_a_pass"
    liveness = Liveness.PASS

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        raise RuntimeError("planted: not with this loader")


class LeavesAlone(_Planted):
    """Leaves every model alone, and says why."""

    name = "leaves_alone"

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        self.refused("planted: not with this model")


class _InForward(_Planted):
    """Acts in the sixth forward in which it is on."""

    wait = -0.004  # it would help, if it only worked

    def forward(self, call: Call) -> Call:
        count = [0]

        def acting(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            count[0] += 1
            out = call(module, args, kwargs)
            return self.act(out) if count[0] > 5 else out

        return acting

    def act(self, out: Any) -> Any:
        raise NotImplementedError


class CrashesInABlock(_InForward):
    """Raises in the middle of a block."""

    name = "crashes_in_a_block"

    def act(self, out: Any) -> Any:
        raise RuntimeError("planted: in the middle of it")


class HangsInABlock(_InForward):
    """Never comes back."""

    name = "hangs_in_a_block"

    def act(self, out: Any) -> Any:
        time.sleep(600)
        return out


class TurnsToNan(_InForward):
    """The loss turns to NaN, and with it the weights."""

    name = "turns_to_nan"

    def act(self, out: Any) -> Any:
        return out * float("nan")


TECHNIQUES = (
    Helps,
    HelpsLittle,
    Harms,
    RoundsAndHarms,
    Compiles,
    CannotBeSwitchedOn,
    FailsInAPass,
    LeavesAlone,
    DiesWhenSwitchedOn,
    CrashesInABlock,
    HangsInABlock,
    TurnsToNan,
)


def _waits() -> dict[str, float]:
    import torch

    if not hasattr(torch, "waits"):
        torch.waits = {"script": 0.012}  # type: ignore[attr-defined]
    return torch.waits  # type: ignore[attr-defined, no-any-return]


def register() -> None:
    """Put them into this process's catalogue."""
    from hasten.techniques import CATALOGUE

    CATALOGUE.update({technique.name: technique for technique in TECHNIQUES})


def site(folder: Path, waiting: bool = False) -> str:
    """The PYTHONPATH under which every Python process knows them; what it needs is written into a folder.

    Args:
        folder: Where that is written.
        waiting: Steps are measured by the clock of `waiting.py`.
    """
    root = Path(__file__).resolve().parents[2]
    clock = "from tests.online import waiting\nwaiting.start()\n" if waiting else ""
    # By its path: a package `tests` may be installed elsewhere, too.
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(root)!r})\n{clock}from tests.online import planted\n"
        f"sys.path.remove({str(root)!r})\nplanted.register()\n"
    )
    return str(folder)
