"""The training process reads and decodes files one after the other between the steps.

## Why it is slow

Reading and decoding release Python's global interpreter lock, but no other thread works in that time: the training
waits for each file.

## How it is known

The measured wait, and a probe that timed the dataset's `loader` function on some files, twice on each.

## Example

```python
dataset = ImageFolder("train", transform=augment)
for images, labels in DataLoader(dataset, batch_size=64, shuffle=True):
    step(images, labels)
```

## Use instead

```python
dataset = ImageFolder("train", transform=augment)
for images, labels in DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4, persistent_workers=True):
    step(images, labels)
```

## When the repair is safe

Worker processes draw other random numbers for augmentation. The technique `read_ahead` keeps the random numbers:
threads read and decode the files of the next batches, and the samples are still made in order.

## Source

- SPDL: threads that release the GIL
- Falcon, tip 1
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, faster_loading, in_ms
from hasten.techniques.base import Refusal, toml_value
from hasten.techniques.data.read_ahead import LEAST, ReadAhead


class DecodedInTurn(Rule):
    cure = ReadAhead

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the `loader` function takes a share of the wait that threads would save.

        Threads divide the function's time by the number of cores, so a single core gains nothing.
        """
        loader, choices = evidence.train_loader, ReadAhead.settings(evidence)
        if loader is None or loader.probe is None or isinstance(choices, Refusal) or evidence.machine.cores < 2:
            return None
        probe, threads = loader.probe, choices.settings[0]
        seconds = max(probe.sample_seconds, probe.loader_seconds)
        saved = max(0.0, probe.loader_seconds * (1 - 1 / evidence.machine.cores) - LEAST) / seconds
        return cls.timed(
            f"the step waits {percent(data_share(evidence))} of its time for data, and `{probe.loader_function}` takes "
            f"{in_ms(probe.loader_seconds)} of the {in_ms(seconds)} of a sample: files are read and decoded one by one",
            f"have threads read the next files (`read_ahead = {toml_value(threads)}`), or give the loader workers",
            faster_loading(evidence, loader, saved),
            HowKnown.ESTIMATED,
            place=loader.where,
            setting=toml_value(threads),
        )
