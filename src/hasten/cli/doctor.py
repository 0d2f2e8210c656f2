"""`hasten doctor`: find out why a training is slow, with file, line and what a fix is worth."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hasten import files, messages
from hasten.cli.command import process_arguments, script_of, split_line
from hasten.cli.script import ScriptCommand, training
from hasten.errors import HastenError
from hasten.evidence.finding import Severity, or_worse
from hasten.plan import did_you_mean

if TYPE_CHECKING:
    from hasten.doctor.listen import ObservedRun
    from hasten.doctor.verdict.diagnosis import Diagnosis
    from hasten.evidence import Evidence, Finding
    from hasten.taps.config import DoctorOptions

_SEVERITIES = tuple(map(str, Severity))
_TRYING = 20.0  # most seconds to spend on trying techniques in the run itself
_AT_LEAST = 5.0  # seconds of training if --steps is not given: 200 quick steps show little about the machine


class DoctorCommand(ScriptCommand):
    """A ScriptCommand that also accepts hasten's options after paths (`--source`) and evidence files."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move options to the front if the arguments are paths or evidence instead of a training."""
        words, with_value = list(args), self.with_value()
        split = split_line(words, with_value)
        if "--source" in words[:split] or (split < len(words) and words[split].endswith(".json")):
            args = _options_first(words, with_value)
        return super().parse_args(ctx, args)


def _options_first(words: Sequence[str], with_value: set[str]) -> list[str]:
    """Return the words with all options, and their values, in front."""
    options, arguments = [], []
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            arguments.append(word)
            continue
        options.append(word)
        if word in with_value and "=" not in word:
            options += [value for value in (next(remaining, None),) if value is not None]
    return [*options, *arguments]


def doctor(
    ctx: typer.Context,
    steps: int | None = typer.Option(
        None, min=1, help="Training steps to listen to. Default: 200, or as many as 5 s of training hold.", metavar="N"
    ),
    seconds: float = typer.Option(
        120.0, min=0.1, help="Time after which the script is ended, wherever it is.", metavar="SECONDS"
    ),
    epochs: int | None = typer.Option(None, min=1, help="Observe this many epochs instead of steps.", metavar="N"),
    whole: bool = typer.Option(False, "--whole", help="Let the script run to its end and write where it wants."),
    json: Path | None = typer.Option(None, help="Write the diagnosis there, for machines.", metavar="FILE"),
    html: Path | None = typer.Option(None, help="Write a page with charts and source there.", metavar="FILE"),
    trace: Path | None = typer.Option(None, help="Write a Chrome/Perfetto trace of a few steps there.", metavar="FILE"),
    evidence: Path | None = typer.Option(None, help="Write the run's evidence to this file.", metavar="FILE"),
    no_sample: bool = typer.Option(False, "--no-sample", help="Do not look into single steps with the profiler."),
    fail_on: str = typer.Option("", help="Exit with 1 at such a finding: high, medium, low, note.", metavar="SEVERITY"),
    source: bool = typer.Option(False, "--source", help="Read code only: PATHS are files and folders. Runs nothing."),
    format: str = typer.Option("text", help="With --source: text, json or sarif.", metavar="KIND"),
    out: Path | None = typer.Option(None, "--out", help="With --source: write there.", metavar="FILE"),
    select: list[str] = typer.Option([], help="With --source: only this rule (may be repeated).", metavar="NAME"),
    strict_ignores: bool = typer.Option(False, help="With --source: name ignore comments that silence nothing."),
    loader: bool = typer.Option(
        False, "--loader", help="Measure the training loader alone, for --seconds, in place of training."
    ),
) -> None:
    """Say why a training is slow: which resource is saturated, where a step's time goes, what to change and where.

    The script runs unchanged, for a bounded time, and the files it writes are redirected and removed (--whole: it runs
    to its end and writes where it wants). hasten's own options stand before the script; everything after the script is
    the script's own. The exit code is the script's; 0 if hasten ended it.

    Examples: hasten doctor train.py --epochs 1 (the script's --epochs); hasten doctor --steps 500 -m pkg.train;
    hasten doctor --html page.html torchrun --nproc-per-node 2 train.py; hasten doctor evidence.json (a finished run);
    hasten doctor --source train.py src/ (reads code only); hasten doctor --loader train.py (its loader alone).
    """
    _severity(fail_on)
    command = training(ctx)
    if source:
        from hasten.cli.source import check_source

        raise typer.Exit(check_source(command, format, fail_on, out, select, strict_ignores))
    check_targets(json, html, trace, evidence)
    if loader:
        _goes_with_training(steps=steps, epochs=epochs, whole=whole, trace=trace)
        raise typer.Exit(measure_loader(command, loader_options(seconds), json, html, evidence))
    from hasten.doctor.diagnose import diagnose
    from hasten.doctor.verdict.diagnosis import makes_sense

    kept = _kept_evidence(command)
    if kept is not None:
        diagnosis, run_evidence, code = *_look_again(kept), 0
    else:
        options = _bounded(steps, seconds, epochs, trace, not no_sample)
        run = _listen(command, options, whole, evidence)
        run_evidence, code = run.evidence, run.exit_code
        diagnosis = _heeding_comments(diagnose(run_evidence, _read_source(command), run.unseen, run.notes))
    with makes_sense(kept) if kept is not None else contextlib.nullcontext():
        _show(diagnosis, run_evidence, html, json)
    if not code and fail_on:
        code = int(any(finding.severity in or_worse(fail_on) for finding in diagnosis.findings))
    raise typer.Exit(code)


def _bounded(steps: int | None, seconds: float, epochs: int | None, trace: Path | None, sample: bool) -> DoctorOptions:
    """Return the options for observing a training, from the command's options."""
    from hasten.taps.config import DoctorOptions

    return DoctorOptions(
        steps=steps or (0 if epochs else 200),
        seconds=seconds,
        epochs=epochs or 0,
        at_least=0.0 if steps else _AT_LEAST,
        sample=sample,
        trying=_TRYING,
        trace=str(trace) if trace else "",
    )


def loader_options(seconds: float, patience: float = 300.0, flame: bool = True) -> DoctorOptions:
    """Return the options for measuring the training loader in place of training.

    Args:
        seconds: Seconds for the bench itself, without the time before it.
        patience: Seconds within which the script must reach its first backward.
        flame: Sample a worker with py-spy, if it is installed.

    Raises:
        HastenError: `seconds` is less than 1.
    """
    from hasten.taps.config import DoctorOptions

    if not seconds >= 1:
        raise HastenError(f"--seconds {seconds:g}: a bench needs one second at least")
    return DoctorOptions(0, patience, sample=False, bench_seconds=seconds, bench_flame=flame)


def measure_loader(
    command: list[str],
    options: DoctorOptions,
    json: Path | None,
    html: Path | None,
    evidence: Path | None = None,
    training: Evidence | None = None,
) -> int:
    """Measure the training loader in place of training, show the result, and return the exit code.

    Raises:
        HastenError: The script ended, or was stopped, before there was anything to measure.
    """
    from hasten.doctor.diagnose import diagnose
    from hasten.doctor.endings import no_loader_measured
    from hasten.doctor.verdict.loader import consumed

    run = _listen(command, options, False, evidence)
    run_evidence, bench = run.evidence, run.evidence.loader_bench
    if bench is None or not bench.rates:
        raise no_loader_measured(run_evidence, bool(run.stopped), options.seconds)
    if training is not None:
        bench = dataclasses.replace(bench, consumed=consumed(training, bench.loader))
        run_evidence = dataclasses.replace(run_evidence, loader_bench=bench)
    _show(diagnose(run_evidence, (), run.unseen), run_evidence, html, json)
    return run.exit_code or int(not bench.measured)


def _goes_with_training(**options: object) -> None:
    """Refuse options that need a training, for --loader.

    Raises:
        HastenError: One of them was given.
    """
    if named := [f"--{name}" for name, value in options.items() if value]:
        raise HastenError(f"{' and '.join(named)}: --loader measures the loader in place of training")


def _listen(command: list[str], options: DoctorOptions, whole: bool, evidence: Path | None) -> ObservedRun:
    """Run a training and observe it, with progress messages."""
    from hasten.doctor.listen import listen

    arguments = process_arguments(command, "doctor")
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, so that the scratch folder is removed in any case
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    name = _script(command) or " ".join(command[: 1 + (command[0] == "-m")])

    def say(line: str) -> None:
        messages.tell(f"hasten: {line}")

    say(f"listening to {name}, {_bounds(options, whole)}")
    return listen(arguments, command, options, whole, evidence, say)


def _bounds(options: DoctorOptions, whole: bool) -> str:
    """Say how long the training is observed, and what happens to its files."""
    if options.bench_seconds:
        return f"until it trains; then its loader alone, for {options.bench_seconds:g} s; what it writes is removed"
    if whole:
        return "to its end; what it writes stays"
    many = f"{options.epochs} epochs" if options.epochs else f"{options.steps} steps"
    return f"{many}, {options.seconds:g} s at most; what it writes goes to a scratch folder, which is removed"


def _script(command: list[str]) -> Path | None:
    """Return the file of the script, of the module, or of the script that a launcher starts; None if not found."""
    if command[0] == "-m" and len(command) > 1:
        module = Path(*command[1].split("."))
        candidates = [path for path in (module.with_suffix(".py"), module / "__main__.py") if path.is_file()]
        if candidates:
            return candidates[0]
    return next((path for word in command if (path := script_of([word]))), None)


def _read_source(command: list[str]) -> Sequence[Finding]:
    """Return the findings in the script's code; a failure to read it must not lose the measured findings."""
    script = _script(command)
    if script is None:
        return ()
    from hasten.doctor.lint.check import findings_in

    try:
        return findings_in(script)
    except Exception as error:  # reported; the measured findings are shown without it
        print(f"hasten: could not read the code of {script}: {error!r}", file=sys.stderr)
        return ()


def _heeding_comments(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis without the findings that a `# hasten: ignore[name]` comment in the script silences."""
    from hasten.doctor.lint.check import silenced

    try:
        return dataclasses.replace(diagnosis, findings=tuple(silenced(diagnosis.findings)))
    except Exception as error:  # a comment that cannot be read silences nothing
        return dataclasses.replace(diagnosis, notes=(*diagnosis.notes, f"comments in the script: {error!r}"))


def _kept_evidence(command: list[str]) -> Path | None:
    """Return the path of a run's evidence if the command names a JSON file or a folder with one; else None.

    Raises:
        HastenError: Nothing was named.
    """
    if not command:
        raise HastenError("no script was named", "hasten doctor SCRIPT ARGS, or hasten doctor evidence.json")
    path = Path(command[0])
    if path.suffix == ".json" and not os.access(path, os.X_OK):
        return path
    if path.is_dir() and not (path / "__main__.py").is_file() and (path / "evidence.json").is_file():
        return path / "evidence.json"
    return None


def _look_again(path: Path) -> tuple[Diagnosis, Evidence]:
    """Diagnose a finished run from its evidence."""
    from hasten.doctor.diagnose import diagnose
    from hasten.doctor.verdict.diagnosis import makes_sense
    from hasten.evidence import read_evidence

    evidence = read_evidence(path)
    with makes_sense(path):
        return _heeding_comments(diagnose(evidence)), evidence


def _show(diagnosis: Diagnosis, evidence: Evidence | None, html: Path | None, json: Path | None) -> None:
    """Write the requested files, and print the diagnosis."""
    from rich.console import Console

    from hasten.doctor.relative_paths import with_relative_paths
    from hasten.doctor.views import terminal

    diagnosis, evidence = with_relative_paths(diagnosis), with_relative_paths(evidence)
    if json is not None:
        diagnosis.write(json)
    if html is not None:
        from hasten.doctor.views import page

        page.write(diagnosis, evidence, html)
    terminal.show(diagnosis, evidence, Console(), html, json)


def _severity(name: str) -> None:
    if name and name not in _SEVERITIES:
        raise HastenError(
            f"--fail-on {name}: no such severity",
            did_you_mean(name, _SEVERITIES) or f"it takes: {', '.join(_SEVERITIES)}",
        )


def check_targets(json: Path | None, html: Path | None, trace: Path | None, evidence: Path | None) -> None:
    """Refuse, before the run, output files that cannot be written or that hold other content.

    Raises:
        HastenError: One of them is such a file.
    """
    from hasten.doctor.verdict.diagnosis import is_diagnosis
    from hasten.evidence.schema import is_evidence

    targets: tuple[tuple[Path | None, str, files.Recognise], ...] = (
        (json, "the diagnosis", is_diagnosis),
        (html, "the report", files.is_page),
        (trace, "the trace", files.is_trace),
        (evidence, "the evidence", is_evidence),
    )
    for path, what, recognise in targets:
        if path is not None:
            files.check_target(path, what, recognise)
