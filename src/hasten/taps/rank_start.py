"""The start of a rank that carries a script, before its first line: its GPU, its streams, its files. No torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import random
import sys
import traceback as tracebacks
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.taps.after_import import after_import
from hasten.taps.config import RankOptions, RunConfig

if TYPE_CHECKING:
    from hasten.taps.overlay import Overlay

FILES = "HASTEN_RANK_FILES"
"""Where a rank other than 0, and what it starts, has what it writes."""


def begin(config: RunConfig, options: RankOptions) -> RunConfig:
    """Make this process what its rank shall be; return what it is told from here on.

    A process that a rank has started (a DataLoader's worker, a script's own helper) is none.
    """
    if not options.is_rank():
        if FILES in os.environ:
            _confine(os.environ[FILES], options)
        return dataclasses.replace(config, ranks=None)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus[local_rank] if options.gpus else ""
    _seed(options.seed())
    if rank:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.environ[FILES] = os.path.join(options.folder, f"files-{local_rank}")
        _confine(os.environ[FILES], options)
        config = dataclasses.replace(config, quiet=True)  # rank 0 says the same
    _note_errors(os.path.join(options.folder, f"error-{local_rank}"), rank)
    return config


def _confine(scratch: str, options: RankOptions) -> None:
    """Send what this process and its children write to a folder of their own."""
    from hasten.taps import sandbox

    sandbox.confine(scratch, (options.folder,))
    del os.environ["HASTEN_TRIAL"]  # which this is not
    if sandbox.overlay is not None:
        os.mkdir = _making(os.mkdir, sandbox.overlay, options.began)


def _making(plain: Any, overlay: Overlay, began: float) -> Any:
    """Make a folder that rank 0 has just made: between `if not exists(runs)` and `mkdir(runs)` it may have."""

    @functools.wraps(plain)
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        try:
            plain(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            absolute = overlay.place(path, dir_fd=dir_fd)
            if absolute is None or overlay.exists(overlay.root + absolute) or not overlay.is_theirs(absolute):
                raise
            if overlay.stat(absolute).st_ctime < began:
                raise
            overlay.make(absolute)

    os.supports_dir_fd.add(mkdir)
    return mkdir


def _seed(seed: int) -> None:
    """What a script draws without a seed of its own is the same on all ranks: a split of a dataset, say."""
    random.seed(seed)

    def numpy() -> None:
        module: Any = sys.modules["numpy.random"]
        module.seed(seed)
        module.default_rng = _seeding(module.default_rng, seed)

    after_import("numpy.random", numpy)


def _seeding(plain: Any, common: int) -> Any:
    """Let generators without a seed be alike on all ranks: each the next of those that one seed gives.

    In a loader's worker they stay what they are: there each worker must draw something else.
    """
    process, made = os.getpid(), itertools.count()

    @functools.wraps(plain)
    def default_rng(seed: Any = None) -> Any:
        return plain((common, next(made)) if seed is None and os.getpid() == process else seed)

    return default_rng


def _note_errors(path: str, rank: int) -> None:
    """Leave the error that ends the script where the launcher finds it."""
    show = sys.excepthook

    def noted(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        ours = isinstance(error, HastenError)
        said = {
            "text": "".join(tracebacks.format_exception(kind, error, traceback)),
            "message": error.message if isinstance(error, HastenError) else "",
            "fix": error.fix if isinstance(error, HastenError) else "",
            "code": error.code if isinstance(error, HastenError) else 1,
        }
        with open(path, "w") as file:
            json.dump(said, file)
        # The launcher says hasten's own errors, and a Ctrl-C is seen on rank 0.
        if not (ours or (rank and issubclass(kind, KeyboardInterrupt))):
            show(kind, error, traceback)

    sys.excepthook = noted
