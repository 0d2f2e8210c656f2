"""The learning rate stays constant from the first step to the last.

## Why it is slow

This costs no time, but a learning rate that decays towards the end usually reaches the same loss in fewer steps.

## How it is known

From the optimizer's learning rates over two epochs or over the whole training. Scripts with several optimizers (GANs,
reinforcement learning) are not reported, since their rates are often constant on purpose.

## Example

```python
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(10):
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
```

## Use instead

```python
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10 * len(loader))
for epoch in range(10):
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
```

## When the repair is safe

The change alters how the model learns: compare the validation loss.

## Source

- Kuhn, tip 1
- Smith, Topin, Super-Convergence, 2018
"""

from __future__ import annotations

from collections.abc import Iterable

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import last_name, walk
from hasten.evidence import Evidence, Finding, Severity

_BY_RATE = ("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop")
_LONG = 100  # least steps: within fewer, a schedule may just not have changed the rate yet
_RATE_WORDS = (
    "lr_scheduler", "scheduler", "adjust_learning_rate", "param_groups", "get_lr", "configure_optimizers", "sched",
)  # fmt: skip


class ConstantRate(Rule):
    severity = Severity.NOTE
    of_optimizer = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the only optimizer that stepped had one rate throughout and no scheduler."""
        stepping = [optimizer for optimizer in evidence.optimizers if optimizer.steps]
        if len(stepping) != 1:
            return None
        optimizer = stepping[0]
        epochs = sum(data_pass.trained and data_pass.batches > 0 for data_pass in evidence.passes)
        # Schedules often step once an epoch: within the first epoch of a longer training none would show.
        seen_enough = epochs >= 2 or (evidence.ended == "finished" and epochs <= 1)
        if optimizer.steps < _LONG or optimizer.name not in _BY_RATE or not seen_enough:
            return None
        if optimizer.schedule or len(optimizer.rates) != 1:
            return None
        duration = f" over {epochs} epochs" if epochs >= 2 else ""
        return cls.finding(
            f"{optimizer.name} made all of its {optimizer.steps} steps{duration} at the rate {optimizer.rates[0]:g}",
            "let it fall towards the end (OneCycleLR or CosineAnnealingLR, with a short warm-up)",
            Severity.NOTE,
            place=optimizer.where,
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find the only optimizer of a file with a training loop in which nothing changes its learning rate."""
        names = {node.value for node in code.script.nodes if isinstance(node, cst.Name)}
        if len(code.script.optimizers) != 1 or any(word in name.lower() for name in names for word in _RATE_WORDS):
            return
        if not code.training.step_loops or any(name in names for name in ("Accelerator", "deepspeed", "Trainer")):
            return
        call = code.script.optimizers[0]
        first = call.args[0].value if call.args else None
        # An optimizer of something else, such as an image in style transfer, is left out.
        of_model = first is not None and any(
            isinstance(node, cst.Call) and last_name(node.func) in ("parameters", "named_parameters")
            for node in walk(first)
        )
        if of_model and last_name(call.func) != "LBFGS":
            yield Problem(
                call,
                "the learning rate stays the same throughout",
                "try a schedule: torch.optim.lr_scheduler.OneCycleLR",
            )
