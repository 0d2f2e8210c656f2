"""Objects that a script has built: its loaders, models and optimizers, as the evidence has them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from hasten.evidence import OptimizerFacts
from hasten.evidence.facts import global_flags, optimizer_facts
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import BuiltLoader, Session
from hasten.taps.steps_over import NEVER
from hasten.techniques.compute.compile import compiler
from hasten.techniques.compute.fused_optimizer import why_not_fusable
from hasten.techniques.data.probe import probe

_SECOND_LOOK = 10  # steps after which what was built is looked at again: it may be gone when the script is over


class Built:
    """Reads what was built, and remembers optimizers that were built within a function.

    Args:
        session: The process's session, which knows loaders, models and optimizers.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: dict[int, tuple[Any, Any]] = {}  # id of an optimizer -> weak reference, facts
        self._trains_in = threading.get_ident()  # the thread that makes the steps

    def facts(self, recorder: Recorder, ask: bool = False) -> dict[str, Any]:
        """Return what the script has built so far; `ask`: ask datasets what of them repeats itself."""
        session, roles = self._session, recorder.roles()
        watched, optimizers = list(session.run.models.values()), list(session.optimizers.items())
        return {
            "flags": global_flags(session.run.seen, compiler()),
            "loaders": tuple(self._loader(i, roles.get(i, "unused"), ask) for i in range(len(session.loaders))),
            "models": tuple(facts for watch in watched if (facts := watch.facts()) is not None),
            "optimizers": tuple(
                known
                for key, (held, where) in optimizers
                if (known := self._optimizer(recorder, key, held, where)) is not None
            ),
        }

    def _optimizer(self, recorder: Recorder, key: int, held: Any, where: str) -> OptimizerFacts | None:
        """The facts of an optimizer; of one that is gone, as it was when it was looked at, if it was."""
        rates = self._session.rates.get(key)
        rates = rates if rates and rates.held is held else None
        steps, optimizer = recorder.optimizer_steps.get(key, 0), held()
        if optimizer is not None:
            return optimizer_facts(optimizer, where, steps, self._why_not_fusable(key, optimizer), rates)
        seen, facts = self._seen.get(key, (None, None))
        if seen is not held or facts is None:
            return None
        kept: OptimizerFacts = dataclasses.replace(facts, steps=steps)
        return dataclasses.replace(kept, schedule=rates.schedule, rates=tuple(rates.rates)) if rates else kept

    def _why_not_fusable(self, key: int, optimizer: Any) -> str:
        """Why this optimizer has no fused kernel, or "".

        Gradients are read in the thread that trains only: autograd sets them without Python's lock, and who reads one
        just then from another thread (the live file's, the clock's) reads freed memory.
        """
        if threading.get_ident() == self._trains_in:
            return _why_not(optimizer)
        seen = self._seen.get(key, (None, None))[1]
        return why_not_fusable(optimizer) if seen is None else str(seen.why_not_fusable)

    def look(self, steps: int) -> int:
        """So many steps are over: remember what there is, which may be gone when the evidence is written."""
        self._trains_in = threading.get_ident()
        with self._session.run.guard("looking at what was built"):  # an optimizer or a module like no other
            for watch in list(self._session.run.models.values()):
                watch.facts()
            for key, (held, where) in list(self._session.optimizers.items()):
                if (optimizer := held()) is not None:
                    self._seen[key] = (held, optimizer_facts(optimizer, where, 0, _why_not(optimizer)))
        return _SECOND_LOOK if steps < _SECOND_LOOK else NEVER

    def _loader(self, index: int, role: str, ask: bool) -> Any:
        known: BuiltLoader = self._session.loaders[index]
        loader, asked = known.held(), None
        if ask and loader is not None and not known.facts.iterable and role != "unused":
            asked = probe(loader)
        return dataclasses.replace(known.facts, role=role, batch_bytes=known.batch_bytes, probe=asked)


def _why_not(optimizer: Any) -> str:
    """Call it in the thread that trains."""
    if any(p.grad is not None and p.grad.is_sparse for g in optimizer.param_groups for p in g["params"]):
        return "its gradients are sparse"
    return why_not_fusable(optimizer)
