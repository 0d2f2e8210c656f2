"""Describe how a script ended, make evidence for a run that left none, and say why a loader was not measured."""

from __future__ import annotations

import signal

from hasten.errors import HastenError
from hasten.evidence import Evidence, Flags, this_machine

TRAINS_WITHOUT_LOADER = "the script trains without drawing from a DataLoader"


def how_it_ended(code: int | None, hung: bool) -> str:
    """Return how a process ended, in words; "" if it exited with 0 or was ended by doctor as planned.

    Args:
        code: Its exit code from `Popen`; None if doctor ended it.
        hung: Doctor had to end it, because it did not respond.
    """
    if hung:
        return "ended by hasten: it did not answer"
    if code is None or code == 0:
        return ""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def signal_name(number: int) -> str:
    """Return a signal's usual name, such as "SIGTERM"; "Ctrl-C" for SIGINT."""
    if number == signal.SIGINT:
        return "Ctrl-C"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def evidence_without_report(command: tuple[str, ...], ended: str, started: float, seconds: float) -> Evidence:
    """Return evidence of a run that reported nothing: only how and when it ended.

    Args:
        command: The training's own command line.
        ended: How it ended, in words; "" if well.
        started: When it began, by `time.perf_counter`.
        seconds: How long it ran.
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
        origin=started,
        listened="doctor",
    )


def no_loader_measured(evidence: Evidence, stopped: bool, patience: float) -> HastenError:
    """Return the error that says why `hasten doctor --loader` measured no loader.

    Args:
        evidence: Evidence of the run in which the loader was to be measured.
        stopped: Whether Ctrl-C or another signal stopped the run.
        patience: Seconds that the script had to begin training.
    """
    bench, error = evidence.loader_bench, evidence.error
    built = "; ".join(f"{facts.where} ({facts.dataset}, {facts.samples or '?'} samples)" for facts in evidence.loaders)
    if stopped:
        missed = "the first number of workers was measured" if bench else "the script began to train"
        return HastenError(f"stopped before {missed}", code=130)
    if bench is not None:
        return HastenError(f"the loader of {bench.loader.where} could not be measured", "; ".join(bench.notes) or error)
    if error.startswith(TRAINS_WITHOUT_LOADER):
        loaders = f"; those it built: {built}" if built else "; it builds none"
        return HastenError(error + loaders, "there is no loader to measure; `hasten doctor` says where its time goes")
    if error:
        pickled = "workers that are spawned get a pickled dataset: keep lambdas and open files out of it"
        return HastenError(f"the script ended before its first training step: {error}", pickled * ("pickle" in error))
    if evidence.ended == "complete":
        return HastenError(f"no training step began within {patience:.0f} s", "--patience gives it longer")
    if built:
        return HastenError(
            f"the script ended without a training step on a DataLoader's batch; it built: {built}",
            "does it train with these arguments? A loader counts from the first backward on",
        )
    return HastenError("the script ended without building a DataLoader or training")
