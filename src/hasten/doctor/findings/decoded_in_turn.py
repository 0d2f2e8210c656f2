"""Files are read and decoded one after the other, between the steps, by the training itself.

## Why it is slow

Reading and decoding release the interpreter's lock, but nobody else works meanwhile: the training waits for each file.

## How it is known

The measured wait, and a probe that asked the dataset's `loader` function twice for the same files and timed it.

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

Worker processes draw other random numbers for augmentation. The technique `read_ahead` keeps them: threads read and
decode the files of the next batches, and each sample is still made in its turn.

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
        """Return the finding where a `loader` function takes a good part of a wait that is worth a word.

        The threads share their part among the cores, beside the making of the samples; they need one for each thread.
        """
        loader, choices = evidence.train_loader, ReadAhead.settings(evidence)
        if loader is None or loader.probe is None or isinstance(choices, Refusal) or evidence.machine.cores < 2:
            return None
        asked, threads = loader.probe, choices.settings[0]
        whole = max(asked.sample_seconds, asked.loader_seconds)
        saved = max(0.0, asked.loader_seconds * (1 - 1 / evidence.machine.cores) - LEAST) / whole
        return cls.timed(
            f"the step waits {percent(data_share(evidence))} of its time for data, and `{asked.loader_function}` takes "
            f"{in_ms(asked.loader_seconds)} of the {in_ms(whole)} of a sample: files are read and decoded one by one",
            f"have threads read the next files (`read_ahead = {toml_value(threads)}`), or give the loader workers",
            faster_loading(evidence, loader, saved),
            HowKnown.ESTIMATED,
            place=loader.where,
            setting=toml_value(threads),
        )
