"""Samples are made again in each epoch although they come out the same.

## Why it is slow

Reading and decoding take the same time in each epoch for the same numbers.

## How it is known

The measured wait and a probe that asked for the same samples twice.

## Example

```python
def __getitem__(self, index):
    return decode(self.paths[index]), self.labels[index]
```

## Use instead

```python
def __getitem__(self, index):
    if index not in self.kept:
        self.kept[index] = decode(self.paths[index])
    return self.kept[index], self.labels[index]
```

## When the repair is safe

Where a sample draws no random numbers and its files do not change. The technique `sample_cache` checks both, and
shares the memory among workers, or keeps them on a disk where memory is short.

## Source

- Falcon, tip 1
- Lin, tip 1
- Lin, tip 3
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, faster_loading
from hasten.techniques.base import Refusal, toml_value
from hasten.techniques.data.sample_cache import DISK_SPEED, FAST, FROM_DISK, SampleCache


class SamplesRecomputed(Rule):
    cure = SampleCache

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return at most one finding."""
        loader, choices = evidence.train_loader, SampleCache.settings(evidence)
        if loader is None or loader.probe is None or isinstance(choices, Refusal):
            return None
        (setting,) = choices.settings
        asked = loader.probe
        on_disk = isinstance(setting, dict)
        whole_samples = (setting["keep"] if isinstance(setting, dict) else setting) == "samples"
        seconds = asked.sample_seconds if whole_samples else asked.loader_seconds
        size = asked.sample_bytes if whole_samples else asked.loader_bytes
        whole = max(asked.sample_seconds, seconds)
        kept = "samples" if whole_samples else f"what `{asked.loader_function}` gives"
        where, cached = ("on a disk", FROM_DISK + size / DISK_SPEED) if on_disk else ("in memory", FAST)
        return cls.timed(
            f"the step waits {percent(data_share(evidence))} of its time for samples that are made again in each "
            "epoch, although the same index gave the same sample each time it was asked",
            f"keep {kept} {where} ({size * (loader.samples or 0) / 2**20:.0f} MiB in all), or store it decoded",
            faster_loading(evidence, loader, max(0.0, seconds - cached) / whole),
            HowKnown.ESTIMATED,
            place=loader.where,
            details=("counts from the second epoch on",),
            setting=toml_value(setting),
        )
