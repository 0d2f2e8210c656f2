"""Calls back when a module has been imported, without importing it."""

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


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported: now, if it was already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def once_imported(session: Session, name: str, what: str, then: Callable[[Any], None]) -> None:
    """Call `then` with a module once it has been imported; what goes wrong in it is skipped and named by `what`."""

    def imported() -> None:
        with session.run.guard(what):
            then(sys.modules[name])

    after_import(name, imported)


def import_without_collections() -> None:
    """Keep the garbage collector from what torch brings: 1.1 s less CPU a training, of 3.9 s where nothing is trained.

    All of it stays for as long as the process does, but collections would go over it while it is imported, in the
    training, and when Python ends. What torch._dynamo brings, which the first optimizer imports, is not frozen: by that
    time the script has objects of its own, which a collection must reach.
    """
    if "torch" not in sys.modules:
        after_import("torch", gc.freeze)
    after_import("torch._dynamo", lambda: None)


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
    """Finds one module by the finders behind it, and calls back when it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, its loader replaced by one that calls back."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        # A spec that is only looked at (`find_spec("torch")` asks whether torch is there) leaves the finder in place.
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
        except Exception as error:  # the script goes on as if hasten were not there
            messages.tell(f"hasten: its taps could not be set, the script runs without them: {error!r}")
