"""Loading a checkpoint may run code that is in the file.

## Why it is slow

This costs no time. `torch.load(weights_only=False)` unpickles the file, and a pickle may call any function: a
downloaded file can take over the machine.

## How it is known

From the calls of `torch.load`.

## Example

```python
state = torch.load("checkpoint.pt", weights_only=False)
```

## Use instead

```python
with torch.serialization.safe_globals([Config]):
    state = torch.load("checkpoint.pt", weights_only=True)
```

## When the repair is safe

Safe where the file holds only tensors and plain values, or classes that you name. Re-save your own files that hold
whole modules as state dicts first.

## Source

- torch.load
- TorchFix TOR102
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import argument, is_name
from hasten.evidence import Evidence, Finding, Severity


class UnsafeLoad(Rule):
    severity = Severity.NOTE

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for each line of the script that loads with `weights_only=False`."""
        for event in evidence.events_of("torch_load"):
            yield cls.finding(
                "torch.load(weights_only=False) runs whatever code the file holds",
                "load it with weights_only=True, and name the classes it needs with torch.serialization.safe_globals",
                Severity.NOTE,
                place=event.where,
                details=(event.detail,) if event.detail else (),
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find `torch.load(..., weights_only=False)`."""
        for call in code.script.calls:
            if code.script.qualified(call.func) == "torch.load" and is_name(argument(call, "weights_only"), "False"):
                yield Problem(
                    call,
                    "torch.load with weights_only=False runs any code that the file holds",
                    "save state dicts and load them with weights_only=True",
                )
