"""The script's own code takes a large part of the step.

## Why it is slow

Python handles one number at a time, in the thread that should launch the next step's work.

## How it is known

hasten measures the time outside loading, forward, backward and optimizer, and samples which line the training thread
executes, a hundred times per second. All samples in a function count together; the finding names the line sampled most
often. The remaining time of a line that also calls the model or the optimizer is the loss or torch's own Python, and
does not count.

## Example

```python
for images, labels in loader:
    outputs = train(images, labels)
    for output, label in zip(outputs, labels):
        confusion[label][output.argmax()] += 1
```

## Use instead

```python
for images, labels in loader:
    outputs = train(images, labels)
    confusion += torch.bincount(labels * 10 + outputs.argmax(1), minlength=100).reshape(10, 10)
```

## When the repair is safe

That depends on the code, which is the script's own.

## Source

- PyTorch, Profiler recipe
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hasten.doctor.rule import Rule
from hasten.evidence import PHASES, Evidence, Finding, HowKnown, Phase, SampledLine
from hasten.evidence.figures import percent
from hasten.evidence.weigh import seconds_of, share_of

_BOUND = 0.10  # least share of the step outside the known phases
_LEAST, _LEAST_LINE = 0.05, 0.10  # least share of the step for a function, and for a line of the training loop
_LOOKS = 10  # least samples: their share is then known to about a third
_MOST = 3  # findings per run


class OwnCode(Rule):
    gives_way = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding per function that takes 5 % of the step, and per line of the loop that takes 10 %."""
        own_share = share_of(evidence, seconds_of(evidence, Phase.OTHER))
        outside = [line for line in evidence.lines if line.phase == PHASES[Phase.OTHER]]
        total = sum(line.share for line in outside)
        computing = {line.where for line in evidence.lines if line not in outside}
        # `loss = criterion(model(x), y)`: the line computes as well, so what it takes besides is not the script's own.
        lines = [line for line in outside if not (line.in_loop and (line.library or line.where in computing))]
        if own_share < _BOUND or not total:
            return
        for hot_lines in sorted(_groups(lines), key=lambda group: -sum(line.share for line in group))[:_MOST]:
            worth = own_share * sum(line.share for line in hot_lines) / total
            alone = hot_lines[0].in_loop or not hot_lines[0].function
            if worth < (_LEAST_LINE if alone else _LEAST) or sum(line.looks for line in hot_lines) < _LOOKS:
                continue
            line = hot_lines[0]
            subject = "this line of the training loop" if alone else f"{line.function}()"
            yield cls.timed(
                f"{subject} takes {percent(worth)} of the step, beside loading, forward, backward and optimizer",
                "do it on whole tensors instead of number by number, once and not in each step, less often, or beside "
                "the training",
                worth,
                HowKnown.MEASURED,
                place=line.where,
                details=tuple(
                    f"line {spot.where.rpartition(':')[2]}: {percent(own_share * spot.share / total)} of the step"
                    for spot in hot_lines[:4]
                    if len(hot_lines) > 1
                ),
            )


def _groups(lines: list[SampledLine]) -> list[list[SampledLine]]:
    """Group lines by function, hottest line first; each line of the training loop is a group of its own."""
    groups: dict[str, list[SampledLine]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: -line.share):
        alone = line.in_loop or not line.function
        groups[line.where if alone else f"{line.where.rpartition(':')[0]} {line.function}"].append(line)
    return list(groups.values())
