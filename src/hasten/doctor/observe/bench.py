"""`hasten doctor --loader`: measure the training loader inside the script's process, then end the script.

The training loader is the DataLoader whose batch the first backward uses. At that backward, the bench stops the
script's own workers, rebuilds the loader with one worker count after another, and draws batches as fast as the loader
delivers them. Then it samples the stages of making a batch, and records one worker's stacks with py-spy. The backward
is never run. The evidence file is rewritten after each measurement, because a worker count that exhausts memory can get
the process killed; the earlier measurements then survive.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from hasten import messages
from hasten.doctor.endings import TRAINS_WITHOUT_LOADER
from hasten.doctor.flame import record
from hasten.doctor.observe.loader_speed import rebuilt, speed
from hasten.doctor.observe.stages import LoaderStages
from hasten.evidence import Evidence, LoaderBench, LoaderFacts, Rate, this_machine
from hasten.evidence.facts import caller, loader_facts
from hasten.taps.config import DoctorOptions
from hasten.taps.protocol import BuiltLoader, Session
from hasten.taps.tracebacks import describe, in_one_line, place_of
from hasten.taps.wrapping import tap
from hasten.techniques.data.fork_safety import holds_open

_FLAME = 4.0  # seconds to record one worker with py-spy, at most
# Backwards without a DataLoader batch after which the script counts as training without a loader.
_MOST_WITHOUT_LOADER = 5
_HUNG = 3.0  # the bench counts as hung after this many times its seconds, plus a minute
_SHARDS = re.compile(r"get_worker_info|worker_info|split_by_worker|split_dataset_by_node|num_shards")
_ANY_PROCESS = -1  # PR_SET_PTRACER_ANY
_SET_PTRACER = 0x59616D61


def install(session: Session) -> None:
    """Tap `torch.autograd.backward`, so that the bench starts at the script's first backward."""
    import torch

    if session.config.doctor is None:
        return
    bench = _Bench(session, session.config.doctor)

    def before_backward(plain: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            bench.backward()
            return plain(*args, **kwargs)

        return backward

    tap(torch.autograd, "backward", before_backward)


class _Bench:
    """The bench of one process's training loader."""

    def __init__(self, session: Session, options: DoctorOptions) -> None:
        self._session = session
        self._options = options
        self._seconds = options.bench_seconds
        self._without_loader = 0
        self._pid = os.getpid()
        self._started = time.monotonic()
        (self._stages,) = (observer for observer in session.observers if isinstance(observer, LoaderStages))
        self._stages.on = False  # switched on for one rebuilt loader only, after the rates: sampling slows batches down

    def backward(self) -> None:
        """Measure the loader of the current batch and end the process.

        Return only while the current step drew no DataLoader batch (up to `_MOST_WITHOUT_LOADER` backwards), and in a
        forked child.
        """
        session, recorder = self._session, self._session.run.recorder
        if recorder is None or os.getpid() != self._pid:
            return
        current = recorder.current
        if current.loader < 0:
            self._without_loader += 1
            if self._without_loader == _MOST_WITHOUT_LOADER:
                session.error = f"{TRAINS_WITHOUT_LOADER}, at {caller()}"
                session.complete()
            return
        if session.rank or not self._is_first():
            time.sleep(3600)  # another rank measures; doctor ends this process
        built = session.loaders[current.loader]
        loader = built.loader()
        iterator = current.iterator()
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # the script's own workers would compete for cores and memory
        self._evidence = session.evidence_of(recorder, may_probe=False)
        self._bench = LoaderBench(built.facts)
        session.run.recorder = None  # drawing from the rebuilt loaders must not be recorded as training
        self._measure_and_finish(loader)

    def _is_first(self) -> bool:
        """Return whether this is the first training process to reach its backward; only that process measures."""
        # The rank alone does not decide: it is read from RANK, which processes started by `mp.spawn` may not have.
        try:
            os.close(os.open(f"{self._session.config.evidence}.claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _measure_and_finish(self, loader: Any) -> None:
        """Measure under a watchdog and signal handlers, write the evidence, and end the process."""
        watchdog = threading.Timer(_HUNG * self._seconds + 60, self._cut)
        watchdog.daemon = True
        watchdog.start()
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._stopped)
        try:
            self._measure(loader)
            self._note(ended="finished")
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the script must not go on to train
            self._note(f"the bench broke off: {describe(error)}", ended="finished")
        self._finish()

    def _stopped(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: write the evidence and exit here, without raising.

        An exception raised in a handler can be lost: Python ignores exceptions in callbacks that run after a fork.
        """
        if os.getpid() != self._pid:  # a worker, which inherited this handler when it was forked
            raise KeyboardInterrupt
        self._note(ended="stopped")
        self._finish()

    def _cut(self) -> None:
        """End the bench from the watchdog's thread, because a loader hangs."""
        self._note("the bench was cut: it took three times as long as it was given", ended="cut")
        self._finish()

    def _finish(self) -> None:
        """Write the final evidence and end the process."""
        self._stages.remove()
        self._write(dataclasses.replace(self._evidence, ended="complete"))
        self._session.complete()

    def _note(self, *notes: str, **facts: Any) -> None:
        """Add notes and fields to the bench, and rewrite the evidence at once: the process may run out of memory."""
        self._bench = dataclasses.replace(self._bench, notes=(*self._bench.notes, *notes), **facts)
        self._write(self._evidence)

    def _write(self, evidence: Evidence) -> None:
        dataclasses.replace(evidence, loader_bench=self._bench).write(Path(self._session.config.evidence))

    def _say(self, line: str) -> None:
        messages.tell(f"hasten {time.monotonic() - self._started:5.0f}s  {line}")

    # -- the bench ------------------------------------------------------------------------------------------

    def _measure(self, loader: Any) -> None:
        """Measure each worker count in turn while time lasts, then the stages and the stacks."""
        facts = self._bench.loader
        if loader is None:
            raise RuntimeError("the training loader was gone when its first batch was trained on")
        counts, reason = _counts(loader, facts)
        self._note(*([reason] if reason else []), *_measured_as(loader))
        self._say(
            f"the training loader is that of {facts.where} ({facts.dataset}); workers to measure: {_listed(counts)}"
        )
        begin = time.perf_counter()
        flame = min(_FLAME, self._seconds / 8)
        stages = self._seconds / 8
        seconds_each = (self._seconds - flame - stages) / len(counts)
        for number, workers in enumerate(counts):
            if time.perf_counter() - begin > self._seconds:
                self._note(f"the time was up before {_listed(counts[number:])} workers; --seconds gives more")
                break
            self._rate(loader, workers, seconds_each)
            if number == 1 and not self._bench.measured:
                break  # both 0 workers and the next count failed: the dataset itself fails
        if most := max((rate.workers for rate in self._bench.measured), default=0):
            if most > (cores := this_machine().cores):
                self._note(f"with no training beside it: training itself takes some of the {cores} cores")
        if self._bench.measured:
            self._look_into(loader, facts, max(facts.num_workers, int(len(counts) > 1)), stages, flame)

    def _rate(self, loader: Any, workers: int, seconds: float) -> None:
        """Measure the rate with `workers` workers for about `seconds`, and record it or its error."""
        try:
            rate = speed(loader, workers, seconds)
            self._say(f"{workers} workers: {rate.samples_per_s:,.0f} samples/s")
        except Exception as error:  # raised by the dataset, or by pickling it for a spawned worker
            rate = Rate(workers, error=in_one_line(error), where=place_of(error) or _class_place(loader.dataset))
            self._say(f"{workers} workers: {rate.error}")
        self._note(rates=(*self._bench.rates, rate))

    def _look_into(self, loader: Any, facts: LoaderFacts, workers: int, stages: float, flame: float) -> None:
        """Sample the stages of making a batch with `workers` workers, then record stacks with py-spy.

        Args:
            loader: The script's loader.
            facts: Its facts.
            workers: How many workers to rebuild it with.
            stages: Seconds for the stages, at most.
            flame: Seconds for py-spy.
        """
        rebuilt_facts = loader_facts(loader, {**_options(loader), "num_workers": workers}, "")
        self._session.loaders.append(BuiltLoader(lambda: None, dataclasses.replace(rebuilt_facts, batches=None)))
        index = len(self._session.loaders) - 1
        # Registered as one more loader of the session: `LoaderStages` samples only loaders that have an index.
        rebuilt_loader = rebuilt(loader, workers)
        rebuilt_loader.__dict__["_hasten_index"] = index
        self._stages.on = True
        with contextlib.suppress(Exception):  # the dataset's errors are already recorded with the rates
            _draw(rebuilt_loader, stages, 6 * max(1, workers))
        rebuilt_loader._iterator = None  # ends its workers now: workers forked by the next loader would inherit them
        self._stages.on = False
        self._note(stages=self._stages.of(index), stages_workers=workers)
        if not self._options.bench_flame:
            self._note(flame_note="no flame graph: it was not asked for")
            return
        self._say("a worker under py-spy" if workers else "the loader's process under py-spy")
        rebuilt_loader = rebuilt(loader, workers, init=TraceableWorker(loader.worker_init_fn) if workers else None)
        with contextlib.suppress(Exception):
            self._record_stacks(rebuilt_loader, workers, flame)

    def _record_stacks(self, loader: Any, workers: int, seconds: float) -> None:
        """Draw batches while py-spy records a worker's stacks, or this process's if there are no workers."""
        iterator = iter(loader)
        next(iterator, None)
        if not workers:
            TraceableWorker(None)(0)  # this process makes the batches itself, so py-spy needs leave to trace it
        pid = iterator._workers[0].pid if workers else os.getpid()
        stacks: list[tuple[str, str]] = []
        out = Path(self._options.scratch, "stacks")
        spy = threading.Thread(target=lambda: stacks.append(record(pid, seconds, out)), daemon=True)
        spy.start()
        while spy.is_alive():
            if next(iterator, None) is None:
                iterator = iter(loader)
        flame, note = stacks[0] if stacks else ("", "no flame graph: py-spy failed")
        self._note(flame=flame, flame_note=note)


class TraceableWorker:
    """A `worker_init_fn` that lets any process trace the worker, then calls the script's own.

    Where the kernel's Yama module restricts ptrace, py-spy could not attach otherwise: it is a sibling of the worker,
    not its parent.
    """

    def __init__(self, then: Any) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(_ANY_PROCESS), 0, 0, 0)
        if self._then is not None:
            self._then(worker)


def _options(loader: Any) -> dict[str, Any]:
    """Return the loader's arguments in the form that `loader_facts` takes."""
    names = ("dataset", "prefetch_factor", "persistent_workers", "pin_memory", "worker_init_fn")
    return {name: getattr(loader, name) for name in names}


def _measured_as(loader: Any) -> list[str]:
    """Return a note if the loader is a subclass, of which only the plain DataLoader was rebuilt."""
    name = type(loader).__name__
    if name in ("DataLoader", "StatefulDataLoader"):
        return []
    return [f"the script's {name} was measured as the plain DataLoader it is made of"]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _draw(loader: Any, seconds: float, batches: int) -> None:
    """Draw up to `batches` batches, for at most `seconds`."""
    begin = time.perf_counter()
    for number, _ in enumerate(loader, 1):
        if number >= batches or time.perf_counter() - begin > seconds:
            break


def _counts(loader: Any, facts: Any) -> tuple[list[int], str]:
    """Return the worker counts to measure, in ascending order, and why the list was shortened ("" if it was not).

    By default: 0, 1, 2, the script's own count, powers of two, and up to twice the number of cores.
    """
    own_count, cores = facts.num_workers, this_machine().cores
    if unsafe := holds_open(loader.dataset):
        return [own_count] if own_count else [0], f"the dataset {unsafe}: not safe to share with worker processes"
    if facts.iterable and own_count < 2 and not _shards(loader):
        return [0, 1], "the dataset is iterable and does not ask which worker it is in: a second would repeat it all"
    counts = {0, 1, 2, own_count, cores, 2 * cores}
    if 2 * cores <= 8:
        counts |= set(range(2 * cores))
    counts |= {2**power for power in range(2, 10) if 2**power <= 2 * cores}
    return sorted(counts), ""


def _shards(loader: Any) -> bool:
    """Return whether the workers of an iterable dataset split its samples among them, judging by its source."""
    import inspect

    if loader.worker_init_fn is not None or hasattr(loader.dataset, "n_shards"):  # `n_shards`: a Hugging Face dataset
        return True
    for kind in type(loader.dataset).__mro__:
        try:
            if not kind.__module__.startswith("torch.") and _SHARDS.search(inspect.getsource(kind)):
                return True
        except (OSError, TypeError):  # no source: a built-in class, or a class made at run time
            continue
    return False


def _class_place(dataset: Any) -> str:
    """Return `file:line` of the dataset's class, or "" if its source is not known."""
    import inspect

    try:
        return f"{inspect.getsourcefile(type(dataset))}:{inspect.getsourcelines(type(dataset))[1]}"
    except (OSError, TypeError):
        return ""
