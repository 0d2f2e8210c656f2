"""Advice is measured: changes tried on this machine, after the run, on the very shapes that the run had."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from hasten.doctor.verdict.jobs import jobs
from hasten.doctor.verdict.measure_cases import Job
from hasten.evidence import Evidence, Measurement
from hasten.evidence.weigh import on_gpu
from hasten.techniques.memory.allocator import TUNABLES

SECONDS = 12.0

INTERRUPTED = "interrupted"  # why a change could not be tried


def measure(evidence: Evidence, seconds: float = SECONDS) -> tuple[Measurement, ...]:
    """Try what may help the run that left this evidence, before and after in turn, on its own layers and sizes.

    Call it once the training is over (it needs the machine to itself) and on the machine that it ran on, and keep
    what it gives: `dataclasses.replace(evidence, measured=measure(evidence))`; findings read it there. It works in a
    process of its own, with the threads the training had, so torch is not imported here and a crash harms nobody.

    Args:
        evidence: With `layers`, `optimizers`, `sampled` and the like; without them there is nothing to try.
        seconds: For all of it, the import of torch left out; what finds no time is left out and said.

    Returns:
        One a change, those that failed too (`failed` says why). Empty where nothing is worth trying. Never raises.
    """
    return in_turn(jobs(evidence), "cuda" if on_gpu(evidence) else "cpu", evidence.flags.threads, seconds)


def in_turn(wanted: Sequence[Job], device: str, threads: int, seconds: float) -> tuple[Measurement, ...]:
    """Run jobs in a process of their own."""
    if not wanted:
        return ()
    asked = {
        "device": device,
        "threads": threads,
        "seconds": seconds,
        "jobs": [dataclasses.asdict(job) for job in wanted],
    }
    # The training's own settings must not reach it: taps and the like. Whether glibc gives freed memory back is a
    # matter of what lies beside it, which a trial cannot repeat: it keeps all of it, so that none pays page faults.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HASTEN_")}
    environment.setdefault("GLIBC_TUNABLES", TUNABLES)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "hasten.doctor.verdict.measure_process"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=seconds + 60.0,  # for the import of torch, and a first call that compiles
            env=environment,
            check=False,
        )
        if ran.returncode:
            return _failed(wanted, (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1])
        return tuple(Measurement(**one) for one in json.loads(ran.stdout.splitlines()[-1]))
    except KeyboardInterrupt:  # who does not want to wait is told what was found without it
        return _failed(wanted, INTERRUPTED)
    except subprocess.TimeoutExpired:
        return _failed(wanted, f"took longer than {seconds + 60.0:.0f} s")
    except (OSError, ValueError, TypeError, LookupError) as error:  # it must not spoil the diagnosis
        return _failed(wanted, f"{type(error).__name__}: {error}")


def _failed(wanted: Sequence[Job], why: str) -> tuple[Measurement, ...]:
    return tuple(Measurement(job.finding, job.what, job.where, calls=job.calls, failed=why) for job in wanted)
