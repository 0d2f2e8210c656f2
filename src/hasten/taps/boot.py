"""Starts the taps in this process, as soon as the script imports torch. Nothing here imports torch itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hasten import messages
from hasten.taps.config import VARIABLE, RunConfig


def boot() -> None:
    """Read what this process was told, guard its writes if it is a trial, and wait for torch."""
    config = RunConfig.from_json(os.environ[VARIABLE])
    if config.trial is not None:
        from hasten.taps.sandbox import confine

        # What a check's processes leave for each other lies outside what the script sees as its own files.
        confine(config.trial.scratch, () if config.witness is None else config.witness.folders())
        from hasten.taps.seeds import fix_seeds

        fix_seeds(config.trial.seed)
    elif config.doctor is not None and config.doctor.scratch:
        from hasten.taps.sandbox import confine

        confine(config.doctor.scratch)
    if config.doctor is not None:
        _note_an_early_end(f"{config.evidence}.error")
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
            execute(module)
            self._tell()

        loader.exec_module = exec_module

    def _tell(self) -> None:
        try:
            self.then()
        except Exception as error:  # the script goes on as if hasten were not there
            messages.tell(f"hasten: its taps could not be set, the script runs without them: {error!r}")


def describe(error: BaseException) -> str:
    """The error as one line, with the last place in it that is the script's own."""
    import sysconfig
    import traceback

    others = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    others.add(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *others))]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or frames)[-1:])
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' if text else ''}{text[0] if text else ''}{place}"


def _note_an_early_end(path: str) -> None:
    """Leave the error that ends a script before it imports torch (and so before it could leave evidence)."""
    show = sys.excepthook

    def noted(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if "torch" not in sys.modules:
            try:
                with open(path, "w") as file:
                    file.write(describe(error))
            except OSError as refused:
                messages.tell(f"hasten: could not note how the script ended: {refused}")
        show(kind, error, traceback)

    sys.excepthook = noted


def _hide_our_frames() -> None:
    """Show a script's traceback as Python would without us: frames of our wrappers are left out."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    show = sys.excepthook

    def without_ours(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        error.__traceback__ = traceback
        _strip(error, ours, set())
        show(kind, error, error.__traceback__)

    sys.excepthook = without_ours

    def in_threads() -> None:
        import threading

        show_in_thread = threading.excepthook

        def without_ours_either(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None:
                _strip(args.exc_value, ours, set())
                told = (args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread)
                args = threading.ExceptHookArgs(told)
            show_in_thread(args)

        threading.excepthook = without_ours_either

    after_import("threading", in_threads)


def _strip(error: BaseException, ours: str, seen: set[int]) -> None:
    """Take our frames out of an error's traceback, and out of those it was raised from or holds."""
    if id(error) in seen:
        return
    seen.add(id(error))
    kept = error.__traceback__
    while kept is not None and kept.tb_frame.f_code.co_filename.startswith(ours):
        kept = kept.tb_next
    at = kept
    while at is not None and at.tb_next is not None:
        if at.tb_next.tb_frame.f_code.co_filename.startswith(ours):
            at.tb_next = at.tb_next.tb_next
        else:
            at = at.tb_next
    error.__traceback__ = kept or error.__traceback__
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *inner):
        if other is not None:
            _strip(other, ours, seen)
