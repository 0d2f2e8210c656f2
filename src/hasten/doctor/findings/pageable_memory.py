"""Batches are copied to the GPU from pageable memory.

## Why it is slow

The driver first copies such a batch to its own pinned buffer, and the CPU waits. From pinned memory the copy is up to
three times as fast and can run in parallel with computation.

## How it is known

The time of the copies minus the time that the batch's bytes would take from pinned memory, and the GPU's idle time
while the CPU waited for the copies; the larger of the two counts.

## Example

```python
train_loader = DataLoader(Images(), batch_size=64, shuffle=True, num_workers=4)
for images, labels in train_loader:
    optimizer.zero_grad()
    criterion(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
```

## Use instead

```python
train_loader = DataLoader(Images(), batch_size=64, shuffle=True, num_workers=4, pin_memory=True)
for images, labels in train_loader:
    optimizer.zero_grad()
    criterion(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True)).backward()
    optimizer.step()
```

## When the repair is safe

Always safe for the result. Pinned memory cannot be swapped out, so do not use it where the machine's memory is nearly
full.

## Source

- Falcon, tip 2
- Lin, tip 2
- Kuhn, tip 2
"""

from __future__ import annotations

from collections.abc import Iterable

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.loaders import loader_calls, trains_with
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import argument, last_name, receiver
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.waiting import in_ms, per_step, worth_of_waits
from hasten.evidence.weigh import seconds_of, share_of
from hasten.techniques.transfer.pin_memory import PinMemory

_PINNED = 12e9  # bytes per second from pinned memory over PCIe 3 x16, the slowest link of GPUs in use


class PageableMemory(Rule):
    cure = PinMemory
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if the training loader does not pin and its copies cost 1 % of the step or more."""
        loader = evidence.train_loader
        if loader is None or loader.pin_memory or PinMemory.refuse_without_gpu(evidence):
            return None
        copies = [event for event in evidence.events_of("blocking_copy") if "pageable" in event.detail]
        # Without CUDA events the phase is only the time of the calls, not that of the copies.
        copying = seconds_of(evidence, Phase.TRANSFER) if evidence.device_clock else 0.0
        waited = worth_of_waits(evidence, copies) or 0.0
        faster = share_of(evidence, copying - loader.batch_bytes / _PINNED) if copying else 0.0
        seconds = max(copying, per_step(evidence, copies))
        return cls.timed(
            f"each batch of {loader.batch_bytes / 2**20:.1f} MiB is copied to the GPU from pageable memory, for which "
            f"the CPU waits {in_ms(seconds)}",
            "give the loader pin_memory=True and copy with `.to(device, non_blocking=True)`",
            max(waited, faster),
            HowKnown.ESTIMATED,
            place=loader.where,
            details=tuple(f"copied at {event.where}, {event.count} times" for event in copies[:3] if event.where),
            setting="true",
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find training loaders that do not pin memory, in a file that moves batches to a GPU."""
        moves = any(last_name(call.func) in ("cuda", "to") and receiver(call) is not None for call in code.script.calls)
        if not code.script.uses_cuda or not moves or not code.training.trains:
            return
        for call, name in loader_calls(code):
            pins = argument(call, "pin_memory", 7)
            if pins is not None and code.script.value_of(pins) is not False:
                continue
            if trains_with(code, call, name):
                yield Problem(
                    call, "batches for the GPU are left in pageable memory", "give the loader pin_memory=True"
                )
