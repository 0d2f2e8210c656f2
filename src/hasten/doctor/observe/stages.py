"""Sample where a loader's time goes, by stage, in the process that makes the batches: a worker, if there are any.

In each process sampled, a few batches are made under the clock (`stage_clock`) and one more under the line tracer
(`line_trace`); all others are made by torch's own fetcher. `_get_iterator` of loaders is tapped to know which loader a
fetcher is made for, and `create_fetcher` to replace the fetcher's `fetch`. Workers are told the loader through
environment variables, and report through a small JSON file each, so batches are passed on unchanged.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import tempfile
from collections import defaultdict
from typing import Any

from hasten.doctor.observe.sampled_fetch import TIMED, SampledFetch, Samples, add, fetched
from hasten.evidence import Stages
from hasten.taps.after_import import once_imported
from hasten.taps.data import STATEFUL
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_FOLDER, _LOADER = "HASTEN_STAGES", "HASTEN_LOADER"  # environment: where workers write, and which loader's they are
_FIRST = 2  # warm-up batches of a process, which are not sampled
_WORKERS = 4  # workers of a loader to sample, at most
_PASSES = 2  # passes in which to sample workers, for loaders that start new ones in each


def install(session: Session) -> None:
    """Set the taps on every DataLoader, and on torchdata's StatefulDataLoader when it is imported."""
    import torch.utils.data.dataloader as dataloader

    observer = LoaderStages(session)
    observer.tap_fetchers(dataloader._DatasetKind)
    observer.tap_loaders(dataloader.DataLoader)
    subject = "stages of a StatefulDataLoader"
    once_imported(session, STATEFUL, subject, lambda dataloader: observer.tap_loaders(dataloader.StatefulDataLoader))
    session.observers.append(observer)
    # `atexit` calls the latest registered first: the session, registered later, writes the evidence before this removes
    # the files that it reads.
    atexit.register(observer.remove)


class LoaderStages:
    """Samples the first batches of loaders, and gathers what their workers reported.

    Attributes:
        on: Whether to sample loaders that begin a pass.
    """

    def __init__(self, session: Session) -> None:
        self.on = True
        self._session = session
        self._folder = ""
        self._owner = 0
        self._passes: dict[int, int] = defaultdict(int)
        self._own_samples: dict[int, Samples] = {}  # samples of this process itself, by loader
        self._steps: set[int] = set()
        self._building: tuple[int, int] | None = None  # loader that makes its iterator, first batch to sample

    # -- the taps --------------------------------------------------------------------------------------

    def tap_loaders(self, kind: Any) -> None:
        """Tap `_get_iterator` of a loader class, to know which loader a fetcher is made for."""

        def beginning(plain: Any) -> Any:
            def _get_iterator(loader: Any) -> Any:
                with self._session.run.guard("stages of a loader"):
                    self._begin(loader)
                try:
                    return plain(loader)
                finally:
                    self._building = None
                    os.environ.pop(_LOADER, None)

            return _get_iterator

        tap(kind, "_get_iterator", beginning)

    def tap_fetchers(self, dataset_kind: Any) -> None:
        """Tap the making of fetchers, to replace `fetch` of those to be sampled."""

        def making(plain: Any) -> Any:
            def create_fetcher(*args: Any, **kwargs: Any) -> Any:
                fetcher = plain(*args, **kwargs)
                with self._session.run.guard("stages of a loader"):
                    self._watch(fetcher)
                return fetcher

            return create_fetcher

        tap(dataset_kind, "create_fetcher", making)

    def _begin(self, loader: Any) -> None:
        """Prepare to sample a loader that makes its iterator, and tell its workers by the environment."""
        index = loader.__dict__.get("_hasten_index", -1)
        if not self.on or index < 0:
            return
        self._passes[index] += 1
        if loader.num_workers and self._passes[index] > _PASSES:
            return
        batches = self._session.loaders[index].facts.batches
        a_process = math.inf if batches is None else math.ceil(batches / max(1, loader.num_workers))
        first = int(max(0, min(_FIRST, a_process - TIMED - 1)))  # less warm-up if there are few batches
        if loader.num_workers:
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="hasten-stages-")
                self._owner = os.getpid()
            os.environ[_FOLDER] = f"{os.getpid()}:{self._folder}"
            os.environ[_LOADER] = f"{index}:{first}"  # workers have this process's environment, forked or spawned
        self._building = (index, first)

    def _watch(self, fetcher: Any) -> None:
        """Replace a new fetcher's `fetch`, if it is this process's turn to be sampled."""
        import torch

        worker = torch.utils.data.get_worker_info()
        if worker is None:
            if self._building is None:
                return
            index, first = self._building
            file = ""
        else:
            if worker.id >= _WORKERS or _LOADER not in os.environ:
                return
            index, first = map(int, os.environ[_LOADER].split(":"))
            file = os.path.join(os.environ[_FOLDER].partition(":")[2], f"{index}-{os.getpid()}.json")
        if fetched[index] < first + TIMED + 1:
            samples = self._own_samples.setdefault(index, Samples())
            fetcher.fetch = SampledFetch(fetcher, index, first, samples, file, self._note)

    def _note(self, error: Exception | None) -> None:
        """Record the current step as disturbed, because a batch of this process was sampled in it."""
        if error is not None:
            self._session.run.skip("stages of a loader", error)
        recorder = self._session.run.recorder
        if recorder is not None:
            self._steps.add(recorder.steps)

    # -- results ---------------------------------------------------------------------------------------

    def of(self, index: int) -> Stages | None:
        """Return the stages of a loader; None if none of its batches was sampled."""
        samples = [self._own_samples[index]] if index in self._own_samples else []
        for name in os.listdir(self._folder) if self._folder else ():
            if name.startswith(f"{index}-") and name.endswith(".json"):
                with open(os.path.join(self._folder, name)) as file:
                    samples.append(Samples(**json.load(file)))
        return _stages(index, [sampled for sampled in samples if sampled.batches])

    def facts(self) -> dict[str, Any]:
        """Return the stages of all loaders, and the disturbed steps."""
        stages = [self.of(index) for index in range(len(self._session.loaders))]
        self.on = False
        self.remove()
        return {
            "stages": tuple(sampled for sampled in stages if sampled is not None),
            "disturbed": tuple(sorted(self._steps)),
        }

    def remove(self) -> None:
        """Remove the workers' folder; a forked child leaves it to its parent."""
        if self._folder and os.getpid() == self._owner:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


def _stages(index: int, samples: list[Samples]) -> Stages | None:
    """Return the stages of a loader, averaged over the timed batches of all its processes."""
    if not samples:
        return None
    seconds: dict[str, float] = {}
    decoders: dict[str, float] = {}
    lines: dict[str, float] = {}
    for sampled in samples:
        add(seconds, sampled.seconds)
        add(decoders, sampled.decoders)
        add(lines, sampled.lines)
    batches = sum(sampled.batches for sampled in samples)
    total = sum(seconds.values())
    copied = sum(sampled.copied for sampled in samples)
    return Stages(
        loader=index,
        batches=batches,
        **{name: stage_seconds / batches for name, stage_seconds in seconds.items()},
        python=_python_share(samples, seconds),
        hottest=max(lines, key=lines.__getitem__) if lines else "",
        decoder=max(decoders, key=decoders.__getitem__) if decoders else "",
        copies=copied / (copied + total) if copied else 0.0,
    )


def _python_share(samples: list[Samples], seconds: dict[str, float]) -> float:
    """Return the share of pure Python (0 to 1) in the time in which samples are made, collating left out."""
    making = sum(seconds.values()) - seconds["collate"]
    if any(sampled.endless for sampled in samples) and making > 0:  # too much Python to count: all of "other" is
        return seconds["other"] / making
    traced = [sampled for sampled in samples if sampled.lines]
    quickest = sum(sampled.quickest for sampled in traced)
    return min(1.0, sum(sum(sampled.lines.values()) for sampled in traced) / quickest) if quickest > 0 else 0.0
