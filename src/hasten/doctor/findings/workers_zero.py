"""The training process makes its batches itself and computes nothing in the meantime.

## Why it is slow

Loading and computing take turns. Workers load the next batches while the step computes.

## How it is known

The measured wait, minus the wait that would remain with workers. The remaining wait is calculated from the
computation, the time to make a batch and the cores. Tensors in memory are not reported: their samples cost less than
passing a batch between processes.

## Example

```python
train_loader = DataLoader(Images(), batch_size=64, shuffle=True)
for images, labels in train_loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## Use instead

```python
train_loader = DataLoader(Images(), batch_size=64, shuffle=True, num_workers=4, persistent_workers=True)
for images, labels in train_loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## When the repair is safe

Random augmentation draws other numbers in workers. A dataset must open its files and connections in each worker.
Scripts that start processes by spawn need `if __name__ == "__main__":`.

## Source

- Falcon, tip 1
- Lin, tip 1
- Kuhn, tip 2
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.loaders import loader_calls, trains_with
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import argument, dotted, last_name, walk
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.waiting import in_ms, ordinary_seconds, typical_wait
from hasten.evidence.weigh import seconds_of, share_of
from hasten.plan import Setting
from hasten.techniques.base import toml_value
from hasten.techniques.data.loader_workers import LoaderWorkers
from hasten.techniques.data.worker_estimate import room_for, workers_for

# Names of datasets that compute their samples from nothing, and calls that cost a `__getitem__` next to nothing.
_MADE_UP = re.compile(r"random(?!_split)|dummy|fake|toy|synthetic|boring", re.IGNORECASE)
_LIGHT = frozenset([
    "tensor", "as_tensor", "from_numpy", "long", "float", "int", "len", "astype", "size", "contiguous", "clone", "copy",
])  # fmt: skip
_LEAST_WAIT = 0.05  # least share of the step spent waiting for which workers are worth proposing


class WorkersZero(Rule):
    cure = LoaderWorkers

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the step waits 5 % of its time or more and workers would shorten the wait."""
        loader = evidence.train_loader
        if loader is None or loader.num_workers or share_of(evidence, typical_wait(evidence)) < 0.05:
            return None
        probe = loader.probe
        if loader.dataset == "TensorDataset" or (probe is not None and (probe.in_memory or probe.fork_unsafe)):
            return None
        proposal = workers_for(evidence, loader)
        workers = proposal.workers
        if not workers:
            return None
        table: Setting = {"num_workers": workers, "prefetch_factor": 2}
        seconds = ordinary_seconds(evidence) - proposal.seconds
        estimate = (
            f"with {workers} of them the step would take {in_ms(seconds)}: the longest of its own computation, a "
            f"batch's making shared by {workers} worker{'s' * (workers != 1)}, and all work shared by "
            f"{room_for(evidence):.2g} cores"
        )
        and_threads = (
            ", and set OMP_WAIT_POLICY=PASSIVE in the environment (or torch.set_num_threads(1)): threads of the "
            "training that wait for work would keep the workers' cores busy"
            if proposal.passive
            else ""
        )
        return cls.timed(
            f"the training process makes every batch itself (num_workers=0), {in_ms(typical_wait(evidence))} of each "
            f"{in_ms(ordinary_seconds(evidence))} step, while the model waits",
            f"give the loader num_workers={workers}, persistent_workers=True{and_threads}",
            share_of(evidence, proposal.seconds),
            HowKnown.ESTIMATED,
            place=loader.where,
            details=(estimate,),
            setting="" if loader.iterable else toml_value(table),
        )

    @classmethod
    def holds(cls, finding: Finding, evidence: Evidence) -> bool:
        """Return False if the run showed that it hardly waits for data."""
        waits = share_of(evidence, seconds_of(evidence, Phase.DATA))
        return super().holds(finding, evidence) and (not evidence.step_phases or waits >= _LEAST_WAIT)

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find training loaders with `num_workers=0` or without the argument."""
        for call, name in loader_calls(code):
            count = argument(call, "num_workers", 5)
            if count is not None and code.script.value_of(count) != 0:
                continue
            # False == 0 in Python, but it is no number of workers.
            if code.script.value_of(count) is False or not trains_with(code, call, name) or _in_memory(code, call):
                continue
            if argument(call, "multiprocessing_context") is not None:
                continue
            # The value comes from elsewhere: `num_workers=args.workers`, whose default is 0.
            default = count is not None and not isinstance(count, cst.Integer)
            yield Problem(
                call,
                f"the training process makes its batches itself (num_workers is 0{' by default' if default else ''})",
                "give the loader num_workers, and see with `hasten doctor` what they bring",
            )


def _in_memory(code: Code, call: cst.Call) -> bool:
    """Return whether a loader's dataset only returns data in memory, so that workers would not help."""
    dataset = argument(call, "dataset", 0)
    return dataset is not None and _hands_out_memory(code, dataset)


def _hands_out_memory(code: Code, dataset: cst.BaseExpression, depth: int = 0) -> bool:
    """Return whether an expression is a dataset in memory: a TensorDataset, a list, or a class with a cheap getter."""
    if depth > 3:  # `Subset` of `Subset`, and names that refer to each other
        return False
    if _MADE_UP.search(code.text(dataset, 200)):
        return True
    values = [dataset, *code.script.assigned(dotted(dataset))] if dotted(dataset) else [dataset]
    for value in values:
        if not isinstance(value, cst.Call):
            continue
        name = last_name(value.func)
        if _MADE_UP.search(name):
            return True
        if name in ("TensorDataset", "list", "zip"):
            return True
        if name in ("random_split", "Subset") and value.args and value.args[0].value is not dataset:
            return _hands_out_memory(code, value.args[0].value, depth + 1)
        if name in code.script.classes:
            getters = [
                node
                for node in walk(code.script.classes[name])
                if isinstance(node, cst.FunctionDef) and node.name.value == "__getitem__"
            ]
            calls = [node for getter in getters for node in walk(getter.body) if isinstance(node, cst.Call)]
            if getters and all(last_name(inner.func) in _LIGHT for inner in calls):
                return True
    return any(isinstance(value, cst.List | cst.ListComp | cst.Subscript | cst.Tuple) for value in values)
