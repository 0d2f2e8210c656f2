"""Collect the facts of a script's loaders, models and optimizers for the evidence.

Optimizers and models may be deleted before the evidence is written (when they are locals of a function), so their facts
are also read at the first and the tenth step.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from hasten.evidence import OptimizerFacts
from hasten.evidence.facts import global_flags, optimizer_facts
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import BuiltLoader, Session
from hasten.taps.step_listeners import NEVER
from hasten.techniques.compute.compile import compiler
from hasten.techniques.compute.fused_optimizer import why_not_fusable
from hasten.techniques.data.probe import probe

_SECOND_LOOK = 10  # steps after which facts are read a second time


class Built:
    """Reads facts of loaders, models and optimizers, and remembers those of optimizers that are deleted later.

    Args:
        session: The process's session, which holds weak references to loaders, models and optimizers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[int, tuple[Any, Any]] = {}  # id of an optimizer -> weak reference, facts
        self._trains_in = threading.get_ident()  # the thread that makes the steps

    def facts(self, recorder: Recorder, ask: bool = False) -> dict[str, Any]:
        """Return the facts of the loaders, models and optimizers built so far.

        Args:
            recorder: The recorder of the steps, which knows the loaders' roles and the optimizers' steps.
            ask: Whether to probe map-style datasets for samples that repeat between passes (and so could be cached).
        """
        session, roles = self._session, recorder.roles()
        watched, optimizers = list(session.run.models.values()), list(session.optimizers.items())
        return {
            "flags": global_flags(session.run.facts, compiler()),
            "loaders": tuple(self._loader(i, roles.get(i, "unused"), ask) for i in range(len(session.loaders))),
            "models": tuple(facts for watch in watched if (facts := watch.facts()) is not None),
            "optimizers": tuple(
                optimizer_fact
                for key, (reference, where) in optimizers
                if (optimizer_fact := self._optimizer(recorder, key, reference, where)) is not None
            ),
        }

    def _optimizer(self, recorder: Recorder, key: int, reference: Any, where: str) -> OptimizerFacts | None:
        """Return an optimizer's facts; for a deleted optimizer those read earlier, or None if there are none."""
        rates = self._session.rates.get(key)
        rates = rates if rates and rates.reference is reference else None
        steps, optimizer = recorder.optimizer_steps.get(key, 0), reference()
        if optimizer is not None:
            return optimizer_facts(optimizer, where, steps, self._why_not_fusable(key, optimizer), rates)
        known_reference, facts = self._known.get(key, (None, None))
        # `key` is an id, which may since belong to another optimizer.
        if known_reference is not reference or facts is None:
            return None
        current: OptimizerFacts = dataclasses.replace(facts, steps=steps)
        return dataclasses.replace(current, schedule=rates.schedule, rates=tuple(rates.rates)) if rates else current

    def _why_not_fusable(self, key: int, optimizer: Any) -> str:
        """Return why this optimizer cannot use a fused kernel, or "".

        Gradients are read only in the thread that trains. Autograd sets them without holding the GIL, so another
        thread (the live file's or the clock's) could read freed memory.
        """
        if threading.get_ident() == self._trains_in:
            return _why_not(optimizer)
        known_facts = self._known.get(key, (None, None))[1]
        return why_not_fusable(optimizer) if known_facts is None else str(known_facts.why_not_fusable)

    def read_facts(self, steps: int) -> int:
        """Read the facts of what exists now; return the step to be called at next. Called at the end of a step."""
        self._trains_in = threading.get_ident()
        with self._session.run.guard("looking at what was built"):  # unusual optimizers or modules may raise
            for watch in list(self._session.run.models.values()):
                watch.facts()
            for key, (reference, where) in list(self._session.optimizers.items()):
                if (optimizer := reference()) is not None:
                    self._known[key] = (reference, optimizer_facts(optimizer, where, 0, _why_not(optimizer)))
        return _SECOND_LOOK if steps < _SECOND_LOOK else NEVER

    def _loader(self, index: int, role: str, ask: bool) -> Any:
        built: BuiltLoader = self._session.loaders[index]
        loader, probed = built.loader(), None
        if ask and loader is not None and not built.facts.iterable and role != "unused":
            probed = probe(loader)
        return dataclasses.replace(built.facts, role=role, batch_bytes=built.batch_bytes, probe=probed)


def _why_not(optimizer: Any) -> str:
    """Return why an optimizer cannot use a fused kernel, or "". Call it in the thread that trains."""
    if any(p.grad is not None and p.grad.is_sparse for g in optimizer.param_groups for p in g["params"]):
        return "its gradients are sparse"
    return why_not_fusable(optimizer)
