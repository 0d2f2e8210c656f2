"""Processes that are forks of this one, with what it has imported: `python -c` without the seconds that torch takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.quick_end import freeze, run_and_exit
from tests.taps.scripts import Done


def fork_here(
    code: str, *arguments: str | Path, folder: Path | None = None, mounts: str | None = None
) -> subprocess.Popen[str]:
    """Start a Python process that runs code, as `subprocess.Popen` with pipes would; wait for it with communicate().

    Args:
        code: What it runs, as `__main__`.
        arguments: Those behind its name in `sys.argv`.
        folder: Where; None: here.
        mounts: Shell commands that it runs first, in mounts of its own (see `own_mounts.enter`).
    """
    words = ["-c", *map(str, arguments)]
    pipe = subprocess.PIPE
    # What is to run in the place of the program runs before it, and does not come to its end.
    return subprocess.Popen(
        [sys.executable],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=folder,
        preexec_fn=lambda: _run(textwrap.dedent(code), words, mounts),
    )


def ran_here(code: str, folder: Path, *arguments: str | Path) -> Done:
    """What code does in a folder, run to its end in such a process."""
    with fork_here(code, *arguments, folder=folder) as process:
        try:
            out, err = process.communicate(timeout=100)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, out, err)


def _close_what_is_open() -> None:
    """Close pytest's descriptors; Popen takes that for the program's beginning.

    Their numbers stay taken: what pytest left behind may close them later, and would close what the program opened.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != null:
            os.dup2(null, number, inheritable=False)


def _run(code: str, words: list[str], mounts: str | None) -> None:
    _close_what_is_open()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = words
    signal.signal(signal.SIGINT, signal.default_int_handler)
    freeze()

    def program() -> None:
        if mounts is not None:
            from tests.own_mounts import enter

            enter(mounts)
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})

    run_and_exit(program)
