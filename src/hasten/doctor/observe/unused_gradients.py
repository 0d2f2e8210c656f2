"""Find parameters with gradients that no optimizer uses: a part of the model that was probably meant to be frozen.

Parameters are checked twice. A parameter counts only if it is unchanged in between, because the script may update it
without an optimizer.
"""

from __future__ import annotations

import sys
from typing import Any

from hasten.taps.protocol import Session

_FIRST_CHECK = 6  # steps before it
_SECOND_CHECK = 16


def install(session: Session) -> None:
    """Check the parameters twice."""
    observer = UnusedGradients(session)
    session.observers.append(observer)
    session.step_listeners.add(observer.on_step, _FIRST_CHECK)


class UnusedGradients:
    """Finds the parameters that hold a gradient, belong to no optimizer, and do not change."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._first: dict[int, int] = {}  # id of a stray parameter -> its version at the first check
        self._paths: tuple[str, ...] = ()

    def on_step(self, steps: int) -> int:
        """Check the parameters. Called in the training thread between steps, when gradients may be read.

        Returns:
            How many steps must be over at the next call.
        """
        try:
            strays = self._find()
        except Exception as error:  # an unusual module or optimizer: a tap never breaks a script
            self._session.run.skip("looking for unused gradients", error)
            return sys.maxsize
        if steps < _SECOND_CHECK:
            self._first = {key: version for key, (version, _) in strays.items()}
            return _SECOND_CHECK
        self._paths = tuple(
            dict.fromkeys(path for key, (version, path) in strays.items() if self._first.get(key) == version)
        )
        return sys.maxsize

    def _find(self) -> dict[int, tuple[int, str]]:
        """Return stray parameters by id, each with its version and the path of its layer."""
        optimizers = [reference() for reference, _ in self._session.optimizers.values()]
        used = {id(p) for opt in optimizers if opt is not None for group in opt.param_groups for p in group["params"]}
        if not used:
            return {}
        strays = {}
        for watch in self._session.run.models.values():
            module = watch.module()
            for name, parameter in module.named_parameters() if module is not None else ():
                if parameter.requires_grad and parameter.grad is not None and id(parameter) not in used:
                    path = name.rpartition(".")[0].removeprefix("_orig_mod.")
                    strays[id(parameter)] = parameter._version, path
        return strays

    def facts(self) -> dict[str, Any]:
        """Return the paths of the layers whose gradients no optimizer uses."""
        return {"strays": self._paths} if self._paths else {}
