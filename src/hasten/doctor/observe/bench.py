"""`hasten doctor --loader`, in the script's own process: at the first backward its loader is measured, and that is all.

The loader whose batch the first backward is about is the training loader. It is rebuilt with other numbers of
workers and drawn from as fast as it goes. The evidence is written again after each figure: a number of workers that
takes the machine's memory may end the process, and what was measured before it stands.
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

_FLAME = 4.0  # seconds that a worker is watched for
_LOOSE = 5  # backwards without a loader after which the script is taken to train without one
_LONG = 3.0  # times the bench's seconds, and a minute: then it hangs
_SHARDS = re.compile(r"get_worker_info|worker_info|split_by_worker|split_dataset_by_node|num_shards")
_ANY_PROCESS = -1  # PR_SET_PTRACER_ANY
_SET_PTRACER = 0x59616D61


def install(session: Session) -> None:
    """Wait for the first backward."""
    import torch

    if session.config.doctor is None:
        return
    bench = _Bench(session, session.config.doctor)

    def ending(plain: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            bench.backward()
            return plain(*args, **kwargs)

        return backward

    tap(torch.autograd, "backward", ending)


class _Bench:
    """The bench of one process's training loader."""

    def __init__(self, session: Session, options: DoctorOptions) -> None:
        self._session = session
        self._options = options
        self._seconds = options.bench_seconds
        self._loose = 0
        self._pid = os.getpid()
        self._since = time.monotonic()
        (self._stages,) = (one for one in session.observers if isinstance(one, LoaderStages))
        self._stages.on = False

    def backward(self) -> None:
        """The training's first step has come to its backward; it is not made."""
        session, recorder = self._session, self._session.run.recorder
        if recorder is None or os.getpid() != self._pid:
            return
        current = recorder.current
        if current.loader < 0:
            self._loose += 1
            if self._loose == _LOOSE:
                session.error = f"{TRAINS_WITHOUT_LOADER}, at {caller()}"
                session.complete()
            return
        if session.rank or not self._is_first():
            time.sleep(3600)  # another rank measures; doctor ends this one
        known = session.loaders[current.loader]
        loader = known.held()
        iterator = current.iterator()
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # the script's own workers would take the memory and the cores
        self._evidence = session.evidence_of(recorder, asks=False)
        self._bench = LoaderBench(known.facts)
        session.run.recorder = None
        self._measure_and_leave(loader)

    def _is_first(self) -> bool:
        """Return whether this is the first of all the processes that train: that one measures."""
        try:
            os.close(os.open(f"{self._session.config.evidence}.claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _measure_and_leave(self, loader: Any) -> None:
        watch = threading.Timer(_LONG * self._seconds + 60, self._cut)
        watch.daemon = True
        watch.start()
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._stopped)
        try:
            self._measure(loader)
            self._note(ended="finished")
        except BaseException as error:  # whatever it is, the script does not go on
            self._note(f"the bench broke off: {describe(error)}", ended="finished")
        self._leave()

    def _stopped(self, number: int, frame: FrameType | None) -> None:
        """Leave at once: an exception that is raised here may be lost, as in what Python calls behind a fork."""
        if os.getpid() != self._pid:  # a worker, which was forked meanwhile
            raise KeyboardInterrupt
        self._note(ended="stopped")
        self._leave()

    def _cut(self) -> None:
        """A loader hangs."""
        self._note("the bench was cut: it took three times as long as it was given", ended="cut")
        self._leave()

    def _leave(self) -> None:
        self._stages.remove()
        self._write(dataclasses.replace(self._evidence, ended="complete"))
        self._session.complete()

    def _note(self, *notes: str, **facts: Any) -> None:
        """Keep what was found out, in the evidence too: it stands if this process is killed for its memory."""
        self._bench = dataclasses.replace(self._bench, notes=(*self._bench.notes, *notes), **facts)
        self._write(self._evidence)

    def _write(self, evidence: Evidence) -> None:
        dataclasses.replace(evidence, loader_bench=self._bench).write(Path(self._session.config.evidence))

    def _say(self, line: str) -> None:
        messages.tell(f"hasten {time.monotonic() - self._since:5.0f}s  {line}")

    # -- the bench ------------------------------------------------------------------------------------------

    def _measure(self, loader: Any) -> None:
        facts = self._bench.loader
        if loader is None:
            raise RuntimeError("the training loader was gone when its first batch was trained on")
        counts, why = _counts(loader, facts)
        self._note(*([why] if why else []), *_made_of(loader))
        self._say(
            f"the training loader is that of {facts.where} ({facts.dataset}); workers to measure: {_listed(counts)}"
        )
        begin = time.perf_counter()
        flame = min(_FLAME, self._seconds / 8)
        stages = self._seconds / 8
        each = (self._seconds - flame - stages) / len(counts)
        for number, workers in enumerate(counts):
            if time.perf_counter() - begin > self._seconds:
                self._note(f"the time was up before {_listed(counts[number:])} workers; --seconds gives more")
                break
            self._rate(loader, workers, each)
            if number == 1 and not self._bench.measured:
                break  # not for want of workers: the dataset fails
        if most := max((rate.workers for rate in self._bench.measured), default=0):
            if most > (cores := this_machine().cores):
                self._note(f"with no training beside it: training itself takes some of the {cores} cores")
        if self._bench.measured:
            self._look_into(loader, facts, max(facts.num_workers, int(len(counts) > 1)), stages, flame)

    def _rate(self, loader: Any, workers: int, seconds: float) -> None:
        try:
            rate = speed(loader, workers, seconds)
            self._say(f"{workers} workers: {rate.samples_per_s:,.0f} samples/s")
        except Exception as error:  # the dataset's own, or that it cannot be sent to a worker
            rate = Rate(workers, error=in_one_line(error), where=place_of(error) or _class_place(loader.dataset))
            self._say(f"{workers} workers: {rate.error}")
        self._note(rates=(*self._bench.rates, rate))

    def _look_into(self, loader: Any, facts: LoaderFacts, workers: int, stages: float, flame: float) -> None:
        """The price of each stage; then a worker under py-spy."""
        again_facts = loader_facts(loader, {**_options(loader), "num_workers": workers}, "")
        self._session.loaders.append(BuiltLoader(lambda: None, dataclasses.replace(again_facts, batches=None)))
        index = len(self._session.loaders) - 1
        made = rebuilt(loader, workers)
        made.__dict__["_hasten_index"] = index
        self._stages.on = True
        with contextlib.suppress(Exception):  # the dataset's own, which has been told
            _draw(made, stages, 6 * max(1, workers))
        made._iterator = None  # ends its workers: those of the next loader would inherit it
        self._stages.on = False
        self._note(stages=self._stages.of(index), stages_workers=workers)
        if not self._options.bench_flame:
            self._note(flame_note="no flame graph: it was not asked for")
            return
        self._say("a worker under py-spy" if workers else "the loader's process under py-spy")
        made = rebuilt(loader, workers, init=TraceableWorker(loader.worker_init_fn) if workers else None)
        with contextlib.suppress(Exception):
            self._burn(made, workers, flame)

    def _burn(self, loader: Any, workers: int, seconds: float) -> None:
        """Draw batches until py-spy, which watches meanwhile, has seen enough."""
        iterator = iter(loader)
        next(iterator, None)
        if not workers:
            TraceableWorker(None)(0)
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
    """A `worker_init_fn`: the script's own, after leave was given to be looked into (Yama allows that to none)."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(_ANY_PROCESS), 0, 0, 0)
        if self._then is not None:
            self._then(worker)


def _options(loader: Any) -> dict[str, Any]:
    """A loader's arguments, as `loader_facts` wants them."""
    names = ("dataset", "prefetch_factor", "persistent_workers", "pin_memory", "worker_init_fn")
    return {name: getattr(loader, name) for name in names}


def _made_of(loader: Any) -> list[str]:
    name = type(loader).__name__
    if name in ("DataLoader", "StatefulDataLoader"):
        return []
    return [f"the script's {name} was measured as the plain DataLoader it is made of"]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _draw(loader: Any, seconds: float, batches: int) -> None:
    """Draw batches: each worker is to make a few."""
    begin = time.perf_counter()
    for number, _ in enumerate(loader, 1):
        if number >= batches or time.perf_counter() - begin > seconds:
            break


def _counts(loader: Any, facts: Any) -> tuple[list[int], str]:
    """Numbers of workers to measure, none first; and why not more."""
    own, cores = facts.num_workers, this_machine().cores
    if unsafe := holds_open(loader.dataset):
        return [own] if own else [0], f"the dataset {unsafe}: not safe to share with worker processes"
    if facts.iterable and own < 2 and not _shards(loader):
        return [0, 1], "the dataset is iterable and does not ask which worker it is in: a second would repeat it all"
    counts = {0, 1, 2, own, cores, 2 * cores}
    if 2 * cores <= 8:
        counts |= set(range(2 * cores))
    counts |= {2**power for power in range(2, 10) if 2**power <= 2 * cores}
    return sorted(counts), ""


def _shards(loader: Any) -> bool:
    """Whether workers of an iterable dataset share it out, as far as its source says."""
    import inspect

    if loader.worker_init_fn is not None or hasattr(loader.dataset, "n_shards"):
        return True
    for kind in type(loader.dataset).__mro__:
        try:
            if not kind.__module__.startswith("torch.") and _SHARDS.search(inspect.getsource(kind)):
                return True
        except (OSError, TypeError):  # built in, or made at run time
            continue
    return False


def _class_place(dataset: Any) -> str:
    """`file:line` of the dataset's class."""
    import inspect

    try:
        return f"{inspect.getsourcefile(type(dataset))}:{inspect.getsourcelines(type(dataset))[1]}"
    except (OSError, TypeError):
        return ""
