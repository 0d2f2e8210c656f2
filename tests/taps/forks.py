"""Runs scripts in forks of a process that has torch imported already, which saves seconds of CPU a script.

The command `hasten` runs in forks of another one, which has its commands imported, and no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hasten.evidence import Evidence, read_evidence
from hasten.taps.config import RunConfig
from tests.taps.scripts import HASTEN, PYTHON, Done, environment


def forked(folder: Path, *arguments: str, config: RunConfig | None = None, before: str = "") -> Done:
    """What a script does by Python, or as `hasten run` starts it with this configuration.

    `before` is run first, as a `sitecustomize` would be.
    """
    with tempfile.TemporaryDirectory() as apart:
        out, err = Path(apart, "out"), Path(apart, "err")
        code = run_in_fork(folder / arguments[0], folder, out, err, arguments[1:], config, before)
        return Done(code, out.read_text(), err.read_text())


def run_in_fork(
    script: Path,
    folder: Path,
    out: Path,
    err: Path,
    arguments: Sequence[str] = (),
    config: RunConfig | None = None,
    before: str = "",
) -> int:
    """Run a script in a folder, its output in files; return its exit code, minus the signal that killed it."""
    job = {
        "script": str(script),
        "arguments": list(arguments),
        "folder": str(folder),
        "out": str(out),
        "err": str(err),
        "hasten": json.dumps(dataclasses.asdict(config)) if config is not None else "",
        "before": before,
    }
    return _trainings.answer(job)


def parent_of_forks() -> int:
    """Return the process id of the one that scripts are forked from."""
    return _trainings.process().pid


def listened_in_fork(folder: Path, *arguments: str, before: str = "") -> tuple[Done, Evidence]:
    """What a script does with hasten listening, and what it heard."""
    path = folder / "evidence.json"
    done = forked(folder, *arguments, config=RunConfig(evidence=str(path), command=arguments), before=before)
    assert path.is_file(), done.err
    return done, read_evidence(path)


def command(folder: Path, *arguments: str | Path, stdin: str = "", **variables: str) -> Done:
    """What `hasten` does with these arguments, input and environment variables.

    It has no torch yet, and what it starts, or becomes, are whole processes.
    """
    with tempfile.TemporaryDirectory() as apart:
        out, err, typed = Path(apart, "out"), Path(apart, "err"), Path(apart, "in")
        typed.write_text(stdin)
        words = list(map(str, arguments))
        streams = {"in": str(typed), "out": str(out), "err": str(err)}
        job = {"script": HASTEN, "arguments": words, "folder": str(folder), "variables": variables, **streams}
        return Done(_commands.answer(job), out.read_text(), err.read_text())


def launched(folder: Path, *words: str | Path, **variables: str) -> Done:
    """What a command does whose trainings are forks, too: `launched(folder, HASTEN, "check", "train.py")`, or torchrun.

    It has torch imported already, as have the Pythons that it starts for a script or a module; see `forked_pythons`.
    """
    with tempfile.TemporaryDirectory() as apart:
        out, err = Path(apart, "out"), Path(apart, "err")
        streams = {"out": str(out), "err": str(err)}
        job = {"words": list(map(str, words)), "folder": str(folder), "variables": variables, **streams}
        return Done(_trainings.answer(job), out.read_text(), err.read_text())


class _Server:
    """A process that forks, started when it is first asked; it ends with this one.

    Args:
        name: Its script, beside this file.
    """

    def __init__(self, name: str) -> None:
        self._script = Path(__file__).with_name(name)
        self._process: subprocess.Popen[str] | None = None

    def answer(self, job: dict[str, object]) -> int:
        """Return the exit code of the fork that did the job, minus the signal that killed it."""
        server = self.process()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            print(json.dumps(job), file=server.stdin, flush=True)
            return int(server.stdout.readline())
        except BaseException:  # it hangs: the answer must not be taken for the next one's
            self._process = None
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            raise

    def process(self) -> subprocess.Popen[str]:
        """Return it, started."""
        self._process = self._process or self._start()
        return self._process

    def _start(self) -> subprocess.Popen[str]:
        server = subprocess.Popen(
            [PYTHON, str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        return server


_trainings, _commands = _Server("fork_server.py"), _Server("command_server.py")
