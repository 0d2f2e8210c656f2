"""How a script ended, in words, and evidence of one that left none."""

from __future__ import annotations

import signal

from hasten.evidence import Evidence, Flags, this_machine


def how_it_ended(code: int | None, late: bool) -> str:
    """How a process ended; "" if well.

    Args:
        code: As `Popen` gives it; None where it was ended from here.
        late: It had to be, since it did not answer.
    """
    if late:
        return "ended by hasten: it did not answer"
    if code is None or code == 0:
        return ""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    """What people call it."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def nothing_heard(command: tuple[str, ...], ended: str, began: float, seconds: float) -> Evidence:
    """Evidence of a run of which nothing is known but how and when it ended.

    Args:
        command: The training's own command line.
        ended: How, in words; "" if well.
        began: When, by `time.perf_counter`.
        seconds: How long it took.
    """
    return Evidence(
        command=command,
        machine=this_machine(),
        flags=Flags(),
        loaders=(),
        models=(),
        optimizers=(),
        step_start=(),
        step_phases=(),
        losses=(),
        validations=(),
        passes=(),
        step_of="batch",
        ended="failed" if ended else "finished",
        ended_at=seconds,
        error=ended,
        origin=began,
        listened="doctor",
    )
