"""Samples are computed again in each epoch although they come out the same.

## Why it is slow

Reading and decoding take the same time in each epoch to give the same numbers.

## How it is known

The measured wait, and a probe that asked the dataset for the same samples twice.

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

Safe where samples use no random numbers and their files do not change. The technique `sample_cache` checks both. It
shares the memory among workers, or keeps the samples on a disk where memory is short.

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
        """Return a finding if the technique `sample_cache` applies and would save 1 % of the step or more."""
        loader, choices = evidence.train_loader, SampleCache.settings(evidence)
        if loader is None or loader.probe is None or isinstance(choices, Refusal):
            return None
        (setting,) = choices.settings
        probe = loader.probe
        on_disk = isinstance(setting, dict)
        # Random augmentation cannot be cached, but the decoded files that it starts from can.
        whole_samples = (setting["keep"] if isinstance(setting, dict) else setting) == "samples"
        seconds = probe.sample_seconds if whole_samples else probe.loader_seconds
        size = probe.sample_bytes if whole_samples else probe.loader_bytes
        total = max(probe.sample_seconds, seconds)
        megabytes = size * (loader.samples or 0) / 2**20
        room = f"{megabytes:.0f} MiB" if megabytes >= 1 else "less than 1 MiB"
        contents = "samples" if whole_samples else f"what `{probe.loader_function}` gives"
        place, cached = ("on a disk", FROM_DISK + size / DISK_SPEED) if on_disk else ("in memory", FAST)
        return cls.timed(
            f"the step waits {percent(data_share(evidence))} of its time for samples that are made again in each "
            "epoch, although the same index gave the same sample each time it was asked",
            f"keep {contents} {place} ({room} in all), or store it decoded",
            faster_loading(evidence, loader, max(0.0, seconds - cached) / total),
            HowKnown.ESTIMATED,
            place=loader.where,
            details=("counts from the second epoch on",),
            setting=toml_value(setting),
        )
