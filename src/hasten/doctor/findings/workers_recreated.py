"""Loader workers end with each epoch and are restarted for the next.

## Why it is slow

A worker is a process. Each restart forks or spawns it, imports its modules and fetches its first batch while the
training waits.

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

Safe where the dataset does not change between epochs: workers keep the copy that they started with.

## Source

- torch.utils.data.DataLoader, persistent_workers
- Lin, tip 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.figures import worker_startup_share
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.loaders import loader_calls, trains_with
from hasten.doctor.source.problem import Change, Edit, Problem
from hasten.doctor.source.syntax import argument, dotted, last_name, names_in, walk, with_keyword
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import epoch_start, in_ms


class WorkersRecreated(Rule):
    may_change = "from the second epoch on, the order of the samples and their random changes are drawn otherwise"

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each loader whose workers are restarted in every pass."""
        for loader in evidence.loaders:
            start = epoch_start(evidence, loader) if loader.num_workers and not loader.persistent_workers else None
            if start is None or loader.role == "unused":
                continue
            # `iter(loader)` returns once forked workers run, so their start is measured. Workers of other start methods
            # come up later, while the first batch is waited for: their share is an estimate.
            worth = worker_startup_share(evidence, loader, start)
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
        """Find training loaders with workers that are iterated in every epoch and do not set `persistent_workers`."""
        for call, name in loader_calls(code):
            workers = code.script.value_of(argument(call, "num_workers", 5))
            if not isinstance(workers, int) or workers < 1 or argument(call, "persistent_workers") is not None:
                continue
            if not trains_with(code, call, name) or not _in_epochs(code, name) or _made_in_epochs(code, call):
                continue
            count = argument(call, "num_workers", 5)
            literal = isinstance(count, cst.Integer)
            unfixed_reason = ""
            if any(
                last_name(other_call.func) == "set_epoch" and "sampler" not in dotted(other_call.func)
                for other_call in code.script.calls
            ):
                unfixed_reason = "the dataset is told the epoch: workers that stay would not hear of it"
            value: cst.BaseExpression = cst.Name("True")
            # torch rejects persistent_workers=True without workers, and an option may be 0.
            if not literal and count is not None:
                zero = cst.ComparisonTarget(cst.GreaterThan(), cst.Integer("0"))
                value = cst.Comparison(count, [zero])
            yield Problem(
                call,
                f"its {workers} workers end after every epoch and are started again",
                "give the loader persistent_workers=True",
                () if unfixed_reason else (Edit(call, _kept_alive(value)),),
                unfixed_reason,
            )


def _kept_alive(value: cst.BaseExpression) -> Change:
    """Return the change that adds `persistent_workers=value` to a loader."""
    return lambda call: with_keyword(call, "persistent_workers", value)


def _made_in_epochs(code: Code, call: cst.Call) -> bool:
    """Return whether the loader itself is rebuilt in every epoch, so that keeping its workers would not help."""
    return bool(code.training.loops_around(call))


def _in_epochs(code: Code, name: str) -> bool:
    """Return whether a loop over epochs iterates a loader of this name, itself or in a function that it calls."""
    short = name.rpartition(".")[2]
    for loop in code.training.epoch_loops:
        for node in walk(loop):
            if isinstance(node, cst.For) and node is not loop and short in names_in(node.iter):
                return True
            if isinstance(node, cst.Call) and any(short in names_in(arg.value) for arg in node.args):
                if last_name(node.func) in code.script.functions:
                    return True
    return False
