"""Runs public training scripts, unchanged, with and without hasten, and writes down their speed.

    python benchmarks/public/prepare.py /work/public/data
    python benchmarks/public/run.py --plain                   # plain Python only: does every script run?
    python benchmarks/public/run.py --budget 60s --pairs 3    # tune each, then plain and hasten in turn

Needs a work folder with `src/<owner>+<name>` (the commits named in scripts.toml), `data` (from prepare.py)
and `venv` (a virtual environment with torch, hasten and what the scripts import: requirements.txt). Each run
gets a fresh copy of its source; files that a run before it left behind are never seen.

Two ratios are reported, each plain time / hasten time over alternated pairs, with a bootstrap interval:
`whole run` is the wall time of the process, start-up and compilation included; `steps` is the pace of the
script's own progress lines, without the first quarter of them. Neither uses hasten's clock.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import os
import platform
import pty
import random
import re
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # other benchmarks import this file from where they are
from public_table import table  # noqa: E402

REPOSITORY = HERE.parents[1]
INTERRUPTED = "stopped as planned"


@dataclass(frozen=True)
class Script:
    """One entry of scripts.toml; what the fields mean is said there."""

    name: str
    source: str
    argv: list[str]
    script: str | None = None
    copy: str = "."
    cwd: str = "."
    data: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    before: list[list[str]] = field(default_factory=list)
    progress: str | None = None
    seconds: float = 0
    stop_after: float | None = None
    terminal: bool = False

    @property
    def command(self) -> list[str]:
        return [*([self.script] if self.script else []), *self.argv]


@dataclass(frozen=True)
class Outcome:
    """One run of one script. `pace` is seconds per progress line (or step) once it is under way."""

    code: int
    seconds: float
    pace: float | None
    lines: int
    tail: str
    stopped: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0 or (self.stopped and self.lines > 0)

    @property
    def said(self) -> str:
        return INTERRUPTED if self.stopped and self.ok else f"exit {self.code}"


@dataclass(frozen=True)
class Ratio:
    """How many times faster; above 1 is faster."""

    ratio: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f} ({self.low:.2f}-{self.high:.2f})"


def load_scripts(only: Sequence[str]) -> list[Script]:
    listed = tomllib.loads((HERE / "scripts.toml").read_text())["script"]
    scripts = [Script(**entry) for entry in listed]
    unknown = set(only) - {s.name for s in scripts}
    if unknown:
        raise SystemExit(f"no such script: {', '.join(sorted(unknown))}; see {HERE / 'scripts.toml'}")
    return [s for s in scripts if not only or s.name in only]


# --- one run ---


class Workplace:
    """The work folder: sources, data, the Python that runs the scripts, and fresh copies to run them in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.hasten = folder / "venv" / "bin" / "hasten"

    def imports(self) -> Path | None:
        """The folder that its Python imports hasten from: figures of another checkout are not this one's."""
        ask = "import hasten; print(hasten.__path__[0])"
        said = subprocess.run([self.python, "-c", ask], cwd=self.folder, capture_output=True, text=True)
        return Path(said.stdout.strip()).resolve() if said.returncode == 0 else None

    def fresh(self, script: Script, side: str) -> Path:
        """A copy of the script's source with its data in place; returns the folder to run it in."""
        root = self.folder / "scratch" / script.name / side
        shutil.rmtree(root, ignore_errors=True)
        source = self.folder / "src" / script.source / script.copy
        shutil.copytree(source, root, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        cwd = root / script.cwd
        for target, prepared in script.data.items():
            self._place(cwd / target, self.folder / "data" / prepared)
        for command in script.before:
            subprocess.run([self.python, *command], cwd=cwd, env=self.environment(script), check=True)
        return cwd

    @staticmethod
    def _place(target: Path, prepared: Path) -> None:
        """What was prepared, in folders of the copy's own with links in them: a script may write beside them."""
        if prepared.is_file():
            link(str(prepared), str(target))
        else:
            shutil.copytree(prepared, target, copy_function=link, dirs_exist_ok=True)

    def environment(self, script: Script) -> dict[str, str]:
        paths = [str(HERE / "stand_in"), script.env.get("PYTHONPATH", "")]
        ours = {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "MPLBACKEND": "Agg",
            "HF_HOME": str(self.folder / "scratch" / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }
        return {**os.environ, **ours, **script.env, "PYTHONPATH": ":".join(filter(None, paths))}

    def run(self, script: Script, side: str, plan: Path | None = None) -> Outcome:
        """The whole script once: in plain Python, or under hasten where there is a plan."""
        cwd = self.fresh(script, side)
        if plan:
            command = [str(self.hasten), "run", "--plan", str(plan), *script.command]
        else:
            command = [str(self.python), *script.command]
        return execute(command, cwd, self.environment(script), script)


def link(prepared: str, target: str) -> None:
    Path(target).unlink(missing_ok=True)
    Path(target).symlink_to(prepared)


def execute(command: Sequence[str], cwd: Path, env: dict[str, str], script: Script) -> Outcome:
    limit = script.stop_after or max(600.0, 10 * script.seconds)
    pattern = re.compile(script.progress) if script.progress else None
    marks: list[tuple[float, float]] = []
    tail: list[str] = []
    stdin: int = open_terminal() if script.terminal else subprocess.DEVNULL
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        for line in lines_until(process, start + limit):
            if line is None:
                continue
            found = pattern.search(line) if pattern else None
            if found:
                step = float(found["step"]) if "step" in found.groupdict() else len(marks)
                marks.append((time.perf_counter() - start, step))
            tail = [*tail[-11:], line]
        stopped = process.poll() is None and time.perf_counter() - start >= limit
        if stopped:
            stop(process)
        code = process.wait()
    seconds = time.perf_counter() - start
    return Outcome(code, seconds, pace(marks), len(marks), "\n".join(tail), stopped and script.stop_after is not None)


def lines_until(process: subprocess.Popen[bytes], deadline: float) -> Iterator[str | None]:
    """What the process writes, line by line (a carriage return ends one too), until it ends or time is up."""
    assert process.stdout is not None
    waiting = b""
    while (left := deadline - time.perf_counter()) > 0:
        ready, _, _ = select.select([process.stdout], [], [], min(left, 1.0))
        if not ready:
            if process.poll() is not None:
                return  # it ended and left a child that holds the pipe
            continue
        chunk = os.read(process.stdout.fileno(), 65536)
        if not chunk:
            process.wait()
            break
        *lines, waiting = re.split(rb"[\r\n]", waiting + chunk)
        yield from (line.decode(errors="replace") for line in lines if line)
    yield waiting.decode(errors="replace") or None


def open_terminal() -> int:
    """A terminal of 80 columns, for scripts that ask how wide theirs is."""
    _, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    return terminal


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C for the whole group, and only if that is not heard, the end."""
    for wish, patience in ((signal.SIGINT, 30), (signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, wish)
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def pace(marks: Sequence[tuple[float, float]]) -> float | None:
    """Seconds per step between progress lines; the first quarter of them is warm-up."""
    steady = marks[len(marks) // 4 :]
    if len(steady) < 3:
        return None
    # Where the lines say the step, an epoch begins again at 0, with validation before it: not counted.
    forward = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(steady) if b[1] >= a[1]]
    steps = sum(step for _, step in forward)
    return sum(seconds for seconds, _ in forward) / steps if steps else None


# --- plain and hasten in turn ---


def tune(workplace: Workplace, script: Script, budget: str) -> tuple[Path | None, dict[str, Any], Outcome]:
    cwd = workplace.fresh(script, "tune")
    command = [str(workplace.hasten), "tune", "--budget", budget, *script.command]
    patient = Script(script.name, script.source, script.argv, seconds=3600, terminal=script.terminal)
    outcome = execute(command, cwd, workplace.environment(script), patient)
    report = cwd / "hasten-report.json"
    plan = cwd / "hasten.toml"
    said = json.loads(report.read_text()) if report.exists() else {}
    return (plan if plan.exists() and outcome.code == 0 else None), said, outcome


def compare(workplace: Workplace, script: Script, budget: str, pairs: int) -> dict[str, Any]:
    plan, report, tuned = tune(workplace, script, budget)
    row: dict[str, Any] = {
        "name": script.name,
        "source": script.source,
        "tune": asdict(tuned),
        "report": report,
    }
    if plan is None:
        why = " ".join(tuned.tail.split())[-300:] or "it said nothing"
        return row | {"unchanged": False, "why": f"tune: {tuned.said}: {why}"}
    plain, fast = [], []
    for _ in range(pairs):
        plain.append(workplace.run(script, "plain"))
        fast.append(workplace.run(script, "hasten", plan))
    row |= {
        "plan": plan.read_text(),
        "plain": [asdict(o) for o in plain],
        "hasten": [asdict(o) for o in fast],
    }
    broken = [o for o in fast if not o.ok] if all(o.ok for o in plain) else plain
    row["unchanged"] = not broken
    row["why"] = broken[0].said + ": " + broken[0].tail.splitlines()[-1][:200] if broken else ""
    if not script.stop_after:
        row["whole_run"] = interval([a.seconds / b.seconds for a, b in zip(plain, fast, strict=True)])
        if {o.lines for o in plain} != {o.lines for o in fast} and "?P<step>" not in (script.progress or ""):
            row["why"] = "another number of progress lines than in plain Python"
    paces = [(a.pace, b.pace) for a, b in zip(plain, fast, strict=True)]
    row["steps"] = interval([a / b for a, b in paces if a and b])
    return row


def interval(ratios: Sequence[float], draws: int = 2000) -> Ratio | None:
    """Geometric mean of the pairs' ratios, with a 95 % bootstrap interval over the pairs."""
    if not ratios:
        return None
    logs = [math.log(r) for r in ratios]
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(logs, k=len(logs))) for _ in range(draws))
    low, high = means[int(0.025 * draws)], means[int(0.975 * draws)]
    return Ratio(math.exp(statistics.fmean(logs)), math.exp(low), math.exp(high), len(logs))


# --- what is written down ---


def machine(workplace: Workplace) -> dict[str, Any]:
    device = "torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'"
    ask = f"import torch; print(torch.__version__, {device})"
    said = subprocess.run([workplace.python, "-c", ask], capture_output=True, text=True, check=True).stdout.split(
        " ", 1
    )
    cores = len(os.sched_getaffinity(0))
    return {"cores": cores, "machine": platform.machine(), "torch": said[0], "gpu": said[1].strip()}


def write(rows: Sequence[dict[str, Any]], workplace: Workplace, results: Path, budget: str) -> None:
    results.mkdir(parents=True, exist_ok=True)
    facts = machine(workplace) | {"budget": budget, "date": time.strftime("%Y-%m-%d")}
    plain = {"machine": facts, "scripts": rows}
    said = json.dumps(plain, indent=1, default=asdict).replace(f"{workplace.folder}/", "")  # not this machine's paths
    (results / "public-scripts.json").write_text(f"{said}\n")
    where = ", ".join(f"{name} {value}" for name, value in facts.items())
    text = f"# Public scripts, unchanged\n\n{where}. Ratios are plain time / hasten time.\n\n{table(rows)}\n".replace(f"{workplace.folder}/", "")
    (results / "public-scripts.md").write_text(text)
    print(table(rows))


def run_plain(workplace: Workplace, scripts: Sequence[Script]) -> bool:
    """Every script once in plain Python."""
    fine = True
    for script in scripts:
        outcome = workplace.run(script, "plain")
        each = f"{outcome.pace * 1000:9.1f} ms a step or line" if outcome.pace else ""
        print(
            f"{script.name:34}{outcome.said:20}{outcome.seconds:7.1f} s {outcome.lines:5} lines {each}",
            flush=True,
        )
        if not outcome.ok:
            print(outcome.tail, flush=True)
        fine = fine and outcome.ok
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/work/public"), help="work folder (default %(default)s)")
    parser.add_argument("--only", default="", metavar="A,B", help="only these scripts")
    parser.add_argument("--plain", action="store_true", help="plain Python only: does each script still run?")
    parser.add_argument("--budget", default="60s", help="for each `hasten tune` (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="plain and hasten runs in turn (default %(default)s)")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    args = parser.parse_args()
    scripts = load_scripts([name for name in args.only.split(",") if name])
    if args.list:
        print("\n".join(s.name for s in scripts))
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored, also by our children
    workplace = Workplace(args.work)
    if args.plain:
        return 0 if run_plain(workplace, scripts) else 1
    if (found := workplace.imports()) != REPOSITORY / "src" / "hasten":
        hint = f"{workplace.python} -m pip install --no-deps -e {REPOSITORY}"
        raise SystemExit(f"{workplace.python} imports hasten from {found or 'nowhere'}, not from this checkout: {hint}")
    rows: list[dict[str, Any]] = []
    for script in scripts:
        print(f"--- {script.name}", flush=True)
        rows.append(compare(workplace, script, args.budget, args.pairs))
        write(rows, workplace, args.results, args.budget)  # after each: a long benchmark may be interrupted
    return 0 if all(row["unchanged"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
