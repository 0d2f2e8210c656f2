"""Where a loader's time goes, by stage, sampled where the samples are made: in its workers, if it has any.

A few batches of a worker are made under the clock (`stage_clock`), one more under the line tracer (`line_trace`); all
others are made by torch's own fetcher. What a worker saw goes through a small file, not through the batches.
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

_FOLDER, _LOADER = "HASTEN_STAGES", "HASTEN_LOADER"  # where workers leave what they saw; whose workers they are
_FIRST = 2  # batches of a process that are left to warm it up
_WORKERS = 4  # of a loader with more of them, so many are looked into
_PASSES = 2  # of loaders that make new workers for each pass


def install(session: Session) -> None:
    """Set the taps on every DataLoader, and on torchdata's StatefulDataLoader when it is imported."""
    import torch.utils.data.dataloader as room

    observer = LoaderStages(session)
    observer.tap_fetchers(room._DatasetKind)
    observer.tap_loaders(room.DataLoader)
    what = "stages of a StatefulDataLoader"
    once_imported(session, STATEFUL, what, lambda room: observer.tap_loaders(room.StatefulDataLoader))
    session.observers.append(observer)
    atexit.register(observer.remove)  # after the evidence, which is left by what is registered later


class LoaderStages:
    """Samples loaders' first batches, and gathers what their workers left.

    Attributes:
        on: Whether loaders that begin a pass now are sampled.
    """

    def __init__(self, session: Session) -> None:
        self.on = True
        self._session = session
        self._folder = ""
        self._owner = 0
        self._passes: dict[int, int] = defaultdict(int)
        self._here: dict[int, Samples] = {}  # what this process itself saw, by loader
        self._steps: set[int] = set()
        self._building: tuple[int, int] | None = None  # loader, first batch to be sampled

    # -- the taps --------------------------------------------------------------------------------------

    def tap_loaders(self, kind: Any) -> None:
        """Know whose fetcher is made: that of the loader which begins a pass."""

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

    def tap_fetchers(self, kinds: Any) -> None:
        """Give the fetchers of loaders that are sampled a `fetch` of their own, until they have been."""

        def making(plain: Any) -> Any:
            def create_fetcher(*args: Any, **kwargs: Any) -> Any:
                fetcher = plain(*args, **kwargs)
                with self._session.run.guard("stages of a loader"):
                    self._watch(fetcher)
                return fetcher

            return create_fetcher

        tap(kinds, "create_fetcher", making)

    def _begin(self, loader: Any) -> None:
        index = loader.__dict__.get("_hasten_index", -1)
        if not self.on or index < 0:
            return
        self._passes[index] += 1
        if loader.num_workers and self._passes[index] > _PASSES:
            return
        batches = self._session.loaders[index].facts.batches
        a_process = math.inf if batches is None else math.ceil(batches / max(1, loader.num_workers))
        first = int(max(0, min(_FIRST, a_process - TIMED - 1)))
        if loader.num_workers:
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="hasten-stages-")
                self._owner = os.getpid()
            os.environ[_FOLDER] = f"{os.getpid()}:{self._folder}"
            os.environ[_LOADER] = f"{index}:{first}"  # workers have this process's environment, forked or spawned
        self._building = (index, first)

    def _watch(self, fetcher: Any) -> None:
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
            kept = self._here.setdefault(index, Samples())
            fetcher.fetch = SampledFetch(fetcher, index, first, kept, file, self._note)

    def _note(self, error: Exception | None) -> None:
        """A batch of this process was sampled: the step it belongs to does not count."""
        if error is not None:
            self._session.run.skip("stages of a loader", error)
        recorder = self._session.run.recorder
        if recorder is not None:
            self._steps.add(recorder.steps)

    # -- what was seen ---------------------------------------------------------------------------------

    def of(self, index: int) -> Stages | None:
        """The stages of a loader; None where no batch of it was sampled."""
        samples = [self._here[index]] if index in self._here else []
        for name in os.listdir(self._folder) if self._folder else ():
            if name.startswith(f"{index}-") and name.endswith(".json"):
                with open(os.path.join(self._folder, name)) as file:
                    samples.append(Samples(**json.load(file)))
        return _stages(index, [one for one in samples if one.batches])

    def facts(self) -> dict[str, Any]:
        """The stages, for the evidence, and the steps that were disturbed."""
        found = [self.of(index) for index in range(len(self._session.loaders))]
        self.on = False
        self.remove()
        return {"stages": tuple(one for one in found if one is not None), "disturbed": tuple(sorted(self._steps))}

    def remove(self) -> None:
        """Remove the workers' folder, unless this is a fork that ends before its parent."""
        if self._folder and os.getpid() == self._owner:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


def _stages(index: int, samples: list[Samples]) -> Stages | None:
    if not samples:
        return None
    seconds: dict[str, float] = {}
    decoders: dict[str, float] = {}
    lines: dict[str, float] = {}
    for one in samples:
        add(seconds, one.seconds)
        add(decoders, one.decoders)
        add(lines, one.lines)
    batches = sum(one.batches for one in samples)
    total = sum(seconds.values())
    copied = sum(one.copied for one in samples)
    return Stages(
        loader=index,
        batches=batches,
        **{name: spent / batches for name, spent in seconds.items()},
        python=_python_share(samples, seconds),
        hottest=max(lines, key=lines.__getitem__) if lines else "",
        decoder=max(decoders, key=decoders.__getitem__) if decoders else "",
        copies=copied / (copied + total) if copied else 0.0,
    )


def _python_share(samples: list[Samples], seconds: dict[str, float]) -> float:
    """Return the share of pure Python in the time in which samples were made."""
    making = sum(seconds.values()) - seconds["collate"]
    if any(one.endless for one in samples) and making > 0:
        return seconds["other"] / making
    traced = [one for one in samples if one.lines]
    quickest = sum(one.quickest for one in traced)
    return min(1.0, sum(sum(one.lines.values()) for one in traced) / quickest) if quickest > 0 else 0.0
