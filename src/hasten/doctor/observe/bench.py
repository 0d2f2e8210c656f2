"""`hasten bench-loader`, in the script's own process: at the first backward its loader is measured, and that is all.

The loader whose batch the first backward is about is the training loader. It is rebuilt with other numbers of
workers and drawn from as fast as it goes. What is measured is written, a JSON object a line, for hasten to read.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hasten.doctor.observe.loader_speed import again, speed
from hasten.doctor.observe.log import _LIBRARIES, _OURS
from hasten.doctor.observe.stages import LoaderStages
from hasten.evidence.facts import caller, loader_facts
from hasten.taps.config import DoctorOptions
from hasten.taps.protocol import BuiltLoader, Session
from hasten.taps.wrapping import tap
from hasten.techniques.data.crossing import holds_open

_FLAME = 4.0  # seconds that a worker is watched for
_LOOSE = 5  # backwards without a loader after which the script is taken to train without one
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
    show = sys.excepthook

    def crashed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        bench.died(error)
        show(kind, error, trace)

    sys.excepthook = crashed
    atexit.register(bench.ended)


class _Bench:
    """The bench of one process's training loader."""

    def __init__(self, session: Session, options: DoctorOptions) -> None:
        self._session = session
        self._file = options.bench
        self._seconds = options.bench_seconds
        self._loose = 0
        self._over = False
        self._pid = os.getpid()
        (self._stages,) = (one for one in session.observers if isinstance(one, LoaderStages))
        self._stages.on = False

    def _tell(self, kind: str, **facts: Any) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps({"kind": kind, **facts}) + "\n")

    # -- the end of a script that never came to train -------------------------------------------------------

    def died(self, error: BaseException) -> None:
        """The script ends by an error of its own."""
        if not self._over and os.getpid() == self._pid and not isinstance(error, KeyboardInterrupt):
            self._over = True
            self._tell("died", error=told(error), where=place_of(error), loaders=self._known())

    def ended(self) -> None:
        """The script is over, and no backward has been seen."""
        if not self._over and os.getpid() == self._pid and self._session.listens_to_training():
            self._tell("untrained", loaders=self._known())

    def _known(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(known.facts) for known in self._session.loaders]

    # -- the bench ------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """The training's first step has come to its backward; it is not made."""
        recorder = self._session.run.recorder
        if recorder is None or os.getpid() != self._pid:
            return
        current = recorder.current
        if current.loader < 0:
            self._loose += 1
            if self._loose == _LOOSE:
                self._over = True
                self._tell("untrained", loaders=self._known(), loose=caller())
                self._leave()
            return
        if not self._is_first():
            time.sleep(3600)  # another rank measures; hasten ends this one
        self._over = True
        self._session.run.recorder = None
        try:
            self._bench(current)
        except BaseException as error:  # whatever it is, hasten is told, and the script does not go on
            self._tell("failed", error=told(error), where=place_of(error))
        self._leave()

    def _is_first(self) -> bool:
        """Of all the processes that train, one measures."""
        try:
            os.close(os.open(f"{self._file}.claimed", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _leave(self) -> None:
        self._stages.remove()
        self._tell("done")
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
        for worker in multiprocessing.active_children():
            worker.kill()  # else it would notice only seconds later that its parent is gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _bench(self, current: Any) -> None:
        known = self._session.loaders[current.loader]
        loader, facts = known.held(), known.facts
        iterator = current.iterator()
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # the script's own workers would take the memory and the cores
        if loader is None:
            raise RuntimeError("the training loader was gone when its first batch was trained on")
        counts, why = _counts(loader, facts)
        self._tell(
            "loader",
            facts=dataclasses.asdict(facts),
            type=type(loader).__name__,
            counts=counts,
            why=why,
            class_at=_class_place(loader.dataset),
        )
        begin = time.perf_counter()
        flame = min(_FLAME, self._seconds / 8)
        stages = self._seconds / 8
        each = (self._seconds - flame - stages) / len(counts)
        failed = 0
        for number, workers in enumerate(counts):
            if time.perf_counter() - begin > self._seconds:
                self._tell("late", left=counts[number:])
                break
            measured = self._try(workers, lambda n: speed(loader, n, each))
            failed += measured is None
            if measured is not None:
                self._tell("rate", workers=workers, **dataclasses.asdict(measured))
            elif failed == 2 and number == 1:
                break  # not for want of workers: the dataset fails
        if failed < len(counts):
            self._look_into(loader, facts, max(facts.num_workers, int(len(counts) > 1)), stages, flame)

    def _try(self, workers: int, measure: Callable[[int], Any]) -> Any:
        try:
            return measure(workers)
        except Exception as error:  # the dataset's own, or that it cannot be sent to a worker
            self._tell("rate", workers=workers, error=told(error), where=place_of(error))
            return None

    def _look_into(self, loader: Any, facts: Any, workers: int, stages: float, flame: float) -> None:
        """The price of each stage; then a worker under py-spy, which the process that started this one calls."""
        again_facts = loader_facts(loader, {**facts_options(loader), "num_workers": workers}, "")
        self._session.loaders.append(BuiltLoader(lambda: None, dataclasses.replace(again_facts, batches=None)))
        index = len(self._session.loaders) - 1
        made = again(loader, workers)
        made.__dict__["_hasten_index"] = index
        self._stages.on = True
        self._try(workers, lambda _: _draw(made, stages, 6 * max(1, workers)))
        self._stages.on = False
        found = self._stages.of(index)
        if found is not None:
            self._tell("stages", workers=workers, **dataclasses.asdict(found))
        made = again(loader, workers, init=TraceableWorker(loader.worker_init_fn) if workers else None)
        self._try(workers, lambda _: self._burn(made, workers, flame))

    def _burn(self, loader: Any, workers: int, seconds: float) -> None:
        """Draw batches until py-spy has seen enough."""
        begin = time.perf_counter()
        iterator = iter(loader)
        next(iterator, None)
        pid = iterator._workers[0].pid if workers else os.getpid()
        self._tell("flame", pid=pid, workers=workers, seconds=seconds)
        enough = f"{self._file}.burnt"
        while not os.path.exists(enough) and time.perf_counter() - begin < seconds + 15:
            if next(iterator, None) is None:
                iterator = iter(loader)


class TraceableWorker:
    """A `worker_init_fn`: the script's own, after leave was given to be looked into (Yama allows that to none)."""

    def __init__(self, then: Any) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_ulong(_ANY_PROCESS), 0, 0, 0)
        if self._then is not None:
            self._then(worker)


def facts_options(loader: Any) -> dict[str, Any]:
    """A loader's arguments, as `loader_facts` wants them."""
    names = ("dataset", "prefetch_factor", "persistent_workers", "pin_memory", "worker_init_fn")
    return {name: getattr(loader, name) for name in names}


def _draw(loader: Any, seconds: float, batches: int) -> None:
    """Draw batches: each worker is to make a few."""
    begin = time.perf_counter()
    for number, _ in enumerate(loader, 1):
        if number >= batches or time.perf_counter() - begin > seconds:
            break


def _counts(loader: Any, facts: Any) -> tuple[list[int], str]:
    """Numbers of workers to measure, none first; and why not more."""
    own, cores = facts.num_workers, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
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


def told(error: BaseException) -> str:
    """An error in one line; of a worker's, what it was in the worker."""
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    if lines and "in DataLoader worker process" in lines[0]:
        return lines[-1]
    return f"{name}: {lines[0]}" if lines else name


def place_of(error: BaseException) -> str:
    """`file:line` of the script's own code in which an error arose, in this process or in a worker; "" if in none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames += [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    own = [place for place in frames if not place[0].startswith(("<", _OURS, *_LIBRARIES))]
    # The script's loop stands first, what the dataset did behind it.
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""
