"""Layers or batches have sizes that are no multiple of what the hardware wants.

## Why it is slow

Kernels work on tiles of 8, 16 or 64 numbers. A size just beyond a multiple computes a whole tile for its rest, or
takes a slower kernel.

## How it is known

Only where it was tried on this machine, for the very sizes, and brought something.

## Example

```python
head = nn.Linear(768, 50257)
```

## Use instead

```python
head = nn.Linear(768, 50304)
```

## When the repair is safe

Where the extra columns are never targets (a vocabulary) or the model is trained from the start. A checkpoint of the
other size no longer fits.

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
        """Return findings only for sizes that were tried on this machine and brought something."""
        tried = evidence.measured_for(cls.name)
        best: dict[str, Measurement] = {}
        for one in tried:
            if not one.detail.startswith(_BATCH) and one.saved > (best[one.where].saved if one.where in best else 0):
                best[one.where] = one
        for one in best.values():
            yield cls.timed(
                f"{one.what} makes its forward and backward {percent(one.gain)} shorter here",
                f"give it {one.detail}, and what feeds or follows it the same",
                saved(evidence, [one]),
                HowKnown.MEASURED,
                place=place_of(evidence, one),
                where=one.where,
                details=tuple(in_words(other) for other in tried if other.where == one.where),
            )
        yield from cls._batch(evidence, [one for one in tried if one.detail.startswith(_BATCH)])

    @classmethod
    def _batch(cls, evidence: Evidence, tried: list[Measurement]) -> Iterator[Finding | None]:
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
