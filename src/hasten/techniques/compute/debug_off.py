"""Debug tools that were left on, switched off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence, Finding, HowKnown, Measurement, Severity, severity_of, split_place
from hasten.evidence.weigh import in_words, share_of, steady_seconds
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.replaced import Replaced


class DebugOff(Technique):
    """Anomaly detection writes down no tracebacks in the forward; a backward still looks for NaN.

    A backward that makes NaN raises the same error at the same operator, for scripts that skip such batches; the
    forward line that goes with it is not known (take debug_off out of the plan to see it). With `check_nan=False`
    nothing is left to do. Profilers and gradient checks are left alone, since their result is asked for. The Trainer
    switches none of them on by itself.
    """

    name = "debug_off"
    finds = "debug_tools_on"
    effect = Effect.EXACT
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 18", "Kuhn, tip 12")
    acts_on = "anomaly detection"
    liveness = Liveness.STEP

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On where one was seen."""
        if evidence.flags.anomaly:
            return Choices((True,), "left on: anomaly detection")
        if evidence.flags.profiler:
            return Refusal(f"{evidence.flags.profiler} is on, whose result the script may want: take it out by hand")
        return Refusal("no debug tool is on")

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
            technique=cls.name if "anomaly" in found else "",
            setting="true" if "anomaly" in found else "",
            sources=cls.sources,
        )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._wish: _Wish | None = None
        self._switch: Any = None  # torch's own
        self._replaced: list[Replaced] = []

    def on(self) -> None:
        """Switch anomaly detection off for the next forward, where the script has it on."""
        super().on()
        if self._wish is None:
            self.process()
        assert self._wish is not None
        if self._wish.enabled:
            self.did("anomaly detection")
        self._switch(False, self._wish.check_nan)

    def off(self) -> None:
        """Set it as the script wants it."""
        super().off()
        if self._wish is not None:
            self._switch(self._wish.enabled, self._wish.check_nan)

    def process(self) -> None:
        """Switch anomaly detection on in backwards only, where the script wants it on."""
        import torch

        if not hasattr(torch.autograd, "_engine_run_backward"):
            raise HastenError("this version of torch runs backwards elsewhere", "anomaly detection stays as it is")
        self._wish = wish = _Wish(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        self._switch = switch = torch.set_anomaly_enabled

        def telling(plain: Any) -> Any:
            def set_anomaly_enabled(enabled: bool, check_nan: bool = True) -> None:
                # Also says what is wrong with the arguments.
                switch(False if self.active else enabled, check_nan)
                wish.enabled, wish.check_nan = enabled, check_nan
                if enabled:
                    self.did("anomaly detection")

            return set_anomaly_enabled

        def looking(plain: Any) -> Any:
            def run_backward(*args: Any, **kwargs: Any) -> Any:
                if not (wish.enabled and wish.check_nan and self.active):
                    return plain(*args, **kwargs)
                switch(True, True)
                try:
                    return plain(*args, **kwargs)
                finally:
                    switch(False, True)

            return run_backward

        # What a script asks, and what torch.autograd.detect_anomaly puts back at its end, is what was wished.
        self._replaced = [
            Replaced(torch, "set_anomaly_enabled", telling),
            Replaced(torch, "is_anomaly_enabled", lambda plain: lambda: wish.enabled),
            Replaced(torch, "is_anomaly_check_nan_enabled", lambda plain: lambda: wish.check_nan),
            Replaced(torch.autograd, "_engine_run_backward", looking),
            Replaced(torch.autograd.graph, "_engine_run_backward", looking),
        ]
        for function in self._replaced:
            function.put_in_place()

    def restore(self) -> None:
        """Put torch's own functions back, and anomaly detection as it was asked for."""
        if self._wish is None:
            return
        for function in self._replaced:
            function.put_back()
        self._switch(self._wish.enabled, self._wish.check_nan)
        self._replaced, self._wish = [], None


@dataclass
class _Wish:
    """How the script has set anomaly detection."""

    enabled: bool
    check_nan: bool


def _of_tools(evidence: Evidence, tried: Sequence[Measurement]) -> float:
    """Seconds a step that they take: what an operator costs more, for as many as a step was seen to run.

    An operator that does next to nothing was tried, so no step owes them a greater share than that one does.
    """
    slower = [one for one in tried if one.saved > 0]
    least = math.prod(one.after / one.before for one in slower)
    return min(sum(one.saved * one.calls for one in slower), (1.0 - least) * steady_seconds(evidence))
