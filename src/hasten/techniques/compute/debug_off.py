"""Debug tools that were left on, switched off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hasten.evidence import Evidence, Finding, HowKnown, Measurement, Severity, severity_of, split_place
from hasten.evidence.weigh import in_words, share_of, steady_seconds
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique

_PROFILED_STEPS = 20


class DebugOff(Technique):
    """Anomaly detection does nothing, and a profiler without a schedule stops after its first 20 optimizer steps.

    What the profiler has gathered by then can still be printed and exported. Gradient checks are left alone,
    since their result is asked for. The Trainer switches neither on by itself.
    """

    name = "debug_off"
    finds = "debug_tools_on"
    effect = Effect.EXACT
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 18", "Kuhn, tip 12")
    acts_on = "anomaly detection or a profiler"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On where one was seen."""
        found = ["anomaly detection"] if evidence.flags.anomaly else []
        found += [evidence.flags.profiler] if evidence.flags.profiler else []
        if not found:
            return Refusal("no debug tool is on")
        return Choices((True,), f"left on: {', '.join(found)}")

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
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
        tried = [one for one in evidence.measured_for(cls.finds) if one.where in found and one.calls]
        seconds = sum(event.seconds for event in events if event.kind == "gradcheck") / steps
        worth = share_of(evidence, seconds + _of_tools(evidence, tried)) or None
        first = next((place for place in found.values() if place), "")
        file, line = split_place(first)
        return Finding(
            cls.finds,
            f"{' and '.join(names[kind] for kind in found)} left on in the training",
            f"take {' and '.join(cures[kind] for kind in found)}",
            severity_of(worth) if worth and worth >= 0.05 else Severity.MEDIUM,
            worth, HowKnown.ESTIMATED, file, line,
            details=tuple(map(in_words, tried)),
            technique=cls.name if set(found) != {"gradcheck"} else "",
            setting="true" if set(found) != {"gradcheck"} else "",
            sources=cls.sources,
        )  # fmt: skip

    def process(self) -> None:
        """Take the switches out."""
        import torch

        self._anomaly_off(torch)
        self._stop_profilers(torch)

    def _anomaly_off(self, torch: Any) -> None:
        grad_mode = torch.autograd.anomaly_mode
        set_mode = torch.set_anomaly_enabled

        def stay_off(enabled: bool, check_nan: bool = True) -> None:
            if enabled:
                self.did("anomaly detection")
            set_mode(False, check_nan)

        torch.set_anomaly_enabled = grad_mode.torch.set_anomaly_enabled = stay_off

    def _stop_profilers(self, torch: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        profile = torch.profiler.profile
        start, stop = profile.start, profile.stop
        running: dict[int, list[Any]] = {}

        def started(this: Any) -> None:
            start(this)
            if getattr(this, "schedule", None) is torch.profiler.profiler._default_schedule_fn:
                running[id(this)] = [this, 0]

        def stopped(this: Any) -> None:
            if running.pop(id(this), None) is not None or not getattr(this, "_hasten_stopped", False):
                stop(this)

        def after_step(*_: Any) -> None:
            for entry in list(running.values()):
                entry[1] += 1
                if entry[1] >= _PROFILED_STEPS:
                    stopped(entry[0])
                    entry[0]._hasten_stopped = True
                    self.did("profiler")

        profile.start, profile.stop = started, stopped
        register_optimizer_step_post_hook(after_step)


def _of_tools(evidence: Evidence, tried: Sequence[Measurement]) -> float:
    """Seconds a step that they take: what an operator costs more, for as many as a step was seen to run.

    An operator that does next to nothing was tried, so no step owes them a greater share than that one does.
    """
    slower = [one for one in tried if one.saved > 0]
    least = math.prod(one.after / one.before for one in slower)
    return min(sum(one.saved * one.calls for one in slower), (1.0 - least) * steady_seconds(evidence))
