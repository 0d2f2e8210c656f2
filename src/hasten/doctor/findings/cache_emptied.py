"""`torch.cuda.empty_cache()` is called in the training loop.

## Why it is slow

The call waits for the GPU and returns unused memory to the driver. The next step must request that memory again, with
slow calls.

## How it is known

The measured time of the calls. Requesting the memory again costs more time on top of it.

## Example

```python
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
    torch.cuda.empty_cache()
```

## Use instead

```python
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## When the repair is safe

Always safe for the result. If another process needs the memory of the same GPU, call it once after the training. If
the training runs out of memory without the call, something holds on to tensors: see `retained_graph` and
`memory_creep`.

## Source

- PyTorch, CUDA semantics, memory management
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hasten.doctor.figures import timed_calls
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.evidence import Evidence, Finding

_CALLS = ("torch.cuda.empty_cache", "torch.mps.empty_cache", "torch.xpu.empty_cache", "torch.accelerator.empty_cache")


class CacheEmptied(Rule):
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each line of the script that empties the cache."""
        yield from timed_calls(
            cls,
            evidence,
            "empty_cache",
            lambda event, often: f"torch.cuda.empty_cache() {often}, and the memory is asked for again",
            "take it out: torch uses freed memory again by itself",
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find calls that empty the cache within training steps."""
        return code.problems_in_steps(
            _CALLS,
            "the allocator's cache is emptied in every step",
            "remove the call; if memory runs out, look for what holds it",
        )
