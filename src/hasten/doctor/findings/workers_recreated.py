"""Loader workers end with each epoch and are started again for the next.

## Why it is slow

A worker is a process: it is forked or started, imports what it needs and fetches its first batch while the training
waits.

## How it is known

The measured time of `iter(loader)` from the second epoch on, as a share of the epoch.

## Example

```python
train_loader = DataLoader(Images(), batch_size=64, shuffle=True, num_workers=4)
for epoch in range(100):
    for images, labels in train_loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
```

## Use instead

```python
train_loader = DataLoader(Images(), batch_size=64, shuffle=True, num_workers=4, persistent_workers=True)
for epoch in range(100):
    for images, labels in train_loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
```

## When the repair is safe

Where the dataset is not changed between epochs: workers keep the copy they began with.

## Source

- torch.utils.data.DataLoader, persistent_workers
- Lin, tip 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.figures import opening_share
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.loaders import loader_calls, trains_with
from hasten.doctor.source.problem import Change, Mend, Problem
from hasten.doctor.source.syntax import argument, dotted, last_name, names_in, walk, with_keyword
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import epoch_start, in_ms


class WorkersRecreated(Rule):
    may_change = "from the second epoch on, the order of the samples and their random changes are drawn otherwise"

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding per loader."""
        for loader in evidence.loaders:
            start = epoch_start(evidence, loader) if loader.num_workers and not loader.persistent_workers else None
            if start is None or loader.role == "unused":
                continue
            worth = opening_share(evidence, loader, start)
            yield cls.timed(
                f"the {loader.num_workers} workers are restarted for each pass, which takes "
                f"{in_ms(worth * start.epoch)} of each {in_ms(start.epoch)} from one pass to the next",
                "give the loader persistent_workers=True",
                worth,
                HowKnown.MEASURED if loader.start_method == "fork" else HowKnown.ESTIMATED,
                place=loader.where,
                details=(f"measured over {start.passes} passes after the first",),
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Loaders with workers that are iterated once an epoch and are not kept."""
        for call, name in loader_calls(code):
            workers = code.script.value_of(argument(call, "num_workers", 5))
            if not isinstance(workers, int) or workers < 1 or argument(call, "persistent_workers") is not None:
                continue
            if not trains_with(code, call, name) or not _in_epochs(code, name) or _made_in_epochs(code, call):
                continue
            given = argument(call, "num_workers", 5)
            literal = isinstance(given, cst.Integer)
            left = ""
            if any(
                last_name(other.func) == "set_epoch" and "sampler" not in dotted(other.func)
                for other in code.script.calls
            ):
                left = "the dataset is told the epoch: workers that stay would not hear of it"
            value: cst.BaseExpression = cst.Name("True")
            if not literal and given is not None:
                zero = cst.ComparisonTarget(cst.GreaterThan(), cst.Integer("0"))
                value = cst.Comparison(given, [zero])
            yield Problem(
                call,
                f"its {workers} workers end after every epoch and are started again",
                "give the loader persistent_workers=True",
                () if left else (Mend(call, _kept_alive(value)),),
                left,
            )


def _kept_alive(value: cst.BaseExpression) -> Change:
    return lambda call: with_keyword(call, "persistent_workers", value)


def _made_in_epochs(code: Code, call: cst.Call) -> bool:
    """Whether the loader itself is made again in every epoch: keeping its workers would not help."""
    return bool(code.training.loops_around(call))


def _in_epochs(code: Code, name: str) -> bool:
    """Whether a loader of this name is iterated inside a loop over epochs, here or in a function called there."""
    short = name.rpartition(".")[2]
    for loop in code.training.epoch_loops:
        for node in walk(loop):
            if isinstance(node, cst.For) and node is not loop and short in names_in(node.iter):
                return True
            if isinstance(node, cst.Call) and any(short in names_in(arg.value) for arg in node.args):
                if last_name(node.func) in code.script.functions:
                    return True
    return False
