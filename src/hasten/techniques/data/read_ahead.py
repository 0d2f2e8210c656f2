"""Read and decode files on threads before their samples are made."""

from __future__ import annotations

from typing import Any

from hasten import messages
from hasten.data.stand_in import StandIn, called_by
from hasten.evidence import Evidence, Machine, Phase
from hasten.evidence.figures import percent
from hasten.plan import Setting
from hasten.techniques.base import NO_LOADER, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.data.sample_cache import CachedFunction, with_loader_function

LEAST = 60e-6  # seconds: cost of handing an image from thread to thread and checking it


class ReadAhead(Technique):
    """Read and decode the files of the next batches on threads; the setting is the number of threads.

    For loaders without workers over a dataset with a `loader(path)` function (ImageFolder's idiom). The order of the
    pass is drawn ahead. `dataset[i]` is still called one by one, in order, on the thread that requested the batch, so
    that augmentation draws the same numbers as before; it finds its image already decoded.

    A thread's result is used only while everything that the function depends on, and the files it opened, are
    unchanged. The training reads the first images itself and checks them; one in 200 later ones, chosen at random, is
    read again and compared. Left alone, with the reason, are functions that may draw random numbers, print or write
    something, or cannot be inspected, and samplers whose order may depend on the training. If `loader_workers` acts on
    the same loader, its workers make whole samples, and nothing is read ahead.
    """

    name = "read_ahead"
    effect = Effect.EXACT
    relieves = Resource.DATA
    sources = ("SPDL: threads that release the GIL", "Falcon, tip 1")
    values = int
    acts_on = "a dataset with a `loader` function, read without workers"
    liveness = Liveness.PASS

    @classmethod
    def useless(cls, setting: Any, machine: Machine) -> str:
        """Return that there are too many threads for the machine's cores."""
        if isinstance(setting, int) and setting > 4 * machine.cores:
            return f"{setting} threads on {machine.cores} cores would wait for each other"
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose as many threads as cores, if a repeatable loader function takes long enough."""
        loader = evidence.train_loader
        if loader is None:
            return NO_LOADER
        if loader.iterable:
            return Refusal("an iterable dataset keeps its place: no sample of it is known before its turn")
        if loader.num_workers:
            return Refusal("worker processes read ahead already")
        if loader.probe is None or not loader.probe.loader_function:
            return Refusal(f"{loader.dataset} has no `loader` function that reads a file")
        if not loader.probe.loader_repeatable:
            return Refusal(f"`{loader.probe.loader_function}` gives another sample each time")
        if evidence.share(Phase.DATA) < 0.02:
            return Refusal(f"the step waits {percent(evidence.share(Phase.DATA))} of its time for data")
        seconds, cores = loader.probe.loader_seconds, evidence.machine.cores
        if seconds < LEAST:
            return Refusal(f"a file takes {seconds * 1e6:.0f} us, no more than a thread costs")
        counts = tuple(dict.fromkeys((min(cores, 8), max(1, cores // 2))))
        return Choices(
            counts, f"reading and decoding takes {seconds * 1e6:.0f} us a sample, in the training's own time"
        )

    def batches(self, fetch: Any, iterator: Any) -> Any:
        """Read the files of this pass ahead."""
        if self.active:
            self._begin(iterator)
        return fetch

    def _begin(self, iterator: Any) -> None:
        from hasten.data.file_predictor import FilePredictor
        from hasten.data.read_ahead import ReadAheadSampler
        from hasten.data.worker_pass import WorkerPassIterator

        if isinstance(iterator, WorkerPassIterator):
            return  # a pass of `loader_workers`, which a search may switch off for the next: no refusal for good
        if why := _why_not(iterator):
            self.refused(why)
            return
        dataset = iterator._dataset_fetcher.dataset
        inner = with_loader_function(dataset)
        function = self._function_of(inner)
        if function.over:
            return
        iterator._sampler_iter = ReadAheadSampler(iterator, function, FilePredictor(dataset, inner, function.ways))
        self.did("pass")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.threads = setting if isinstance(setting, int) else 1

    def _function_of(self, inner: Any) -> Any:
        """Return the wrapper of the dataset's `loader` function that uses results made ahead; install it if needed."""
        from hasten.data.read_ahead import ReadFunction

        # Inside a sample cache, so that files whose result is cached are not read at all.
        cache = called_by(inner.loader)
        function = cache.function if isinstance(cache, CachedFunction) else inner.loader
        reader = called_by(function)
        if isinstance(reader, ReadFunction):
            if not reader.over:
                reader.look_again()
            return reader
        reader = ReadFunction(function, self.threads, self._give_up)
        stand_in = StandIn(function, reader)  # even if it gave up at once: later passes need not inspect it again
        if isinstance(cache, CachedFunction):
            cache.function = stand_in
        else:
            inner.loader = stand_in
        return reader

    def _give_up(self, why: str) -> None:
        self.refused(why)
        if self.active:
            messages.tell(f"hasten: read_ahead: {why}; files are read as they are needed from here on.")


def _why_not(iterator: Any) -> str:
    """Return why a pass cannot be read ahead; "" if it can."""
    from torch.utils.data import SubsetRandomSampler
    from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

    from hasten.data.sampler_order import why_not

    if type(iterator) is not _SingleProcessDataLoaderIter:
        return "its batches are not made by torch's own loop in this process"
    if iterator._dataset_kind != _DatasetKind.Map or not iterator._auto_collation:
        return "its dataset does not give samples by index"
    dataset = iterator._dataset_fetcher.dataset
    if with_loader_function(dataset) is None:
        return f"{type(dataset).__name__} has no `loader` function that reads a file"
    sampler = getattr(iterator._index_sampler, "hasten_whole", iterator._index_sampler)
    if why := why_not(sampler):
        return why
    if isinstance(sampler.sampler, SubsetRandomSampler):
        return "a SubsetRandomSampler's indices may be changed during a pass"
    return ""
