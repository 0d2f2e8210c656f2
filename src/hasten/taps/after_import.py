"""Call a function once a module has been imported, without importing it.

A finder placed first in `sys.meta_path` finds the module through the finders after it, and wraps its loader's
`exec_module`, so that the callback runs when the module was executed. Modules are executed with garbage collection off.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hasten import messages

if TYPE_CHECKING:
    from hasten.taps.protocol import Session


def after_import(name: str, callback: Callable[[], None]) -> None:
    """Call `callback` once a module has been imported: immediately if it already was."""
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


def once_imported(session: Session, name: str, description: str, callback: Callable[[Any], None]) -> None:
    """Call `callback` with a module once it has been imported; record its errors as skipped, under `description`."""

    def imported() -> None:
        with session.run.guard(description):
            callback(sys.modules[name])

    after_import(name, imported)


def import_without_collections() -> None:
    """Exclude torch's objects from garbage collection: saves 1.1 s of CPU per training (of 3.9 s if it trains nothing).

    These objects live as long as the process, but collections would traverse them during the import, in the training
    and when Python exits. torch._dynamo's objects are not frozen: the first optimizer imports it, and by then the
    script has objects of its own, which a collection must reach.
    """
    if "torch" not in sys.modules:
        after_import("torch", gc.freeze)
    after_import("torch._dynamo", lambda: None)  # nothing to call: `_Finder` turns collection off during its import


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Finder(importlib.abc.MetaPathFinder):
    """A meta path finder that finds one module by the finders after it, and calls `then` once it was executed."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name = name
        self.then = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with its loader's `exec_module` wrapped."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        # The finder stays in `sys.meta_path` until the module is executed: a spec may only be looked at, as by
        # `importlib.util.find_spec("torch")`, which asks whether torch is installed.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._call_back(spec.loader)
                return spec
        return None

    def _call_back(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            with _no_collections():
                execute(module)
            self._tell()

        loader.exec_module = exec_module

    def _tell(self) -> None:
        try:
            self.then()
        except Exception as error:  # the script continues as if hasten were absent
            messages.tell(f"hasten: its taps could not be set, the script runs without them: {error!r}")
