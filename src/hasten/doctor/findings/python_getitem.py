"""A dataset computes its samples line by line in Python, and the training waits for them.

## Why it is slow

Python takes about 50 ns per line, for one number at a time. NumPy and torch process whole arrays in C.

## How it is known

The measured share of the samples' time spent in the script's own Python code. The worth assumes that all of it can be
saved, which array operations come close to.

## Example

```python
def __getitem__(self, index):
    return [float(word) for word in self.lines[index].split(",")]
```

## Use instead

```python
def __init__(self, lines):
    self.table = torch.from_numpy(np.loadtxt(lines, delimiter=",", dtype=np.float32))


def __getitem__(self, index):
    return self.table[index]
```

## When the repair is safe

Safe where the samples fit in memory, or are stored as arrays once (`numpy.memmap`, Parquet).

## Source

- Lin, tip 1
- PyTorch performance tuning guide
"""

from __future__ import annotations

from hasten.doctor.figures import sampled_stages
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, faster_loading, in_ms


class PythonGetitem(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the dataset's Python code takes 40 % of a batch's time or more."""
        bound = sampled_stages(evidence)
        if bound is None or bound[1].python < 0.4:
            return None
        loader, stages = bound
        return cls.timed(
            f"{percent(stages.python)} of the {in_ms(stages.seconds)} that a batch takes is Python code of the "
            f"dataset, and the step waits {percent(data_share(evidence))} of its time for batches",
            "do this work on whole arrays (NumPy, torch), once when the dataset is built, or batch by batch on the GPU",
            faster_loading(evidence, loader, stages.python),
            HowKnown.ESTIMATED,
            place=stages.hottest or loader.where,
            details=("at the most: as if that code took no time",),
        )
