"""Debug tools that were left on, switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.replaced import Replaced


class DebugOff(Technique):
    """Anomaly detection writes down no tracebacks in the forward; a backward still looks for NaN.

    A backward that makes NaN raises the same error at the same operator, for scripts that skip such batches; the
    forward line that goes with it is not known (take debug_off out of the plan to see it). That check is what
    anomaly detection still costs (some us for each node of the graph); with `check_nan=False` nothing is left to
    do. Profilers and gradient checks are left alone, since their result is asked for. The Trainer switches none of
    them on by itself.
    """

    name = "debug_off"
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
