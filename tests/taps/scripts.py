"""Runs small scripts as a person would: by Python, by `hasten run`, and with hasten listening."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import hasten
from hasten.evidence import Evidence, read_evidence

PYTHON = sys.executable
OURS = str(Path(hasten.__file__).parent) + os.sep  # a clone and what is installed in it may lie in a folder `hasten`
HASTEN = str(Path(sys.executable).with_name("hasten"))
LISTEN = (HASTEN, "run", "--no-plan", "--evidence", "evidence.json")


@dataclass(frozen=True)
class Done:
    """A process that is over."""

    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """This one, with one thread (so that sums are added in one order) and without what a test runner puts there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HASTEN_", "PYTEST_", "COV_"))}
    kept.pop("PYTHONPATH", None)
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **changes}


def quick() -> dict[str, str]:
    """The same for scripts whose start nobody looks at: torch is imported as `tests/quick_start` has it."""
    return environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""))


def ctrl_c_works() -> None:
    """Undo what `make` and a shell's `&` do to their children: ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def execute(
    *arguments: str | Path, cwd: Path, stdin: str = "", env: dict[str, str] | None = None, timeout: float = 100
) -> Done:
    """Run a command to its end; if it hangs, end all that it started, and fail."""
    with subprocess.Popen(
        list(map(str, arguments)),
        cwd=cwd,
        env=env or environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=ctrl_c_works,
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Done(process.returncode, out, err)


def write(folder: Path, name: str, text: str) -> Path:
    """Write a script."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def plain(folder: Path, *arguments: str, **more: object) -> Done:
    """As the person runs it."""
    return execute(PYTHON, *arguments, cwd=folder, **more)  # type: ignore[arg-type]


def hastened(folder: Path, *arguments: str, **more: object) -> Done:
    """The same under `hasten run`, changing nothing."""
    return execute(HASTEN, "run", "--no-plan", *arguments, cwd=folder, **more)  # type: ignore[arg-type]


def listened(folder: Path, *arguments: str, **more: object) -> tuple[Done, Evidence]:
    """The same with hasten listening, and what it heard."""
    done = execute(*LISTEN, *arguments, cwd=folder, **more)  # type: ignore[arg-type]
    assert (folder / "evidence.json").is_file(), done.err
    return done, read_evidence(folder / "evidence.json")
