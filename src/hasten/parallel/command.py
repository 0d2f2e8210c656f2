"""Find the command that started this process, to run it again as another rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hasten.errors import HastenError
from hasten.parallel.place import LAUNCHED

_FIRST_SEEN = Path.cwd()  # the working directory at import time, in case a script changes it later


def own_command() -> tuple[list[str], Path]:
    """Return this process's command, with Python's own flags, and the folder it was started in.

    Raises:
        HastenError: There is no command to run again: a notebook, a prompt, or a script read from stdin.
    """
    words = list(sys.orig_argv)
    if not _can_run_again(words):
        raise HastenError(
            'strategy="ddp" runs the command of this process again for each further rank, but this is an interactive '
            "session: there is no command to run again.",
            'Use strategy="ddp_notebook" (or "ddp_fork", the same) here, or put the training in a script.',
        )
    words[0] = sys.executable
    return words, _start()


def _start() -> Path:
    """Return the folder this process was started in: scripts, and Hydra, change the working directory later."""
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    for word in sys.orig_argv[1:]:
        # Python made the script's path absolute when it started. So the difference to the relative path in the command
        # is the folder: `/home/me/train.py` for `train.py` gives `/home/me/`.
        if Path(file).is_absolute() and not Path(word).is_absolute() and file.endswith(os.sep + word):
            return Path(file[: -len(word)])
    return _FIRST_SEEN


def _can_run_again(words: list[str]) -> bool:
    """Return whether running these words starts the same program again."""
    if hasattr(sys, "ps1") or sys.flags.interactive or len(words) < 2 or not sys.executable:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if shell is not None and shell() is not None:
        return False
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None:  # `python -c` has its program in the command; a program on stdin has been consumed
        return _has_program(words)
    return Path(file).exists() or getattr(main, "__spec__", None) is not None


def _has_program(words: list[str]) -> bool:
    """Return whether a command of Python contains `-c`, also combined with other flags (`-Ic`)."""
    for word in words[1:]:
        if word == "-" or not word.startswith("-"):
            return False
        if not word.startswith("--") and "c" in word[1:] and word[1] not in "XWm":
            return True
    return False


def rank_environment(rank: int, size: int, address: str, port: int, cores: int) -> dict[str, str]:
    """Return the environment variables of a rank on this machine, as torchrun names them.

    The cores are divided among the ranks' threads, unless OMP_NUM_THREADS is set.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        LAUNCHED: str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // size)),
    }
