"""Starts the taps in this process, as soon as the script imports torch. Nothing here imports torch itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hasten.taps.config import VARIABLE, RunConfig


def boot() -> None:
    """Read what this process was told, guard its writes if it is a trial, and wait for torch."""
    config = RunConfig.from_json(os.environ[VARIABLE])
    if config.trial is not None:
        from hasten.taps.sandbox import confine

        confine(config.trial.scratch)
        from hasten.taps.seeds import fix_seeds

        fix_seeds(config.trial.seed)
    _hide_our_frames()

    def start() -> None:
        from hasten.taps.session import Session

        Session.start(config)

    after_import("torch", start)


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported: now, if it was already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by the finders behind it, and calls back when it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, its loader replaced by one that calls back."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _call_back(spec.loader, self.then)
                return spec
        return None


def _call_back(loader: Any, then: Callable[[], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        loader.exec_module = execute
        execute(module)
        try:
            then()
        except Exception as error:  # the script goes on as if hasten were not there
            print(f"hasten: its taps could not be set, the script runs without them: {error!r}", file=sys.stderr)

    loader.exec_module = exec_module


def _hide_our_frames() -> None:
    """Show a script's traceback as Python would without us: frames of our wrappers are left out."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    show = sys.excepthook

    def without_ours(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        kept = traceback
        while kept is not None and kept.tb_frame.f_code.co_filename.startswith(ours):
            kept = kept.tb_next
        at = kept
        while at is not None and at.tb_next is not None:
            if at.tb_next.tb_frame.f_code.co_filename.startswith(ours):
                at.tb_next = at.tb_next.tb_next
            else:
                at = at.tb_next
        show(kind, error.with_traceback(kept or traceback), kept or traceback)

    sys.excepthook = without_ours
