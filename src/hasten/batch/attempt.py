"""Run attempts: some steps of the unchanged training with one batch size, or under a plan, in a separate process.

Memory is measured from two sides. `trial_observer` runs in the training's process and reports that process's exact
peak; `Guard` polls the whole process tree from outside, since only it sees the loaders' workers, and kills the tree
above the limit. `_judged` combines both with the exit code, the evidence and the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from hasten.batch.attempt_progress import read_course
from hasten.batch.trial_observer import VARIABLE
from hasten.child import Child
from hasten.errors import OUT_OF_MEMORY, HastenError
from hasten.evidence import Evidence, Phase, read_evidence
from hasten.evidence.machine import memory_free
from hasten.plan import Setting
from hasten.taps.config import DoctorOptions, RunConfig, TrialOptions, environment
from hasten.techniques.base import FAILED
from hasten.techniques.memory.allocator import LEAN
from hasten.techniques.recompute.costs import BlockCost
from hasten.tuner.command_line import with_argument
from hasten.tuner.trial import last_lines

_NAME_ARGUMENT = "name the script's own argument: hasten batch --argument --batch-size train.py --batch-size 16"
_POLL = 0.02  # seconds between two readings of a process's memory


@dataclass(frozen=True)
class Attempt:
    """The result of one attempt.

    Attributes:
        size: Samples per batch.
        outcome: "ok", "out of memory", "timeout" or "failed".
        peak: Peak memory during training, in bytes: of all its processes, or reserved on the GPU.
        before: Peak memory before training began, in bytes; 0 on a GPU.
        seconds: Median seconds of a step.
        reason: Why it failed, in one line.
        split: Bytes of parameters, gradients and optimizer state.
        optimizers: Class names of the optimizers.
        evidence: The run's evidence; None if it left none.
        device: "cpu" or "cuda".
        device_bytes: Memory of the GPU in bytes; 0 on a CPU.
        workers: Peak memory of the child processes, in bytes.
        stage: How far it came: "start" (torch not imported yet), "loading" or "training".
        grows: Bytes by which memory keeps rising with each step; 0 if it does not.
        blocks: Cost of each block that activation_checkpointing recomputed, in the model's order.
    """

    size: int
    outcome: str
    peak: int = 0
    before: int = 0
    seconds: float = 0.0
    reason: str = ""
    split: dict[str, int] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    evidence: Evidence | None = None
    device: str = "cpu"
    device_bytes: int = 0
    workers: int = 0
    stage: str = "training"
    grows: float = 0.0
    blocks: tuple[BlockCost, ...] = ()

    @property
    def rate(self) -> float:
        """Samples per second; 0.0 if no step was timed."""
        return self.size / self.seconds if self.seconds else 0.0


@dataclass
class Attempts:
    """Runs attempts of one training.

    Args:
        arguments: Command line of the process that runs the training.
        command: The training's command line, for the record.
        scratch: Folder for the files that the script writes.
        limit: Bytes of memory that the training may use, on the device that it trains on.
        timeout: Seconds after which an attempt is stopped.
        argument: The script's own argument for the batch size; "": change the batch size of the loaders it builds.
        on_gpu: Whether it trains, or may train, on a GPU: then `limit` does not apply to the host's memory.
        bounds: Limits in bytes that the attempt's process sets for itself: by name in the module `resource`
            ("RLIMIT_AS"), and "gpu" for torch's share of the GPU. `limit`, in contrast, is enforced from outside.

    Attributes:
        finished: The attempts so far, without the lean ones.
        leans: Whether an attempt can have the C library return freed memory at once.
    """

    arguments: Sequence[str]
    command: tuple[str, ...]
    scratch: Path
    limit: int
    timeout: float = 120.0
    argument: str = ""
    on_gpu: bool = False
    finished: list[Attempt] = field(default_factory=list)
    leans: bool = True
    bounds: Mapping[str, int] = field(default_factory=dict)

    def run(
        self, size: int = 0, former: int = 0, lean: bool = False, plan: Mapping[str, Setting] | None = None
    ) -> Attempt:
        """Train for two short passes, with validation.

        Args:
            size: Samples per batch; 0: the script's own.
            former: The script's own batch size.
            lean: Have the C library return freed memory at once, so that the peak is what the training needs, which is
                linear in the batch size. That makes it slower, so the attempt is not added to `finished`.
            plan: Technique -> setting; None: the unchanged script.

        Raises:
            HastenError: The training's batches did not take the size.
        """
        trial = {"batches": 12, "steps": 24, "seconds": self.timeout / 3, "pass_seconds": self.timeout / 12}
        asked = {"size": 0 if self.argument else size, "former": former}
        arguments = with_argument(self.arguments, self.argument, size) if self.argument and size else self.arguments
        with self._folder() as folder:
            attempt = self._trained(folder, size, trial, asked, arguments, plan or {}, LEAN if lean else {})
        if asked["size"]:
            _check_size(attempt, size)
        if not lean:
            self.finished.append(attempt)
        return attempt

    def gradients(self, at: Sequence[int], many: int) -> tuple[Attempt, dict[str, Any]]:
        """Train with the script's own batch size, and sample gradients of single batches at frozen weights.

        Args:
            at: Numbers of steps after which to sample, ascending.
            many: Batches per sample.

        Returns:
            The attempt, and the result of `hasten.batch.gradients.GradientSampler`.
        """
        with self._folder() as folder:
            result = folder / "gradients.json"
            # Bounded by time alone: the sampler ends the run once it has its gradients.
            trial = {"batches": 10**6, "epochs": 10**6, "steps": 10**6, "seconds": self.timeout}
            asked = {"gradients": {"result": str(result), "at": list(at), "many": many}}
            attempt = self._trained(folder, 0, trial, asked, self.arguments, {}, {})
            seen = json.loads(result.read_text()) if result.is_file() else {"looks": [], "why": ""}
        return attempt, seen

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Create a folder for an attempt's files, and remove it afterwards."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _trained(
        self,
        folder: Path,
        size: int,
        trial: Mapping[str, Any],
        asked: Mapping[str, Any],
        arguments: Sequence[str],
        plan: Mapping[str, Setting],
        more: Mapping[str, str],
    ) -> Attempt:
        """Train in a separate process and judge the outcome.

        Args:
            folder: Folder for the script's files and the process's results.
            size: Samples per batch, for the record.
            trial: Bounds of the trial, see `TrialOptions`.
            asked: Request to `hasten.batch.trial_observer`, without the limits.
            arguments: Command line of the process.
            plan: Technique -> setting.
            more: Further environment variables.
        """
        doctor = DoctorOptions(
            steps=0, seconds=0.0, listener=os.getpid(), sample=False, observers=("hasten.batch.trial_observer",)
        )
        left, bounds = str(folder / "evidence.json"), TrialOptions(str(folder), **trial)
        config = RunConfig(dict(plan), left, self.command, bounds, quiet=True, doctor=doctor)
        request = json.dumps({**asked, "result": str(folder / "memory.json"), "bounds": dict(self.bounds)})
        env = environment(config, {**os.environ, "PYTHONHASHSEED": "0", VARIABLE: request, **more})
        with (folder / "log").open("wb") as log:
            try:
                child = Child(arguments, env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                raise HastenError(f"cannot start {arguments[0]}: {error}") from None
            # On a GPU `limit` is about the GPU's memory: the guard only protects the host.
            guard = Guard(child.pid, free_bytes() if self.on_gpu else self.limit)
            try:
                code = child.wait(self.timeout)
            finally:
                child.end()
                peak, workers = guard.stop()
        attempt = _judged(size, code, guard.over, peak, workers, folder)
        course = read_course(folder)
        return replace(attempt, workers=workers, stage=course.stage, grows=course.grows)

    def own_size(self, first: Attempt, argument_value: int) -> tuple[int, int]:
        """Return the script's own batch size, and the number of samples in its training loader (0 if unknown).

        Args:
            first: The attempt with the script's own batch size.
            argument_value: Value of the script's batch-size argument; 0: take the loader's.

        Raises:
            HastenError: The batch size cannot be determined.
        """
        loader = first.evidence.train_loader if first.evidence is not None else None
        samples = loader.samples if loader is not None and loader.samples else 0
        if argument_value:
            return argument_value, samples
        if loader is None:
            raise HastenError(
                "the script trains without a DataLoader, so its batch size is not seen",
                "name its own argument, with the value: hasten batch --argument --batch-size train.py --batch-size 16",
            )
        if not loader.batch_size:
            raise HastenError(
                f"the training loader ({loader.where}) has a batch sampler of its own, or no batch size",
                _NAME_ARGUMENT,
            )
        if (rows := _rows_of_one(first)) > 1 and loader.batch_size == 1:
            raise HastenError(
                f"the training loader ({loader.where}) returns its dataset's items one by one, and the model gets "
                f"{rows} rows of each: an item is a batch already",
                _NAME_ARGUMENT,
            )
        return loader.batch_size, samples


def _rows_of_one(attempt: Attempt) -> int:
    """Return the first dimension of the model's training input; 0 if unknown, or if some dimension is 1.

    With a loader of batch size 1, more than one row means that each dataset item is a whole batch already. A dimension
    of 1 may be the loader's batch dimension, so such a shape tells nothing.
    """
    models = attempt.evidence.models if attempt.evidence is not None else ()
    shape = next((shape for model in models if model.train_calls for shape in model.input_shapes), ())
    return shape[0] if len(shape) > 1 and 1 not in shape else 0


def _check_size(attempt: Attempt, size: int) -> None:
    """Raise if no training loader took the size, such as one with a batch sampler that the script built.

    Raises:
        HastenError: All training loaders kept another batch size.
    """
    loaders = attempt.evidence.loaders if attempt.outcome == "ok" and attempt.evidence is not None else ()
    trained = [loader for loader in loaders if loader.role == "train"]
    if trained and all(loader.batch_size != size for loader in trained):
        kept = f"{trained[0].batch_size}, with a batch sampler of its own" if trained[0].batch_size else "another size"
        raise HastenError(
            f"the training loader ({trained[0].where}) was to give batches of {size}, and gave {kept}", _NAME_ARGUMENT
        )


def value_of(arguments: Sequence[str], name: str) -> int:
    """Return the integer value of an argument in a command line; 0 if absent."""
    for place, word in enumerate(arguments):
        value = arguments[place + 1] if word == name and place + 1 < len(arguments) else ""
        value = word.partition("=")[2] if word.startswith(f"{name}=") else value
        if value.isdecimal():
            return int(value)
    return 0


def _judged(size: int, code: int | None, over: bool, peak: int, workers: int, folder: Path) -> Attempt:
    """Return the attempt's result, from exit code, guard, evidence, log and the figures that its process wrote."""
    path, result = folder / "evidence.json", folder / "memory.json"
    evidence = read_evidence(path) if path.is_file() else None
    output = last_lines(folder / "log")
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    error = (evidence.error if evidence else "") or last
    if over:
        return Attempt(size, "out of memory", peak, reason="ended at the limit")
    if code == -9 or any(word in error for word in OUT_OF_MEMORY):
        return Attempt(size, "out of memory", peak, reason=error or "killed by the kernel")
    if code is None:
        return Attempt(size, "timeout", peak, reason="it took too long")
    if code and not (evidence and evidence.ended == "complete"):
        return Attempt(size, "failed", peak, reason=error or f"exit code {code}")
    if evidence is not None and (failed := _swallowed(evidence)):
        return Attempt(size, "failed", peak, reason=failed)
    if evidence is None or not evidence.step_start or not result.is_file():
        return Attempt(size, "failed", peak, reason="no training step was seen")
    figures = json.loads(result.read_text())
    # The process's own figure is exact, the guard's is polled; but only the guard sees the loaders' workers.
    inside, on_gpu = figures["peak"], figures["device"] == "cuda"
    return Attempt(
        size,
        "ok",
        inside if on_gpu else inside + workers,
        figures["before"],
        _step_seconds(evidence),
        split={name: figures[name] for name in ("parameters", "gradients", "optimizer")},
        optimizers=tuple(figures["optimizers"]),
        evidence=evidence,
        device=figures["device"],
        device_bytes=figures["device_bytes"],
        blocks=tuple(BlockCost(**one) for one in figures["blocks"]),
    )


def _swallowed(evidence: Evidence) -> str:
    """Return a technique's error that the script caught and continued after; "" for none."""
    for name, did in evidence.installed.items():
        if why := did.partition(FAILED)[2]:
            return f"hasten: {name}: {why}"
    return ""


def _step_seconds(evidence: Evidence) -> float:
    """Return the median seconds of a steady step, without validation and checkpoints."""
    steps = [evidence.step_phases[place] for place in evidence.steady()]
    return statistics.median(sum(step) - step[Phase.VALIDATION] - step[Phase.CHECKPOINT] for step in steps)


class Guard:
    """Polls a process tree's memory in a thread, and kills the tree above the limit as the kernel would.

    Args:
        pid: The process.
        limit: Limit in bytes; None: only watch.

    Attributes:
        over: Whether the tree exceeded the limit and was killed.
    """

    def __init__(self, pid: int, limit: int | None) -> None:
        self._peak = self._workers = 0
        self.over = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(pid, limit), daemon=True)
        self._thread.start()

    def _watch(self, pid: int, limit: int | None) -> None:
        while not self._stopped.wait(_POLL):
            try:
                root = psutil.Process(pid)
                workers = root.children(recursive=True)
                of_workers = 0
                for worker in workers:  # unique memory only: a fork shares its parent's pages until it writes to them
                    of_workers += worker.memory_full_info().uss
                total = root.memory_info().rss + of_workers
            except psutil.Error:  # a process ended while it was read: the next reading is complete
                continue
            self._peak, self._workers = max(self._peak, total), max(self._workers, of_workers)
            if limit is not None and total > limit:
                self.over = True
                for process in [*workers, root]:
                    try:
                        process.kill()
                    except psutil.Error:
                        continue

    def stop(self) -> tuple[int, int]:
        """Stop watching; return the peak of all processes and the peak of the child processes alone, in bytes."""
        self._stopped.set()
        self._thread.join()
        return self._peak, self._workers


def free_bytes() -> int:
    """Return the bytes that a training may use: 90 % of what is free on this machine, or in its cgroup."""
    return int(0.9 * memory_free())
