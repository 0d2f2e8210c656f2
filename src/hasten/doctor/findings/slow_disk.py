"""The training waits for a slow disk, such as a spinning disk or a network file system.

## Why it is slow

Each small file costs a seek or a network round trip, 5 to 20 ms, whatever its size.

## How it is known

The wait for batches, the measured share of reading in their time (or else the time that the CPU waited for disks), and
the type of storage that holds the data.

## Example

```bash
python train.py --data /mnt/nfs/images
```

## Use instead

```bash
cp -r /mnt/nfs/images /local/ssd/ && python train.py --data /local/ssd/images
```

## When the repair is safe

Always. Where the data does not fit on the local disk, a few large files (Parquet, tar shards) need fewer seeks.

## Source

- Lin, move the active data to the SSD
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.disks import is_network
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, faster_loading, mean_during, stages_of

_READING = 1e6  # bytes per second from which a disk counts as being read
_BLOCKED = 0.3  # least share of a batch's time, or of one core, spent waiting for the disk


class SlowDisk(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the step waits for data that a network file system or a slow disk delivers."""
        loader, environment, use = evidence.train_loader, evidence.surroundings, evidence.used
        if loader is None or environment is None or data_share(evidence) < 0.1:
            return None
        stages = stages_of(evidence, loader)
        waiting = mean_during(evidence, use.waiting) or 0.0
        blocked = min(1.0, waiting * evidence.machine.cores)
        reading = mean_during(evidence, use.disk_read) or 0.0
        share = stages.read / stages.seconds if stages is not None else blocked
        network = is_network(environment.filesystem)
        # Files in the page cache are read at once even from a slow disk, so the wait itself must have been seen.
        has_waited = share >= _BLOCKED if network else blocked >= _BLOCKED and reading >= _READING
        if not has_waited or not (network or environment.rotational or blocked >= 0.5):
            return None
        kind = (
            f"a network file system ({environment.filesystem})"
            if network
            else "a spinning disk"
            if environment.rotational
            else "a disk that cannot keep up"
        )
        read = f", read at {reading / 1e6:.0f} MB/s" if reading >= _READING else ""
        return cls.timed(
            f"the data lies on {kind}{read}: {percent(share)} of a batch's time is spent reading, and the step waits "
            f"{percent(data_share(evidence))} of its time for batches",
            f"copy {environment.data_folder or 'the data'} to a local SSD before the training, or pack it into few "
            "large files that are read in order",
            faster_loading(evidence, loader, share),
            HowKnown.ESTIMATED,
            place=loader.where,
            where=environment.data_folder,
            details=("at the most: as if reading took no time",),
        )
