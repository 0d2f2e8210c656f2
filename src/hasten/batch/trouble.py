"""Explain why a training does not fit if its own tensors are not the reason: imports, loader workers, a leak."""

from __future__ import annotations

import subprocess
import sys

from hasten.batch.attempt import Attempt
from hasten.errors import HastenError

_LARGE_SHARE = 0.3  # share of the peak above which workers are named
_IMPORT = """
import torch
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) * 1024)
"""


def torch_needs() -> int:
    """Return the bytes that a Python process takes to import torch here; 0 if that cannot be measured."""
    process = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=120, check=False)
    return int(process.stdout) if process.stdout.strip().isdecimal() else 0


def below_torch(attempt: Attempt, limit: int, limit_text: str) -> HastenError | None:
    """Return the error for a limit too small to import torch; None if that was not the reason.

    Args:
        attempt: The attempt that may have run out of memory.
        limit: Bytes that it was allowed.
        limit_text: The limit, as named to the user.
    """
    if attempt.outcome != "out of memory" or attempt.stage != "start":
        return None
    needs = torch_needs()
    if needs < limit:
        return None
    return HastenError(
        f"{limit_text} is less than `import torch` takes here: {needs / 1e6:.0f} MB, before a script has done anything",
        f"allow more: --memory {-(-2 * needs // 10**8) * 100}MB leaves a small training some room",
    )


def what_holds_it(attempt: Attempt) -> list[str]:
    """Return lines on what took an attempt's memory besides what the training computes with."""
    lines = []
    if attempt.workers > _LARGE_SHARE * attempt.peak:
        lines.append(
            f"worker processes of its loaders hold {attempt.workers / 1e6:.0f} of {attempt.peak / 1e6:.0f} MB: give the"
            " loader a smaller num_workers or prefetch_factor, or a dataset that each worker does not copy"
        )
    elif attempt.stage in ("start", "loading") and attempt.outcome == "out of memory":
        lines.append(
            "it ran out before the first forward: the script's own data and model take it, and no technique acts there"
        )
    if attempt.grows:
        lines.append(rise_in_words(attempt.grows))
    return lines


def rise_in_words(grows: float, free: int = 0) -> str:
    """Return a sentence on memory that rises with each step.

    Args:
        grows: Bytes per step.
        free: Bytes left above the peak; 0: none.
    """
    until = f", which fills what is left in about {max(1, round(free / grows))} steps" if free > 0 else ""
    return (
        f"memory rises by {grows / 1e6:.1f} MB with each step{until}: a leak, or data that is kept; `hasten doctor`"
        " names the line (memory_creep, retained_graph)"
    )
