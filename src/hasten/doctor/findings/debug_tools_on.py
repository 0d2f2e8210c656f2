"""Anomaly detection, a profiler or gradient checks are left on during training.

## Why it is slow

Anomaly detection records a traceback for each operator of the forward and checks for NaN after each operator of the
backward. A profiler records every operator. gradcheck runs the forward twice for each input number.

## How it is known

From tools that are on for at least half of the steps. Switching anomaly detection on and off during the run shows what
it costs; otherwise the cost per operator is measured after the run.

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

Always safe for the result. A script that catches the error raised by anomaly detection needs a check of its own
instead.

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
from hasten.doctor.source.syntax import dotted, is_name, walk
from hasten.evidence import Evidence, Finding, HowKnown, Measurement, Severity, severity_of
from hasten.evidence.weigh import in_words, share_of, steady_seconds, switched
from hasten.techniques.compute.debug_off import DebugOff


class DebugToolsOn(Rule):
    cure = DebugOff
    tried = True

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if a tool was on for half of the steps or more, or the training checked gradients."""
        steps = max(1, evidence.steps)
        events = [event for event in evidence.events_of("anomaly", "profiler") if event.steps >= steps / 2]
        events += [event for event in evidence.events_of("gradcheck") if event.count]
        places = {event.kind: event.where for event in events}
        if not evidence.events:  # calls were not recorded: only the global switches are known
            places |= {"anomaly": ""} if evidence.flags.anomaly else {}
            places |= {"profiler": ""} if evidence.flags.profiler else {}
        if not places:
            return None
        names = {"anomaly": "anomaly detection", "profiler": "a profiler", "gradcheck": "gradcheck"}
        cures = {
            "anomaly": "torch.autograd.set_detect_anomaly(True) out",
            "profiler": "the profiler out, or give it a schedule that ends",
            "gradcheck": "gradcheck out of the training loop",
        }
        tried = [trial for trial in evidence.measured_for(cls.name) if trial.where in places and trial.calls]
        seconds = sum(event.seconds for event in events if event.kind == "gradcheck") / steps
        live: tuple[str, ...] = ()
        worth, how_known = share_of(evidence, seconds + _of_tools(evidence, tried)), HowKnown.ESTIMATED
        if set(places) == {"anomaly"}:  # the cure switches only anomaly detection, so other tools' cost would be lost
            worth, how_known, live = switched(evidence, cls.name, worth, how_known)
        first_place = next((place for place in places.values() if place), "")
        return cls.finding(
            f"{' and '.join(names[kind] for kind in places)} left on in the training",
            f"take {' and '.join(cures[kind] for kind in places)}",
            severity_of(worth) if worth and worth >= 0.05 else Severity.MEDIUM,
            worth or None,
            how_known,
            place=first_place,
            details=(*live, *map(in_words, tried)),
            setting="true" if "anomaly" in places else "",
        )

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether a tool is on, even if its cost is not known yet."""
        return bool(cls.findings(evidence))

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find tools that are on unconditionally in a file that trains."""
        for call in code.script.calls if code.training.trains else ():
            full = code.script.qualified(call.func)
            name = full.rpartition(".")[2]
            if any(isinstance(ancestor, cst.If | cst.IfExp) for ancestor in code.script.ancestors(call)):
                continue  # an option of the script: `if args.debug: ...`
            if name == "set_detect_anomaly" and call.args and is_name(call.args[0].value, "True"):
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
    """Return whether an autograd profiler is switched by an argument: `profile(args.profile)`."""
    enabled = [arg for arg in call.args if arg.keyword is None or arg.keyword.value == "enabled"]
    return full.startswith("torch.autograd.") and bool(enabled) and not is_name(enabled[0].value, "True")


def _of_tools(evidence: Evidence, tried: Sequence[Measurement]) -> float:
    """Return the seconds per step that the tools cost: the extra time per operator times the operators of a step.

    The extra time was measured on an operator that computes almost nothing, for which the tools take the greatest
    share. That share is therefore the upper limit for a whole step.
    """
    slower = [trial for trial in tried if trial.saved > 0]
    least = math.prod(trial.after / trial.before for trial in slower)
    return min(sum(trial.saved * trial.calls for trial in slower), (1.0 - least) * steady_seconds(evidence))


def _holds_training(code: Code, call: cst.Call) -> bool:
    """Return whether the `with` block that a call opens contains a training loop."""
    for ancestor in code.script.ancestors(call):
        if isinstance(ancestor, cst.With):
            return any(node in code.training.step_loops for node in walk(ancestor.body))
    return False
