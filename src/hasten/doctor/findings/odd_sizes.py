"""Sizes of layers or batches are not multiples of the hardware's tile size.

## Why it is slow

Kernels work on tiles of 8, 16 or 64 numbers. A size just above a multiple computes a whole tile for the remainder, or
needs a slower kernel.

## How it is known

Reported only where a rounded size was timed after the run, on this machine and for this size, and was faster.

## Example

```python
head = nn.Linear(768, 50257)
```

## Use instead

```python
head = nn.Linear(768, 50304)
```

## When the repair is safe

Safe where the extra columns are never targets (a vocabulary), or if the model is trained from the start. A checkpoint
of the old size no longer fits the model.

## Source

- NVIDIA, Matrix Multiplication Background User's Guide
- PyTorch performance tuning guide
"""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown, Measurement
from hasten.evidence.figures import percent
from hasten.evidence.weigh import in_words, place_of, saved

_BATCH = "batch_size="


class OddSizes(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each layer whose rounded size was measured faster, and one for the batch size."""
        tried = evidence.measured_for(cls.name)
        # A layer may have been tried with several sizes: keep the best.
        best: dict[str, Measurement] = {}
        for trial in tried:
            if not trial.detail.startswith(_BATCH) and trial.saved > (
                best[trial.where].saved if trial.where in best else 0
            ):
                best[trial.where] = trial
        for trial in best.values():
            yield cls.timed(
                f"{trial.what} makes its forward and backward {percent(trial.gain)} shorter here",
                f"give it {trial.detail}, and what feeds or follows it the same",
                saved(evidence, [trial]),
                HowKnown.MEASURED,
                place=place_of(evidence, trial),
                where=trial.where,
                details=tuple(in_words(measured) for measured in tried if measured.where == trial.where),
            )
        yield from cls._batch(evidence, [trial for trial in tried if trial.detail.startswith(_BATCH)])

    @classmethod
    def _batch(cls, evidence: Evidence, tried: list[Measurement]) -> Iterator[Finding | None]:
        """Yield the finding for the batch size, judged over all layers that were timed."""
        loader = evidence.train_loader
        if not tried or loader is None:
            return
        yield cls.timed(
            f"batches of {loader.batch_size} are slower per sample than {tried[0].detail}",
            f"give the loader {tried[0].detail}",
            saved(evidence, tried),
            HowKnown.MEASURED,
            place=loader.where,
            details=tuple(map(in_words, tried)),
        )
