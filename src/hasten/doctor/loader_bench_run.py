"""How fast a script's own training loader goes with no training behind it. Runs the script; imports no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import hasten
from hasten.child import Child, how_it_ended, start_logged
from hasten.doctor.flame import record
from hasten.doctor.loader_bench import Consumed, LoaderBench, Rate
from hasten.doctor.observe import BENCH
from hasten.doctor.others import Others
from hasten.errors import HastenError
from hasten.evidence import Evidence, LoaderFacts, Phase, Stages, this_machine
from hasten.taps.config import DoctorOptions, RunConfig, environment

_POLL = 0.1
_LONG = 3.0  # times the bench's seconds, and a minute: then it hangs
_LAST_LINES = 8
_BUSY = 0.3  # cores that others keep busy, above which it is said
_GRACE = 1.0  # seconds from SIGTERM to SIGKILL


def bench_loader(
    arguments: Sequence[str],
    command: Sequence[str],
    seconds: float = 60.0,
    patience: float = 300.0,
    flame: bool = True,
    evidence: Evidence | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> LoaderBench:
    """Run the script until its training loader is known, and measure that.

    Args:
        arguments: Of the process that runs the training.
        command: The training's own command line, for the record.
        seconds: For the bench itself, not for what the script does before.
        patience: Seconds within which the script must have come to its first backward.
        flame: Record a flame graph of a worker, if py-spy is there.
        evidence: Of a training, to compare with.
        say: Told what is going on.

    Raises:
        HastenError: The script ended, or was stopped, before there was anything to measure; why, and where.
    """
    with tempfile.TemporaryDirectory(prefix="hasten-bench-", ignore_cleanup_errors=True) as scratch:
        running = _BenchRun(list(arguments), tuple(command), Path(scratch), seconds, patience, flame, say)
        running.run()
        return running.gather(evidence)


class _BenchRun:
    """The script's process, and what it has told so far."""

    def __init__(
        self,
        arguments: list[str],
        command: tuple[str, ...],
        scratch: Path,
        seconds: float,
        patience: float,
        flame: bool,
        say: Callable[[str], None],
    ) -> None:
        self.arguments, self.command, self.scratch = arguments, command, scratch
        self.seconds, self.patience, self.wants_flame, self.say = seconds, patience, flame, say
        self.file = scratch / "bench"
        self.log = scratch / "log"
        self.told: list[dict[str, Any]] = []
        self.flame, self.flame_note = "", "no flame graph: it was not asked for" if not flame else ""
        self.ended = "finished"
        self.code: int | None = None
        self.others = Others()
        self.pid = 0
        self._read = 0
        self._began = self._since = time.monotonic()

    def run(self) -> None:
        """Run the script and read what it tells, until it is over, hangs, or Ctrl-C."""
        options = DoctorOptions(0, 0.0, scratch=str(self.scratch), sample=False, observers=BENCH)
        options = dataclasses.replace(options, bench=str(self.file), bench_seconds=self.seconds)
        config = RunConfig(
            evidence=str(self.scratch / "evidence.json"), command=self.command, quiet=True, doctor=options
        )
        with self.log.open("wb") as log:
            child = start_logged(self.arguments, environment(config, dict(os.environ)), log)
            self.pid = child.pid
            try:
                self._follow(child)
            except KeyboardInterrupt:
                self.ended = "stopped"
            finally:
                child.end(_GRACE)
                self._hear()

    def _follow(self, child: Child) -> None:
        while child.wait(0) is None:
            time.sleep(_POLL)
            self._hear()
            if self._of("done"):
                return
            waited = time.monotonic() - self._since
            if waited > (_LONG * self.seconds + 60 if self._of("loader") else self.patience):
                self.ended = "cut"
                return
        self.code = child.wait(0)

    def _hear(self) -> None:
        """Read what was told since."""
        if not self.file.is_file():
            return
        *lines, rest = self.file.read_bytes()[self._read :].split(b"\n")
        self._read = self.file.stat().st_size - len(rest) if lines else self._read
        for line in lines:
            told = json.loads(line)
            self.told.append(told)
            self.others.mark(self.pid)
            if told["kind"] == "loader":
                self._since = time.monotonic()
                facts = told["facts"]
                self.say(
                    f"the training loader is that of {facts['where']} ({facts['dataset']}); "
                    f"workers to measure: {', '.join(map(str, told['counts']))}"
                )
            elif told["kind"] == "rate":
                speed = f"{told['samples_per_s']:,.0f} samples/s" if "samples_per_s" in told else told["error"]
                self.say(f"{told['workers']} workers: {speed}")
            elif told["kind"] == "flame":
                self._burn(told)

    def _burn(self, told: dict[str, Any]) -> None:
        try:
            if self.wants_flame:
                self.say("a worker under py-spy" if told["workers"] else "the loader's process under py-spy")
                self.flame, self.flame_note = record(told["pid"], told["seconds"], self.scratch / "stacks")
        finally:
            Path(f"{self.file}.burnt").touch()

    def _of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.told if one["kind"] == kind]

    # -- afterwards -------------------------------------------------------------------------------------------

    def gather(self, evidence: Evidence | None) -> LoaderBench:
        """What was told, put together."""
        if not self._of("loader"):
            raise self._nothing()
        loader = self._of("loader")[0]
        facts = LoaderFacts(**loader["facts"])
        rates = tuple(Rate(**_without_kind(one)) for one in self._of("rate"))
        for failed in self._of("failed"):
            if not rates:
                raise HastenError(f"the loader of {facts.where} could not be measured: {_at(failed)}")
        rates = tuple(
            dataclasses.replace(rate, where=loader["class_at"]) if rate.error and not rate.where else rate
            for rate in rates
        )
        if not rates and self.ended == "stopped":
            raise HastenError("stopped before the first number of workers was measured", code=130)
        stages = self._of("stages")
        return LoaderBench(
            command=self.command,
            machine=this_machine(),
            loader=facts,
            rates=rates,
            stages=_stages(stages[0]) if stages else None,
            stages_workers=stages[0]["workers"] if stages else 0,
            flame=self.flame,
            flame_note=self.flame_note or "no flame graph: the bench did not come to it",
            consumed=_consumed(evidence, facts),
            notes=tuple(self._notes(loader, facts, rates)),
            ended=self.ended,
            seconds=time.monotonic() - self._began,
            hasten=hasten.__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _notes(self, loader: dict[str, Any], facts: LoaderFacts, rates: tuple[Rate, ...]) -> list[str]:
        notes = [loader["why"]] if loader["why"] else []
        if loader["type"] not in ("DataLoader", "StatefulDataLoader"):
            notes.append(f"the script's {loader['type']} was measured as the plain DataLoader it is made of")
        late = [
            f"the time was up before {_listed(one['left'])} workers; --seconds gives more" for one in self._of("late")
        ]
        notes += late + [f"the bench broke off: {_at(failed)}" for failed in self._of("failed")]
        if self.ended == "cut":
            notes.append("the bench was cut: it took three times as long as it was given")
        elif self.code and not self._of("done"):
            notes.append(f"the script's process died meanwhile ({how_it_ended(self.code)})")
        if (others := self.others.cores()) > _BUSY:
            cores = psutil.cpu_count() or 1
            notes.append(
                f"other processes kept {others:.1f} of this machine's {cores} cores busy meanwhile: on an idle one the "
                "figures are higher, and more workers help more"
            )
        if max((rate.workers for rate in rates if not rate.error), default=0) > this_machine().cores:
            notes.append(f"with no training beside it: training itself takes some of the {this_machine().cores} cores")
        return notes

    def _nothing(self) -> HastenError:
        """Why there is nothing to measure."""
        said = "\n  ".join(self.log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])
        if self.ended == "stopped":
            return HastenError("stopped before the script began to train: nothing was measured", code=130)
        for died in self._of("died"):
            if "pickle" in died["error"]:
                said = "workers that are spawned get a pickled dataset: keep lambdas and open files out of it"
            return HastenError(f"the script ended before its first training step: {_at(died)}", said)
        for untrained in self._of("untrained"):
            loaders = [LoaderFacts(**facts) for facts in untrained["loaders"]]
            built = "; ".join(f"{one.where} ({one.dataset}, {one.samples or '?'} samples)" for one in loaders)
            if loose := untrained.get("loose"):
                return HastenError(
                    f"the script trains at {loose} without drawing from a DataLoader"
                    + (f"; those it built: {built}" if built else "; it builds none"),
                    "there is no loader to measure; `hasten doctor` says where its time goes",
                )
            if loaders:
                return HastenError(
                    f"the script ended without a training step on a DataLoader's batch; it built: {built}",
                    "does it train with these arguments? A loader counts from the first backward on",
                )
        for failed in self._of("failed"):
            return HastenError(f"the training loader could not be measured: {_at(failed)}", said)
        if self.ended == "cut":
            return HastenError(f"no training step began within {self.patience:.0f} s", "--patience gives it longer")
        how = f" ({how_it_ended(self.code)})" if self.code else ""
        return HastenError(f"the script ended{how} without building a DataLoader or training", said)


def _stages(told: dict[str, Any]) -> Stages:
    names = {field.name for field in dataclasses.fields(Stages)}
    return Stages(**{name: value for name, value in told.items() if name in names})


def _without_kind(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name != "kind"}


def _at(told: dict[str, Any]) -> str:
    return f"{told['error']} ({told['where']})" if told["where"] else str(told["error"])


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _consumed(evidence: Evidence | None, facts: LoaderFacts) -> Consumed | None:
    """What a training took, in its steady steps."""
    if evidence is None or evidence.train_loader is None:
        return None
    steps = [evidence.step_phases[index] for index in evidence.steady()]
    own = [sum(step) - step[Phase.VALIDATION] - step[Phase.CHECKPOINT] for step in steps]
    total = sum(own)
    if not total > 0:
        return None
    per_second = len(own) / total
    size = evidence.train_loader.batch_size or facts.batch_size or 1
    return Consumed(
        samples_per_s=per_second * size,
        batches_per_s=per_second,
        waited=sum(step[Phase.DATA] for step in steps) / total,
        workers=evidence.train_loader.num_workers,
    )
