"""Batches are in pinned memory, but the CPU waits until they are copied to the GPU.

## Why it is slow

`.to(device)` waits for its copy by default. From pinned memory the copy could run in parallel with computation while
the CPU goes on launching work.

## How it is known

The measured waits, limited to the time in which the GPU is idle: waiting for a busy GPU costs nothing. Batches in
pageable memory belong to `pageable_memory`.

## Example

```python
train_loader = DataLoader(dataset, pin_memory=True)
for images, labels in train_loader:
    images = images.to("cuda")
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## Use instead

```python
train_loader = DataLoader(dataset, pin_memory=True)
for images, labels in train_loader:
    images = images.to("cuda", non_blocking=True)
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## When the repair is safe

Safe where the CPU does not write to the pinned batch before its copy has finished; batches from a loader are not
written to again. Copies from the GPU to the CPU are not safe: the CPU would read data that has not arrived yet.

## Source

- Lin, non_blocking=True
- PyTorch, pin_memory and non_blocking
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.figures import group_by_line, wait_finding
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Edit, Problem
from hasten.doctor.source.syntax import argument, device_of, dotted, last_name, receiver, walk, with_keyword
from hasten.evidence import Evidence, Finding
from hasten.evidence.waiting import in_ms, per_step


class BlockingCopy(Rule):
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each line of the script that copies a pinned batch and waits."""
        loader = evidence.train_loader
        if loader is None or not loader.pin_memory:
            return
        for events in group_by_line(
            [event for event in evidence.events_of("blocking_copy") if "pageable" not in event.detail]
        ):
            yield from wait_finding(
                cls,
                evidence,
                events,
                f"batches lie in pinned memory, yet the CPU waits {in_ms(per_step(evidence, events))} a step "
                "until they are copied to the GPU",
                "copy with `.to(device, non_blocking=True)`",
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find blocking moves of a batch in a file with a loader that pins memory."""
        pins = any(
            last_name(call.func) == "DataLoader" and code.script.value_of(argument(call, "pin_memory")) is True
            for call in code.script.calls
        )
        if not pins:
            return
        for call in code.script.calls:
            if device_of(call) is None or argument(call, "non_blocking") is not None:
                continue
            inner = receiver(call)
            owner = inner.value if isinstance(inner, cst.Subscript) else inner
            bound = _batch_names(code, call)
            name = dotted(owner) if owner is not None else ""
            if name.split(".")[0] not in bound:
                continue
            is_whole_batch = bound[name.split(".")[0]] and not isinstance(inner, cst.Subscript)
            yield Problem(
                call,
                f"`{code.text(call)}` waits for its copy, though the batch is in pinned memory",
                "add non_blocking=True",
                ()
                if is_whole_batch
                else (Edit(call, lambda now: with_keyword(now, "non_blocking", cst.Name("True"))),),
                "the batch is one object, which may not take non_blocking" if is_whole_batch else "",
            )


def _batch_names(code: Code, node: cst.CSTNode) -> dict[str, bool]:
    """Return the names that hold the batch, or parts of it, in the innermost loop over a loader around a node.

    True means that the name holds the whole batch, which may be any object; False, one of its parts.
    """
    batch_names: dict[str, bool] = {}
    for loop in code.training.loops_around(node):
        if not isinstance(loop, cst.For) or not re.search(r"load|dl\b|batches|data_?iter", code.text(loop.iter, 200)):
            continue
        names = code.script.loop_targets(loop)
        if isinstance(loop.iter, cst.Call) and dotted(loop.iter.func) == "enumerate" and len(names) > 1:
            names = names[1:]
        is_whole_batch = len(names) == 1  # `for batch in loader`, against `for images, labels in loader`
        batch_names.update(dict.fromkeys(names, is_whole_batch))
        for name, value, statement in code.script.assignments:
            if loop in code.script.ancestors(statement) and dotted(value) in batch_names and name not in batch_names:
                batch_names[name] = batch_names[dotted(value)]
        # `images, labels = batch` names the parts of a batch.
        for child in walk(loop.body):
            if (
                isinstance(child, cst.Assign)
                and dotted(child.value) in batch_names
                and isinstance(child.targets[0].target, cst.Tuple)
            ):
                batch_names.update(
                    {dotted(e.value): False for e in child.targets[0].target.elements if dotted(e.value)}
                )
        break
    return batch_names
