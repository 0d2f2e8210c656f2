"""The technique `lr_scale`: the script's learning rate times a factor."""

from __future__ import annotations

from typing import Any

from hasten.plan import Setting
from hasten.techniques.base import Liveness, Resource, Trajectory
from hasten.techniques.convergence.inside_step import InsideStep, scaled

_MOST = 1e4


class LrScale(Trajectory):
    """Step with the script's learning rate times a factor.

    Each group's rate is multiplied while its optimizer steps and restored after the step, so schedules (warm-up, decay,
    one that reads the loss), logs and checkpoints do not change: a run that resumes from a checkpoint without this
    technique has the script's rate. Terms that an optimizer multiplies by the rate are scaled too, such as AdamW's
    weight decay. Optimizers without `lr` in their groups are left alone. The technique is for scripts without an
    argument for the rate; if there is one, use it.
    """

    name = "lr_scale"
    relieves = Resource.OPTIMIZER
    sources = ("Goyal et al. 2017",)
    values = float
    acts_on = "an optimizer with a learning rate"
    liveness = Liveness.STEP

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._factor = float(setting) if isinstance(setting, (int, float)) else 1.0
        self._steps = InsideStep(self._change)

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Return what is wrong with a setting, which must be a number above 0."""
        if isinstance(setting, (int, float)) and not isinstance(setting, bool) and 0 < setting <= _MOST:
            return ""
        return f"must be a number above 0, of {_MOST:g} at the most"

    def optimizer(self, optimizer: Any) -> None:
        """Let the optimizer step with the scaled rate."""
        if not any("lr" in group for group in optimizer.param_groups):
            self.refused(f"{type(optimizer).__name__} has no learning rate")
            return
        self._steps.wrap(optimizer)
        self.did("optimizer")

    def teardown(self) -> None:
        """Stop changing the optimizers' steps."""
        self._steps.leave()

    def _change(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"lr": scaled(group["lr"], self._factor)} if self.active and group.get("lr") is not None else {}
