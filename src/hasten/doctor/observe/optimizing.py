"""Observe how weights are updated: learning rates, schedulers, zeroing of gradients, and syncs of replicas."""

from __future__ import annotations

import functools
import sys
from typing import Any

from hasten.doctor.observe.event_log import event_log, script_place
from hasten.doctor.observe.replicas import tap_replicas
from hasten.evidence.facts import LearningRates
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

# Rates are read after each of the first `_ALL_OF_THE_FIRST` steps, then every `_INTERVAL` steps, and `_LATER` steps
# after that every `_LATE_INTERVAL`.
_ALL_OF_THE_FIRST = 32
_INTERVAL = 8
_LATER = 512
_LATE_INTERVAL = 32
_RATES = 64  # distinct rates to keep per optimizer, at most


def install(session: Session) -> None:
    """Set the taps."""
    log = event_log(session)
    rates = Rates(session)
    _tap_schedules(rates)
    rates.start()
    _tap_zero_grad(session, log)
    tap_replicas(session, log)


class Rates:
    """Reads the learning rates of all optimizers: before the first step, after each of the next, then less often.

    Args:
        session: The process's session; the rates are added to `session.rates`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._all_until = _ALL_OF_THE_FIRST  # rates are read after every step up to this one
        self._first_step_hook: Any = None

    def start(self) -> None:
        """Start reading rates after steps, and read more often when an optimizer is built."""
        import torch

        self._session.step_listeners.add(self.on_step, 1)
        tap(torch.optim.Optimizer, "__init__", self._building)

    def _building(self, plain: Any) -> Any:
        """Wrap `Optimizer.__init__` to read the rates after each step for some steps again."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            self._session.step_listeners.call_soon(self.on_step)
            self._all_until = self._session.run.recorder.steps + _ALL_OF_THE_FIRST if self._session.run.recorder else 0
            if self._first_step_hook is None:
                self._first_step_hook = register_optimizer_step_pre_hook(self._before_the_first)

        return __init__

    def _before_the_first(self, optimizer: Any, *_: Any) -> None:
        with self._session.run.guard("reading learning rates"):  # a script's own optimizer may have unusual groups
            self._read(id(optimizer), optimizer)

    def on_step(self, steps: int) -> int:
        """Read the rates of all optimizers. Return how many steps must be over at the next call."""
        if self._first_step_hook is not None:
            self._first_step_hook.remove()
            self._first_step_hook = None
        with self._session.run.guard("reading learning rates"):
            for key, (reference, _) in self._session.optimizers.items():
                if (optimizer := reference()) is not None:
                    self._read(key, optimizer)
        since = steps - self._all_until
        return steps + (1 if since < 0 else _INTERVAL if since < _LATER else _LATE_INTERVAL)

    def scheduled(self, optimizer: Any, schedule: str) -> None:
        """Record the class name of a scheduler that was built for an optimizer."""
        if (rates := self._rates_of(id(optimizer))) is not None:
            rates.schedule = schedule

    def _rates_of(self, key: int) -> LearningRates | None:
        """Return the rates of the optimizer with this id, creating them on first use; None if it is unknown."""
        registered = self._session.optimizers.get(key)
        if registered is None:
            return None
        rates = self._session.rates.get(key)
        if rates is None or rates.reference is not registered[0]:  # the id of a deleted optimizer was reused
            rates = self._session.rates[key] = LearningRates(registered[0])
        return rates

    def _read(self, key: int, optimizer: Any) -> None:
        """Add the first group's rate, if the optimizer has stepped since the last reading."""
        rates = self._rates_of(key)
        if rates is None or len(rates.rates) >= _RATES or not optimizer.param_groups:
            return
        recorder = self._session.run.recorder
        steps = recorder.optimizer_steps.get(key, 0) if recorder is not None else rates.steps
        if steps == rates.steps:
            return
        rates.steps = steps
        rate = optimizer.param_groups[0].get("lr")
        if not isinstance(rate, int | float):
            if not getattr(rate, "is_cpu", False):
                return  # no rate, or a tensor on a device: reading that would be a sync
            rate = float(rate)
        if rate not in rates.rates:
            rates.rates.append(float(rate))


def _tap_schedules(rates: Rates) -> None:
    """Tap the constructors of torch's schedulers."""
    from torch.optim import lr_scheduler

    def built(plain: Any) -> Any:
        @functools.wraps(plain)
        def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, optimizer, *args, **kwargs)
            # ChainedScheduler is given schedulers instead of an optimizer, so the attribute is read.
            rates.scheduled(getattr(self, "optimizer", None), type(self).__name__)

        return __init__

    for name in ("LRScheduler", "SequentialLR", "ReduceLROnPlateau", "ChainedScheduler"):
        if "__init__" in vars(getattr(lr_scheduler, name, object)):
            tap(getattr(lr_scheduler, name), "__init__", built)


def _tap_zero_grad(session: Session, log: Any) -> None:
    """Note calls that fill gradients with zeros instead of None.

    `Optimizer.zero_grad` is tapped elsewhere, and calls `session.on_zeroed`; `Module.zero_grad` is tapped here.
    """
    import torch

    def zeroed() -> None:
        place = script_place(sys._getframe(2))
        if place is not None:
            log.note_at("zero_grad", place, detail="optimizer")

    session.on_zeroed = zeroed

    def clearing(plain: Any) -> Any:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            plain(self, set_to_none)
            if not set_to_none:
                log.note("zero_grad", detail="module")

        return zero_grad

    tap(torch.nn.Module, "zero_grad", clearing)
