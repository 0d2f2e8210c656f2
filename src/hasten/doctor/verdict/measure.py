"""Benchmark changes on this machine after a run, on the run's own shapes, so that advice rests on measurements.

`jobs` chooses the changes, a separate process (`measure_process`) times them, and the results go into
`Evidence.measured`, where findings read them.
"""

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

SECONDS = 12.0  # default limit for all changes together
INTERRUPTED = "interrupted"  # why a change could not be tried


def measure(evidence: Evidence, seconds: float = SECONDS) -> tuple[Measurement, ...]:
    """Benchmark the changes that may help a run, before and after in turn, on the run's own layers and sizes.

    Call it after the training has ended (it needs the machine to itself), on the machine that the training ran on, and
    store the result: `dataclasses.replace(evidence, measured=measure(evidence))`. The benchmarks run in a separate
    process with the training's number of threads, so torch is not imported here and a crash does no harm.

    Args:
        evidence: Evidence with `layers`, `optimizers`, `sampled` and the like; without them there is nothing to try.
        seconds: Limit for all changes together, excluding the import of torch. Changes for which no time is left are
            not tried, and their `failed` says so.

    Returns:
        One measurement per change, including failed ones (`failed` says why); empty if nothing is worth trying. Never
        raises.
    """
    return run_jobs(jobs(evidence), "cuda" if on_gpu(evidence) else "cpu", evidence.flags.threads, seconds)


def run_jobs(requested: Sequence[Job], device: str, threads: int, seconds: float) -> tuple[Measurement, ...]:
    """Run jobs in a separate process, one after the other; as `measure`, never raises."""
    if not requested:
        return ()
    request = {
        "device": device,
        "threads": threads,
        "seconds": seconds,
        "jobs": [dataclasses.asdict(job) for job in requested],
    }
    # hasten's settings for the training, such as its taps, must not reach this process. Whether glibc returns freed
    # memory to the kernel depends on the neighbouring allocations of the training, which a trial cannot reproduce. So
    # glibc keeps all memory here, and neither side pays for page faults.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HASTEN_")}
    environment.setdefault("GLIBC_TUNABLES", TUNABLES)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "hasten.doctor.verdict.measure_process"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=seconds + 60.0,  # for the import of torch, and a first call that compiles
            env=environment,
            check=False,
        )
        if process.returncode:
            return _failed(requested, (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
        # The last line only: libraries may print to standard output while they are imported.
        return tuple(Measurement(**fields) for fields in json.loads(process.stdout.splitlines()[-1]))
    except KeyboardInterrupt:  # Ctrl-C ends the benchmarks only: the diagnosis follows without them
        return _failed(requested, INTERRUPTED)
    except subprocess.TimeoutExpired:
        return _failed(requested, f"took longer than {seconds + 60.0:.0f} s")
    except (OSError, ValueError, TypeError, LookupError) as error:  # the diagnosis must not fail for want of benchmarks
        return _failed(requested, f"{type(error).__name__}: {error}")


def _failed(requested: Sequence[Job], reason: str) -> tuple[Measurement, ...]:
    return tuple(Measurement(job.finding, job.what, job.where, calls=job.calls, failed=reason) for job in requested)
