"""Parameters that get gradients which no optimizer uses: a part of the model that was meant to be frozen."""

from __future__ import annotations

import sys
from typing import Any

from hasten.taps.protocol import Session

_FIRST, _AGAIN = 6, 16  # steps that are over when parameters are looked at, and looked at again


def install(session: Session) -> None:
    """Look twice."""
    observer = UnusedGradients(session)
    session.observers.append(observer)
    session.steps_over.tell(observer.on_step, _FIRST)


class UnusedGradients:
    """Looks which parameters hold a gradient, belong to no optimizer, and stay as they are."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._first: dict[int, int] = {}  # id of a stray parameter -> how often it had been changed
        self._paths: tuple[str, ...] = ()

    def on_step(self, steps: int) -> int:
        """So many steps are over, in the thread that trains: gradients may be read."""
        try:
            found = self._found()
        except Exception as error:  # a module or an optimizer like no other
            self._session.run.skip("looking for gradients that nobody uses", error)
            return sys.maxsize
        if steps < _AGAIN:
            self._first = {key: changes for key, (changes, _) in found.items()}
            return _AGAIN
        self._paths = tuple(
            dict.fromkeys(path for key, (changes, path) in found.items() if self._first.get(key) == changes)
        )
        return sys.maxsize

    def _found(self) -> dict[int, tuple[int, str]]:
        """Stray parameters by id: how often they have been changed, and the path of the layer they belong to."""
        optimizers = [held() for held, _ in self._session.optimizers.values()]
        moved = {id(p) for one in optimizers if one is not None for group in one.param_groups for p in group["params"]}
        if not moved:
            return {}
        found = {}
        for watch in self._session.run.models.values():
            module = watch.module()
            for name, parameter in module.named_parameters() if module is not None else ():
                if parameter.requires_grad and parameter.grad is not None and id(parameter) not in moved:
                    path = name.rpartition(".")[0].removeprefix("_orig_mod.")
                    found[id(parameter)] = parameter._version, path
        return found

    def facts(self) -> dict[str, Any]:
        """The layers whose gradients nobody uses."""
        return {"strays": self._paths} if self._paths else {}
