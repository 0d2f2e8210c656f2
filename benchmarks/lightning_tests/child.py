"""Runs test files in child pytest processes and returns the outcome of each test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAND_IN = HERE.parent / "public" / "stand_in"
"""Lets PyPI's torchvision load beside a CPU-only torch; see its own docstring."""

INI = """[pytest]
xfail_strict = true
markers =
    cloud: tests that need the cloud
"""
"""Lightning's own pytest settings, without `error::FutureWarning` (later versions of torch set it off) and doctests."""

RESTARTS = 4
"""How often a file is taken up again after a test killed its process."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test: passed, failed, skipped, xfailed, crashed (killed the process) or not_run."""

    outcome: str
    error: str = ""
    where: str = ""
    seconds: float = 0.0


def environment(tests: Path, trainer: str, out: Path, skip: Path) -> dict[str, str]:
    """The child's environment: no GPU, no network look-ups, one thread, the plugin and the tests on the path."""
    path = [str(tests), str(HERE), str(STAND_IN)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "SLURM_"))}
    env |= {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env |= {"MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "MPLBACKEND": "agg"}
    env |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}
    return env | {"HASTEN_LT_TRAINER": trainer, "HASTEN_LT_OUT": str(out), "HASTEN_LT_SKIP": str(skip)}


def read_events(out: Path) -> tuple[list[str], dict[str, Outcome], str, dict[str, str]]:
    """(collected ids, outcomes, the test that was running when the process ended or "", file -> import error)."""
    collected: list[str] = []
    outcomes: dict[str, Outcome] = {}
    broken: dict[str, str] = {}
    running = ""
    for line in out.read_text().splitlines() if out.exists() else []:
        event = json.loads(line)
        match event["event"]:
            case "collected":
                collected = event["ids"]
            case "import_failed":
                broken[event["file"]] = event["error"]
            case "started":
                running = event["id"]
            case "finished":
                running = ""
            case "phase":
                before = outcomes.get(event["id"], Outcome("passed"))
                seconds = round(before.seconds + event["seconds"], 3)
                new = event["outcome"]
                if before.outcome == "failed" or (new == "passed" and before.outcome != "passed"):
                    new = before.outcome  # the first bad phase decides
                    outcomes[event["id"]] = Outcome(new, before.error, before.where, seconds)
                else:
                    error, where = event.get("error", ""), event.get("where", "")
                    if new == "failed" and event["when"] == "teardown":
                        error = f"(after the test) {error}"
                    outcomes[event["id"]] = Outcome(new, error, where, seconds)
    return collected, outcomes, running, broken


def run_once(command: list[str], env: dict[str, str], cwd: Path, log: Path, limit: float) -> bool:
    """Run one child in its own process group. Returns whether it ended by itself within ``limit`` seconds."""
    with log.open("ab") as stream:
        child = subprocess.Popen(command, env=env, cwd=cwd, stdout=stream, stderr=stream, start_new_session=True)
        try:
            child.wait(timeout=limit)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # what the tests left running
            except ProcessLookupError:
                pass  # nothing was left
            child.wait()


def run_files(
    tests: Path,
    files: list[str],
    trainer: str,
    skip: list[str],
    *,
    k: str = "",
    test_limit: int = 60,
    file_limit: int = 900,
) -> tuple[dict[str, Outcome], str]:
    """Run files together in one process, and go on after a test that killed it.

    Args:
        tests: Lightning's `tests` folder (the parent of `tests_pytorch`).
        files: The test files, relative to ``tests``.
        trainer: "lightning" or "hasten".
        skip: Test ids that must not run.
        k: pytest's `-k`.
        test_limit: Seconds one test may take.
        file_limit: Seconds one child process may take.

    Returns:
        The outcome of each test (``file::(import)`` stands for a file that did not import), and the tail of
        pytest's own output.
    """
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="lightning-tests-", ignore_cleanup_errors=True) as folder:
        cwd = Path(folder)
        (cwd / "work").mkdir()
        ini, skipped, log = cwd / "pytest.ini", cwd / "skip.json", cwd / "log.txt"
        ini.write_text(INI)
        command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "no:cacheprovider", "-c", str(ini)]
        command += [f"--rootdir={tests}", f"--timeout={test_limit}", "--timeout-method=signal", "-q", "--tb=short"]
        command += [
            "--disable-warnings",
            f"--basetemp={cwd / 'tmp'}",
            *(["-k", k] if k else []),
            *(str(tests / file) for file in files),
        ]
        for attempt in range(RESTARTS + 1):
            out = cwd / f"out{attempt}.jsonl"
            skipped.write_text(json.dumps([*skip, *outcomes]))
            env = environment(tests, trainer, out, skipped)
            finished = run_once(command, env, cwd / "work", log, file_limit)
            collected, new, running, broken = read_events(out)
            outcomes |= new
            if running:
                why = "killed the test process" if finished else f"the process took more than {file_limit} s"
                outcomes[running] = Outcome("crashed", why)
            left = [test for test in collected if test not in outcomes]
            outcomes |= {f"{file}::(import)": Outcome("failed", error) for file, error in broken.items()}
            if not running or not left:
                break
        outcomes |= {test: Outcome("not_run", "the file was given up") for test in left}
        tail = log.read_text(errors="replace")[-6000:]
    return outcomes, tail
