"""The technique `schedule`: a learning-rate schedule for a script that has none."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

from hasten.plan import Setting
from hasten.techniques.base import Resource, Trajectory
from hasten.techniques.convergence.inside_step import InsideStep, scaled

KINDS = ("linear", "1cycle")
# The defaults of torch's OneCycleLR: the share of steps in which the rate rises, and the first and the last factor.
_WARM = 0.3
_FIRST, _LAST = 1 / 25, 1 / 25 / 1e4


class Schedule(Trajectory):
    """Let the learning rate fall to zero over a number of optimizer steps, linearly or as one cycle.

    A setting is a table `{kind, steps}`: "linear" falls from the script's rate to zero (arXiv 2502.15938: better than
    to a tenth); "1cycle" rises to the script's rate over 30 % of the steps and falls by a cosine, like torch's
    `OneCycleLR`. The rate changes only while the optimizer steps: logs and checkpoints see the script's rate. After
    `steps` the rate is zero, and nothing is learned any more. A run that resumes from a checkpoint continues the
    schedule, by the count of steps in Adam's state; under the Trainer, by the technique's own count. If a script's
    checkpoint has no count (SGD), or the script has a scheduler of torch, the rate is the script's from then on. A rate
    that a script sets by hand (`group["lr"] = ...`), or torch's ReduceLROnPlateau does, is multiplied.
    """

    name = "schedule"
    relieves = Resource.OPTIMIZER
    sources = ("arXiv 2502.15938", "Smith 2018", "Kuhn, tip 1")
    values = dict
    example = '{kind = "linear", steps = 1000}'
    acts_on = "an optimizer with a learning rate"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        table = setting if isinstance(setting, dict) else {}
        self._kind, self._total = str(table.get("kind")), int(table.get("steps", 1))
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # optimizer -> its steps so far
        self._order: list[weakref.ref[Any]] = []  # optimizers in the order of `optimizer` calls, for checkpoints
        self._inside: list[InsideStep] = []
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that loaded a state without a count

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Return what is wrong with a setting, which must have exactly the two fields."""
        wrong = f"must be a table such as {cls.example}, of kind {' or '.join(KINDS)}"
        if not isinstance(setting, dict) or set(setting) != {"kind", "steps"} or setting["kind"] not in KINDS:
            return wrong
        steps = setting["steps"]
        return "" if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1 else wrong

    def optimizer(self, optimizer: Any) -> None:
        """Let an optimizer's steps follow the schedule."""
        if not any("lr" in group for group in optimizer.param_groups):
            self.refused(f"{type(optimizer).__name__} has no learning rate")
            return
        optimizer_ref = weakref.ref(optimizer)
        steps = InsideStep(lambda group: self._change(optimizer_ref(), group))
        steps.wrap(optimizer)
        self._inside.append(steps)
        self._steps[optimizer] = 0
        self._order.append(optimizer_ref)
        optimizer.register_step_post_hook(self._stepped)
        optimizer.register_load_state_dict_post_hook(self._loaded)
        self.did("optimizer")

    def teardown(self) -> None:
        """Stop changing rates. Counts are kept, for a checkpoint that is saved after the fit."""
        while self._inside:
            self._inside.pop().leave()

    def state_dict(self) -> dict[str, Any]:
        """Return each optimizer's number of steps so far; -1 if its rate is not changed any more."""
        counts = [self._steps.get(optimizer, -1) if (optimizer := ref()) is not None else -1 for ref in self._order]
        return {"done": counts} if counts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the checkpoint's step, even if the optimizer's own state has no count."""
        for ref, count in zip(self._order, state.get("done", ()), strict=False):
            if (optimizer := ref()) is not None and optimizer in self._steps and count >= 0:
                self._steps[optimizer] = count
                self._unknown.discard(optimizer)

    def _change(self, optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
        """Return the rate for a group's next step."""
        count = self._steps.get(optimizer)
        if count is None or group.get("lr") is None:
            return {}
        if optimizer in self._unknown:
            self._leave(optimizer, "it goes on from a checkpoint that holds no count of steps")
            return {}
        if "initial_lr" in group:  # set by torch's LRSchedulers, except ReduceLROnPlateau
            self._leave(optimizer, "the script has a schedule of its own")
            return {}
        return {"lr": scaled(group["lr"], factor(self._kind, count, self._total))}

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if optimizer in self._steps:
            self._steps[optimizer] += 1

    def _loaded(self, optimizer: Any) -> None:
        """Continue at the count of steps in an optimizer's loaded state, if it has one."""
        if optimizer not in self._steps:
            return
        counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        if counts:
            self._steps[optimizer] = max(counts)
        else:
            self._unknown.add(optimizer)  # until `load_state_dict` brings a count

    def _leave(self, optimizer: Any, why: str) -> None:
        """Leave an optimizer's rate to the script from now on, and tell the user."""
        self._steps.pop(optimizer, None)
        self.gave_up(why)


def factor(kind: str, done: int, total: int) -> float:
    """Return the factor on the rate in the step after the first `done`.

    Args:
        kind: "linear" or "1cycle".
        done: Number of steps so far.
        total: Number of steps of the whole schedule; after them the factor is 0.
    """
    if done >= total:
        return 0.0
    if kind == "linear":
        return 1 - done / total
    top, last = _WARM * total - 1, total - 1
    if done <= top or last <= top:
        return _between(_FIRST, 1.0, done / top if top > 0 else 1.0)
    return _between(1.0, _LAST, (done - top) / (last - top))


def _between(start: float, end: float, share: float) -> float:
    """Return the value at a share of a half cosine from `start` to `end`."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * min(1.0, share)))
