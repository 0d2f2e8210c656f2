"""Anomaly detection, a profiler or gradient checks are left on in the training.

## Why it is slow

Anomaly detection writes a traceback for each operator of the forward and looks for NaN after each operator of the
backward. A profiler records every operator; gradcheck runs the forward twice for each input number.

## How it is known

From calls that are on for most steps; what they cost is tried on the spot.

## Example

```python
torch.autograd.set_detect_anomaly(True)
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## Use instead

```python
for images, labels in loader:
    optimizer.zero_grad()
    criterion(model(images), labels).backward()
    optimizer.step()
```

## When the repair is safe

Always for the result. A script that catches the error which anomaly detection raises needs a check of its own.

## Source

- Lin, tip 18
- Kuhn, tip 12
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import dotted, is_word, walk
from hasten.evidence import Evidence, Finding, HowKnown, Measurement, Severity, severity_of
from hasten.evidence.weigh import in_words, share_of, steady_seconds, switched
from hasten.techniques.compute.debug_off import DebugOff


class DebugToolsOn(Rule):
    cure = DebugOff
    tried = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Anomaly detection or a profiler that is on for most steps, or gradient checks within the training."""
        steps = max(1, evidence.steps)
        events = [event for event in evidence.events_of("anomaly", "profiler") if event.steps >= steps / 2]
        events += [event for event in evidence.events_of("gradcheck") if event.count]
        found = {event.kind: event.where for event in events}
        if not evidence.events:  # nobody looked line by line
            found |= {"anomaly": ""} if evidence.flags.anomaly else {}
            found |= {"profiler": ""} if evidence.flags.profiler else {}
        if not found:
            return None
        names = {"anomaly": "anomaly detection", "profiler": "a profiler", "gradcheck": "gradcheck"}
        cures = {
            "anomaly": "torch.autograd.set_detect_anomaly(True) out",
            "profiler": "the profiler out, or give it a schedule that ends",
            "gradcheck": "gradcheck out of the training loop",
        }
        tried = [one for one in evidence.measured_for(cls.name) if one.where in found and one.calls]
        seconds = sum(event.seconds for event in events if event.kind == "gradcheck") / steps
        live: tuple[str, ...] = ()
        worth, how_known = share_of(evidence, seconds + _of_tools(evidence, tried)), HowKnown.ESTIMATED
        if set(found) == {"anomaly"}:  # of several tools it is the one that was switched
            worth, how_known, live = switched(evidence, cls.name, worth, how_known)
        first = next((place for place in found.values() if place), "")
        return cls.finding(
            f"{' and '.join(names[kind] for kind in found)} left on in the training",
            f"take {' and '.join(cures[kind] for kind in found)}",
            severity_of(worth) if worth and worth >= 0.05 else Severity.MEDIUM,
            worth or None,
            how_known,
            place=first,
            details=(*live, *map(in_words, tried)),
            setting="true" if "anomaly" in found else "",
        )

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Where anomaly detection is on."""
        return bool(cls.findings(evidence))

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Tools that are on unconditionally, in a file that trains."""
        for call in code.script.calls if code.training.any else ():
            full = code.script.qualified(call.func)
            name = full.rpartition(".")[2]
            if any(isinstance(above, cst.If | cst.IfExp) for above in code.script.ancestors(call)):
                continue  # an option
            if name == "set_detect_anomaly" and call.args and is_word(call.args[0].value, "True"):
                yield Problem(call, "anomaly detection is on", "remove it once the bug is found")
            elif full in ("torch.autograd.detect_anomaly", "torch.autograd.anomaly_mode.detect_anomaly"):
                if not call.args or not any(dotted(arg.value) not in ("True", "") for arg in call.args):
                    yield Problem(call, "anomaly detection is on", "remove it once the bug is found")
            elif full in ("torch.autograd.gradcheck", "torch.autograd.gradgradcheck"):
                yield Problem(call, "gradients are checked against finite differences", "move it to a test")
            elif name in ("profile", "emit_nvtx") and full.startswith(("torch.profiler", "torch.autograd.profiler")):
                scheduled = any(arg.keyword is not None and arg.keyword.value == "schedule" for arg in call.args)
                inside = _holds_training(code, call) or code.training.in_step(call)
                if inside and not scheduled and not _is_optional(call, full):
                    yield Problem(
                        call, "the whole training runs under the profiler", "give it a schedule(...), or take it out"
                    )


def _is_optional(call: cst.Call, full: str) -> bool:
    """Whether an older profiler is built in any case and told to profile or not: `profile(args.profile)`."""
    enabled = [arg for arg in call.args if arg.keyword is None or arg.keyword.value == "enabled"]
    return full.startswith("torch.autograd.") and bool(enabled) and not is_word(enabled[0].value, "True")


def _of_tools(evidence: Evidence, tried: Sequence[Measurement]) -> float:
    """Seconds a step that they take: what an operator costs more, for as many as a step was seen to run.

    An operator that does next to nothing was tried, so no step owes them a greater share than that one does.
    """
    slower = [one for one in tried if one.saved > 0]
    least = math.prod(one.after / one.before for one in slower)
    return min(sum(one.saved * one.calls for one in slower), (1.0 - least) * steady_seconds(evidence))


def _holds_training(code: Code, call: cst.Call) -> bool:
    for above in code.script.ancestors(call):
        if isinstance(above, cst.With):
            return any(below in code.training.step_loops for below in walk(above.body))
    return False
