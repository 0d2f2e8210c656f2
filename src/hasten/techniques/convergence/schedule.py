"""A learning-rate schedule for a script that has none."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

from hasten.plan import Setting
from hasten.techniques.base import Resource, Trajectory
from hasten.techniques.convergence.inside_step import InsideStep, scaled

KINDS = ("linear", "1cycle")
_WARM = 0.3  # of a 1cycle's steps rise; it begins at 1/25 and ends at 1/250,000, as torch's OneCycleLR does
_FIRST, _LAST = 1 / 25, 1 / 25 / 1e4


class Schedule(Trajectory):
    """Let the learning rate fall to zero over a number of optimizer steps, linearly or as one cycle.

    A setting is a table `{kind, steps}`: "linear" falls from the script's rate to zero (arXiv 2502.15938: better than
    to a tenth); "1cycle" rises to it over 30 % of the steps and falls by a cosine, as torch's `OneCycleLR`. Only while
    the optimizer steps: logs and checkpoints have the script's rate. Beyond `steps` the rate is zero, and nothing is
    learnt any more. A run that goes on from a checkpoint goes on in the schedule: by the count of steps in Adam's
    state, under the Trainer by its own. Where a script's checkpoint holds none (SGD), and where there is a schedule of
    torch's own, nothing is changed from there on. One that a script sets by hand (`group["lr"] = ...`) is multiplied.
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
        self._done: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._order: list[weakref.ref[Any]] = []  # optimizers as they came, for a checkpoint
        self._inside: list[InsideStep] = []
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()  # loaded, from a state without a count

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Check that both fields are there, and nothing else."""
        wrong = f"must be a table such as {cls.example}, of kind {' or '.join(KINDS)}"
        if not isinstance(setting, dict) or set(setting) != {"kind", "steps"} or setting["kind"] not in KINDS:
            return wrong
        steps = setting["steps"]
        return "" if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1 else wrong

    def optimizer(self, optimizer: Any) -> None:
        """Have its steps follow the schedule."""
        if not any("lr" in group for group in optimizer.param_groups):
            self.refused(f"{type(optimizer).__name__} has no learning rate")
            return
        held = weakref.ref(optimizer)
        steps = InsideStep(lambda group: self._change(held(), group))
        steps.wrap(optimizer)
        self._inside.append(steps)
        self._done[optimizer] = 0
        self._order.append(held)
        optimizer.register_step_post_hook(self._stepped)
        optimizer.register_load_state_dict_post_hook(self._loaded)
        self.did("optimizer")

    def over(self) -> None:
        """Change nothing more; what is over is kept, for a checkpoint that is made behind the fit."""
        while self._inside:
            self._inside.pop().leave()

    def state_dict(self) -> dict[str, Any]:
        """Steps that are over, of each optimizer; -1 where nothing is changed any more."""
        done = [self._done.get(one, -1) if (one := held()) is not None else -1 for held in self._order]
        return {"done": done} if done else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was made, also where the optimizer's state has no count."""
        for held, done in zip(self._order, state.get("done", ()), strict=False):
            if (optimizer := held()) is not None and optimizer in self._done and done >= 0:
                self._done[optimizer] = done
                self._unknown.discard(optimizer)

    def _change(self, optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
        done = self._done.get(optimizer)
        if done is None or group.get("lr") is None:
            return {}
        if optimizer in self._unknown:
            self._leave(optimizer, "it goes on from a checkpoint that holds no count of steps")
            return {}
        if "initial_lr" in group:
            self._leave(optimizer, "the script has a schedule of its own")
            return {}
        return {"lr": scaled(group["lr"], factor(self._kind, done, self._total))}

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if optimizer in self._done:
            self._done[optimizer] += 1

    def _loaded(self, optimizer: Any) -> None:
        """Go on where the checkpoint was made, as far as the optimizer's state says."""
        if optimizer not in self._done:
            return
        counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        if counts:
            self._done[optimizer] = max(counts)
        else:
            self._unknown.add(optimizer)  # unless `load_state_dict` knows

    def _leave(self, optimizer: Any, why: str) -> None:
        self._done.pop(optimizer, None)
        self.let_go(why)


def factor(kind: str, done: int, total: int) -> float:
    """Return what the rate is multiplied by in the step after `done` ones, of `total`.

    Args:
        kind: "linear" or "1cycle".
        done: Steps that are over.
        total: Steps of the whole schedule; behind them the factor is 0.
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
    return end + (start - end) / 2 * (1 + math.cos(math.pi * min(1.0, share)))
