"""/dev/shm is too small for the batches that workers hold ready.

## Why it is slow

Workers pass batches through shared memory. When it is full, the kernel kills them ("bus error"), which ends the
training.

## How it is known

The size of the batches and the capacity of /dev/shm, or how full it was during the run.

## Example

```bash
docker run image python train.py
```

## Use instead

```bash
docker run --shm-size=8g image python train.py
```

## When the repair is safe

Always. `prefetch_factor=1` or fewer workers need less shared memory.

## Source

- PyTorch README, Docker image, --shm-size
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, LoaderFacts, Severity
from hasten.evidence.figures import percent


class SmallShm(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if batches need 80 % of /dev/shm, or if it was 90 % full; HIGH if that ended the run."""
        capacity = evidence.machine.shm_bytes
        used = [loader for loader in evidence.loaders if loader.num_workers and loader.role != "unused"]
        if not capacity or not used:
            return None
        # Loaders are read in turn: the workers of the others are idle or gone, so only the largest loader counts.
        worst = max(used, key=_held)
        needed, peak_bytes = _held(worst), max(evidence.used.shm, default=0)
        died = "bus error" in evidence.error.lower() or "shared memory" in evidence.error.lower()
        if needed < 0.8 * capacity and peak_bytes < 0.9 * capacity and not died:
            return None
        ready = worst.num_workers * (worst.prefetch_factor or 2)
        peak = f"; it was {percent(min(1.0, peak_bytes / capacity))} full" if peak_bytes else ""
        return cls.finding(
            f"{worst.num_workers} workers hold up to {ready} batches of {worst.batch_bytes / 2**20:.1f} MiB ready, "
            f"{needed / 2**20:.0f} MiB, in a /dev/shm of {capacity / 2**20:.0f} MiB{peak}",
            f"enlarge it (docker run --shm-size={max(1, round(2 * needed / 2**30))}g, or --ipc=host), or set "
            "prefetch_factor=1",
            Severity.HIGH if died else Severity.MEDIUM,
            place=worst.where,
            details=(f"the training ended with: {evidence.error}",) if died else (),
        )


def _held(loader: LoaderFacts) -> int:
    """Return the bytes of the batches that a loader's workers hold ready."""
    return loader.num_workers * (loader.prefetch_factor or 2) * loader.batch_bytes
