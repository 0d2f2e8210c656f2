"""Set up a rank of a single-device script before the script's first line: its GPU, streams, seeds, files. No torch."""

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
"""Environment variable with the folder for everything that a rank other than 0, or a process it started, writes."""


def begin(config: RunConfig, options: RankOptions) -> RunConfig:
    """Set up this process as a rank; return its configuration from here on.

    A process that a rank started (a DataLoader worker, a helper of the script) is no rank itself: it only shares the
    rank's folder.
    """
    if not options.is_rank():
        if FILES in os.environ:
            _confine(os.environ[FILES], options)
        return dataclasses.replace(config, ranks=None)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    os.environ["CUDA_VISIBLE_DEVICES"] = options.gpus[local_rank] if options.gpus else ""
    _seed(options.seed())
    if rank:
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)  # only rank 0 reads the terminal
        os.close(devnull)
        os.environ[FILES] = os.path.join(options.folder, f"files-{local_rank}")
        _confine(os.environ[FILES], options)
        config = dataclasses.replace(config, quiet=True)  # rank 0 prints the same messages
    _note_errors(os.path.join(options.folder, f"error-{local_rank}"), rank)
    return config


def _confine(scratch: str, options: RankOptions) -> None:
    """Redirect everything this process and its children write to the folder `scratch`."""
    from hasten.taps import sandbox

    sandbox.confine(scratch, (options.folder,))
    del os.environ["HASTEN_TRIAL"]  # `sandbox.confine` sets it, but this is no trial
    if sandbox.overlay is not None:
        os.mkdir = _making(os.mkdir, sandbox.overlay, options.started)


def _making(plain: Any, overlay: Overlay, started: float) -> Any:
    """Wrap `os.mkdir` to succeed for a folder that rank 0 has just made.

    Rank 0 may make it between this rank's `if not exists(runs)` and `mkdir(runs)`, which would fail here.
    """

    @functools.wraps(plain)
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        try:
            plain(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            absolute = overlay.resolve(path, dir_fd=dir_fd)
            if absolute is None or overlay.exists(overlay.root + absolute) or not overlay.is_users_folder(absolute):
                raise
            if overlay.stat(absolute).st_ctime < started:  # older than this run: it fails on rank 0 as well
                raise
            overlay.make_folder(absolute)

    os.supports_dir_fd.add(mkdir)
    return mkdir


def _seed(seed: int) -> None:
    """Seed Python and NumPy, so that unseeded draws of the script, such as a dataset's split, agree on all ranks."""
    random.seed(seed)

    def numpy() -> None:
        module: Any = sys.modules["numpy.random"]
        module.seed(seed)
        module.default_rng = _seeding(module.default_rng, seed)

    after_import("numpy.random", numpy)


def _seeding(plain: Any, common: int) -> Any:
    """Wrap `numpy.random.default_rng` to seed unseeded generators by the common seed and a count: alike on all ranks.

    Not in DataLoader workers, each of which must draw different numbers.
    """
    process, count = os.getpid(), itertools.count()

    @functools.wraps(plain)
    def default_rng(seed: Any = None) -> Any:
        return plain((common, next(count)) if seed is None and os.getpid() == process else seed)

    return default_rng


def _note_errors(path: str, rank: int) -> None:
    """Write the error that ends the script to `path`, where the launcher reads it."""
    show = sys.excepthook

    def note_and_show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        is_ours = isinstance(error, HastenError)
        note = {
            "text": "".join(tracebacks.format_exception(kind, error, traceback)),
            "message": error.message if isinstance(error, HastenError) else "",
            "fix": error.fix if isinstance(error, HastenError) else "",
            "code": error.code if isinstance(error, HastenError) else 1,
        }
        with open(path, "w") as file:
            json.dump(note, file)
        # The launcher prints hasten's own errors, and rank 0 shows the traceback of a Ctrl-C.
        if not (is_ours or (rank and issubclass(kind, KeyboardInterrupt))):
            show(kind, error, traceback)

    sys.excepthook = note_and_show
