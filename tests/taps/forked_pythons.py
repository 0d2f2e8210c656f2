"""Has what a process starts as `python train.py` run in a fork of it, which has torch imported already.

A new Python takes two seconds of CPU to import torch, a fork 0.05: a check starts five of them, torchrun three. What is
started here is a process of its own, by `subprocess.Popen`, with its folder, environment, streams and process group;
only where Popen would execute Python, the fork goes on and runs the script. What that starts in turn is executed.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hasten.parallel import follow
from hasten.taps.config import SITE
from tests.quick_end import freeze, run_and_exit

_START, _BECOME = subprocess.Popen.__init__, os.execve
_LAUNCHER = ["-m", "torch.distributed.run"]
_OURS = {str(SITE), str(Path(__file__).parents[1] / "quick_start")}


@contextmanager
def forked_pythons() -> Iterator[None]:
    """Have Pythons that run a script, or torchrun, be forks of this process as long as this lasts.

    Others (`python -c`, another module, further options) are executed.
    """
    subprocess.Popen.__init__, os.execve = _start, _become  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _execute_again()


def _execute_again() -> None:
    subprocess.Popen.__init__, os.execve = _START, _BECOME  # type: ignore[method-assign]


@functools.wraps(_START)
def _start(popen: Any, args: Any, *more: Any, **options: Any) -> None:
    if program := _program(args):
        env = options.get("env")
        kept, before = tuple(options.get("pass_fds", ())), options.get("preexec_fn")
        options["preexec_fn"] = functools.partial(_in_fork, program, os.environ if env is None else env, kept, before)
    _START(popen, args, *more, **options)


def _become(path: Any, args: Any, env: Mapping[str, str]) -> None:
    if program := _program(args):
        run(program, env)
    _BECOME(path, args, env)


def _program(args: Any) -> list[str]:
    """Return the words behind `python` of a command line that is forked; [] of another."""
    words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(word) for word in args]
    if words[:1] != [sys.executable]:
        return []
    if words[1:4] == ["-I", "-S", follow.__file__]:  # a rank of `hasten run --devices`
        return words[1:] if _program(words[5:]) else []
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    return rest if rest[:2] == _LAUNCHER or not "".join(rest[:1]).startswith("-") else []


def _in_fork(
    program: list[str], env: Mapping[str, str], kept: tuple[int, ...], before: Callable[[], object] | None
) -> NoReturn:
    if before is not None:
        before()
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))  # Popen takes it for the program's beginning
    run(program, env)


def run(program: list[str], env: Mapping[str, str]) -> NoReturn:
    """Be the Python that runs this, in an environment, to its end.

    Args:
        program: The words behind `python`.
        env: Environment variables.
    """
    variables = dict(env)
    if program[0] == "-I":
        follow.follow(int(program[3]))
        program = _program(program[4:])
    _forget_handlers()
    os.environ.clear()
    os.environ.update(variables)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", 0 if unbuffered else -1), write_through=unbuffered)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.orig_argv = [sys.executable, *program]
    freeze()
    if program[:2] == _LAUNCHER:
        sys.argv = program[1:]
        run_and_exit(functools.partial(runpy.run_module, program[1], run_name="__main__", alter_sys=True))
    _execute_again()
    sys.argv, script = program, os.path.abspath(program[0])
    sys.path[0] = os.path.dirname(script)
    _customize()
    run_and_exit(functools.partial(_as_main, script))


def _as_main(script: str) -> None:
    """Execute a file as `__main__`. runpy would make `sys.argv[0]` absolute, and take the module away at the end."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _customize() -> None:
    """Do what a new Python does before a script's first line: look into PYTHONPATH, and start hasten's taps."""
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in _OURS]
    sys.path[1:1] = places
    theirs = next((path for place in places if (path := Path(place, "sitecustomize.py")).is_file()), None)
    if theirs is not None:
        runpy.run_path(str(theirs))
    if "HASTEN_RUN" in os.environ:
        from hasten.taps.boot import boot

        boot()


def _forget_handlers() -> None:
    """Forget what the parent handles: a new Python ignores the signals that its parent ignores, and handles Ctrl-C."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Popen has put them back, for a program that is no Python
        signal.signal(number, signal.SIG_IGN)
    logging.root.handlers.clear()
