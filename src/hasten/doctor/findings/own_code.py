"""The script's own code takes a good part of the step.

## Why it is slow

Python handles one number at a time, in the thread that should start the next step's work.

## How it is known

The measured time beside loading, forward, backward and optimizer, and the lines in which the training thread was seen
meanwhile, looked up a hundred times a second. A function is named as a whole, by its line that was seen most. What
the line of the model's or the optimizer's call takes besides is the loss, or torch's own Python, and is left out.

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

That depends on the code: it is the script's own.

## Source

- PyTorch, Profiler recipe
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hasten.doctor.rule import Rule
from hasten.evidence import PHASES, Evidence, Finding, HowKnown, Line, Phase
from hasten.evidence.figures import percent
from hasten.evidence.weigh import seconds_of, share_of

_BOUND = 0.10  # share of the step from which own code is looked into
_LEAST, _LEAST_LINE = 0.05, 0.10  # share of the step that a function, or a line of the loop, must take to be named
_LOOKS = 10  # so often it must have been seen: by then the share is known to a third
_MOST = 3


class OwnCode(Rule):
    gives_way = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding per function that takes 5 % of the step, and per line of the loop that takes 10 %."""
        other = share_of(evidence, seconds_of(evidence, Phase.OTHER))
        beside = [line for line in evidence.lines if line.phase == PHASES[Phase.OTHER]]
        total = sum(line.share for line in beside)
        computing = {line.where for line in evidence.lines if line not in beside}
        lines = [line for line in beside if not (line.in_loop and (line.library or line.where in computing))]
        if other < _BOUND or not total:
            return
        for places in sorted(_groups(lines), key=lambda group: -sum(line.share for line in group))[:_MOST]:
            worth = other * sum(line.share for line in places) / total
            alone = places[0].in_loop or not places[0].function
            if worth < (_LEAST_LINE if alone else _LEAST) or sum(line.looks for line in places) < _LOOKS:
                continue
            line = places[0]
            what = "this line of the training loop" if alone else f"{line.function}()"
            yield cls.timed(
                f"{what} takes {percent(worth)} of the step, beside loading, forward, backward and optimizer",
                "do it on whole tensors instead of number by number, once and not in each step, less often, or beside "
                "the training",
                worth,
                HowKnown.MEASURED,
                place=line.where,
                details=tuple(
                    f"line {one.where.rpartition(':')[2]}: {percent(other * one.share / total)} of the step"
                    for one in places[:4]
                    if len(places) > 1
                ),
            )


def _groups(lines: list[Line]) -> list[list[Line]]:
    """Lines of one function together, the hottest first; those of the training loop each for itself."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in sorted(lines, key=lambda one: -one.share):
        alone = line.in_loop or not line.function
        groups[line.where if alone else f"{line.where.rpartition(':')[0]} {line.function}"].append(line)
    return list(groups.values())
