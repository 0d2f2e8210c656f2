"""Keep anomaly detection that a script left on out of its forwards, without losing the NaN check of its backwards.

Anomaly detection does two things: each forward operator records a traceback, and each node of a backward is checked for
NaN. Wrappers around torch's switch keep it off in forwards and turn it on for the duration of a backward, so the check
and its error stay. The script always reads back the setting that it made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.replaced import ReplacedFunction


class DebugOff(Technique):
    """Stop anomaly detection from recording tracebacks in the forward; the backward still checks for NaN.

    A backward that produces NaN raises the same error at the same operator, for scripts that skip such batches; only
    the forward line that belongs to it is unknown (take debug_off out of the plan to see it). That check is all that
    anomaly detection still costs (some us for each node of the graph); with `check_nan=False` no cost is left.
    Profilers and gradient checks are left alone, since the script wants their result. The Trainer never switches any
    of these tools on unasked.
    """

    name = "debug_off"
    effect = Effect.EXACT
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 18", "Kuhn, tip 12")
    acts_on = "anomaly detection"
    liveness = Liveness.STEP

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it if anomaly detection was on."""
        if evidence.flags.anomaly:
            return Choices((True,), "left on: anomaly detection")
        if evidence.flags.profiler:
            return Refusal(f"{evidence.flags.profiler} is on, whose result the script may want: take it out by hand")
        return Refusal("no debug tool is on")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._wish: _Wish | None = None
        self._switch: Any = None  # torch's own `set_anomaly_enabled`
        self._replaced: list[ReplacedFunction] = []

    def on(self) -> None:
        """Switch anomaly detection off for the next forward, if the script has it on."""
        super().on()
        if self._wish is None:
            self.process()
        assert self._wish is not None
        if self._wish.enabled:
            self.did("anomaly detection")
        self._switch(False, self._wish.check_nan)

    def off(self) -> None:
        """Set anomaly detection as the script wants it."""
        super().off()
        if self._wish is not None:
            self._switch(self._wish.enabled, self._wish.check_nan)

    def process(self) -> None:
        """Switch anomaly detection on in backwards only, if the script wants it on.

        Raises:
            HastenError: This version of torch has no function around all backwards that could be wrapped.
        """
        import torch

        if not hasattr(torch.autograd, "_engine_run_backward"):
            raise HastenError("this version of torch runs backwards elsewhere", "anomaly detection stays as it is")
        self._wish = wish = _Wish(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        self._switch = switch = torch.set_anomaly_enabled

        def telling(plain: Any) -> Any:
            def set_anomaly_enabled(enabled: bool, check_nan: bool = True) -> None:
                # First, so that wrong arguments raise torch's own error before the wish is recorded.
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

        # The two getters return the script's wish, not the real state: `torch.autograd.detect_anomaly` reads them when
        # it starts and restores what it read at its end. torch.autograd imports `_engine_run_backward` from
        # torch.autograd.graph by name, so both names are replaced.
        self._replaced = [
            ReplacedFunction(torch, "set_anomaly_enabled", telling),
            ReplacedFunction(torch, "is_anomaly_enabled", lambda plain: lambda: wish.enabled),
            ReplacedFunction(torch, "is_anomaly_check_nan_enabled", lambda plain: lambda: wish.check_nan),
            ReplacedFunction(torch.autograd, "_engine_run_backward", looking),
            ReplacedFunction(torch.autograd.graph, "_engine_run_backward", looking),
        ]
        for function in self._replaced:
            function.put_in_place()

    def restore(self) -> None:
        """Restore torch's own functions, and anomaly detection as the script set it."""
        if self._wish is None:
            return
        for function in self._replaced:
            function.put_back()
        self._switch(self._wish.enabled, self._wish.check_nan)
        self._replaced, self._wish = [], None


@dataclass
class _Wish:
    """Anomaly detection as the script has set it."""

    enabled: bool
    check_nan: bool
