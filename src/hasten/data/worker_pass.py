"""Lets worker processes make the batches of a loader with num_workers=0, as long as the batches stay the same.

Problem: such a dataset may depend on the training's memory (an epoch counter, a cache), which workers don't see.
Approach: torch's iterator draws its seeds and indices as usual; at the first batch, workers are forked, so they start
from the training's current state. A `Snapshot` of everything that samples depend on is compared before each batch in
the training, and after each batch in its worker. As soon as anything changed, the workers are shut down, and the
training makes this batch and all later ones.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from hasten.data.opened_files import changed_file, mapped_file
from hasten.data.sample_fetcher import shared_bytes
from hasten.data.sample_keys import unmoved
from hasten.data.sampler_order import Positions, batches, batching, why_not
from hasten.data.snapshot import Snapshot
from hasten.data.worker_batch import END, BatchMaker, MadeBatch, says, seed_batch
from hasten.data.worker_deaths import DeferredWorkerDeath
from hasten.data.worker_room import WorkerRoom


def _unchanged(item: MadeBatch) -> MadeBatch:
    """Return the item unchanged: the workers' collate function, as an item is already a batch."""
    return item


class _Workers(DeferredWorkerDeath, _MultiProcessingDataLoaderIter):
    """torch's iterator over workers, which takes its tasks from the pass."""

    def __init__(self, loader: Any, tasks: Callable[[], Any]) -> None:
        self._hasten_tasks = tasks
        super().__init__(loader)
        self._hasten_forget()

    def _next_index(self) -> Any:
        return self._hasten_tasks()

    def hasten_next(self) -> MadeBatch:
        """Return the next batch; raise StopIteration at the end."""
        made: MadeBatch = cast(Any, self)._next_data()
        return made

    def hasten_end(self) -> None:
        """Shut down the workers."""
        self._shutdown_workers()


class WorkerPasses:
    """The settings under which a loader's passes use workers; attached to the loader.

    Args:
        workers: Number of workers.
        prefetch: Batches that each worker may make ahead.
        let_go: Called with the reason when the loader must no longer use workers.
        fewer: Called with a text when a pass uses fewer workers, or none, for lack of memory.
    """

    def __init__(
        self, workers: int, prefetch: int, let_go: Callable[[str], None], fewer: Callable[[str], None] | None = None
    ) -> None:
        self.workers, self.prefetch = workers, prefetch
        self._let_go, self._fewer = let_go, fewer or _ignore
        self.room = WorkerRoom(workers, prefetch)
        self._warned: set[tuple[str, bool]] = set()

    def counts(self) -> tuple[int, int]:
        """Return how many workers a new pass has room for, and how many batches each may make ahead."""
        workers, prefetch, why = self.room.counts()
        if why:
            ahead = f"{prefetch} batch{'es' * (prefetch > 1)} ahead"
            fewer = f"{workers} of {self.workers} workers, each {ahead}, from this pass on"
            self.tell(f"{fewer if workers else 'no worker, the training makes this pass itself'}: {why}")
        return workers, prefetch

    def tell(self, why: str) -> None:
        """Report the effect of a lack of room, once per kind of reason, as only the figures differ between passes."""
        kind = why.partition(":")[0], "/dev/shm" in why
        if kind not in self._warned:
            self._warned.add(kind)
            self._fewer(why)

    def stop(self, why: str) -> None:
        """Let the training make this loader's batches from now on."""
        if self.workers:
            self.workers = 0
            self._let_go(why)

    def __reduce__(self) -> Any:
        return WorkerPasses, (0, 0, _ignore)  # in another process, a copy of the loader uses no extra workers


def _ignore(why: str) -> None:
    """Do nothing: the callback if nobody wants to know."""


def hand_over(loader: Any, to: WorkerPasses) -> None:
    """Let workers make the batches of a loader with num_workers=0, while `handing_over` is installed."""
    loader.__dict__["_hasten_workers"] = to


def handing_over(plain: Any) -> Any:
    """Return a `DataLoader._get_iterator` that uses workers for loaders given to `hand_over`, else calls `plain`."""

    def _get_iterator(self: Any) -> Any:
        known = self.__dict__.get("_hasten_workers")
        if known is None or not known.workers or self.num_workers:
            return plain(self)
        return WorkerPassIterator(self, known)

    return _get_iterator


class WorkerPassIterator(_SingleProcessDataLoaderIter):
    """torch's iterator over a loader without workers, with batches made by workers.

    Args:
        loader: A loader with num_workers=0 over a map-style dataset.
        handed: The settings attached to the loader.
    """

    _sampler_iter: Iterator[Any]

    def __init__(self, loader: Any, handed: WorkerPasses) -> None:
        super().__init__(loader)
        self._hasten_loader_itself = loader
        self._hasten_batcher = loader.batch_sampler  # this pass keeps it, even if the loader's is replaced
        self._hasten_positions = Positions(loader, self._sampler_iter)
        self._sampler_iter = self._hasten_positions.order
        self._hasten_counts = 0, 0
        self._hasten_pids: list[int] = []
        self._hasten_handed, self._hasten_let_go = handed, handed.stop
        self._hasten_workers: _Workers | None = None
        self._hasten_snapshot: Snapshot | None = None
        self._hasten_drawn: deque[Any] = deque()  # indices of batches in flight, as the sampler drew them
        self._hasten_sent: deque[Any] = deque()  # the same, as sent to workers (see Positions)
        self._hasten_number = self._hasten_ends = 0
        self._hasten_begun = self._hasten_ahead = self._hasten_alone = False

    def _next_data(self) -> Any:
        if not self._hasten_begun:
            self._hasten_begun = True
            self._hasten_begin()
        if self._hasten_workers is not None:
            made = self._hasten_made()
            if made is not None:
                return made.batch
        if self._hasten_alone:
            return self._hasten_as_workers_do()
        return cast(Any, super())._next_data()

    def _next_index(self) -> Any:
        if not self._hasten_ahead and self._hasten_drawn:  # drawn for workers that are shut down by now
            return self._hasten_positions.indices(self._hasten_drawn.popleft())
        drawn = cast(Any, super())._next_index()
        self._hasten_number += 1  # counts from the pass's first batch, also if the pass is resumed later
        if self._hasten_ahead:
            self._hasten_drawn.append(drawn)
        return self._hasten_positions.indices(drawn)

    # -- the workers ----------------------------------------------------------------------------------

    def _hasten_begin(self) -> None:
        """Take the snapshot and start the workers, unless something speaks against it."""
        loader = self._hasten_loader_itself
        snapshot = Snapshot({"dataset": self._dataset_fetcher.dataset, "collate_fn": loader.collate_fn})
        why = (snapshot.blind and f"the dataset {snapshot.blind}") or says(snapshot)
        # Check the sampler here again, not only when the loader is built: loaders that keep one endless pass (timm's,
        # Ultralytics') replace their batch sampler after that.
        if why := why or why_not(loader.sampler if self._hasten_batcher is None else self._hasten_batcher):
            self._hasten_let_go(why)
            return
        count, prefetch = self._hasten_counts = self._hasten_handed.counts()
        if not count:
            self._hasten_alone = True
            return
        self._hasten_snapshot = snapshot
        self._hasten_ambient = _ambient()
        self._hasten_batching = batching(self._hasten_batcher)
        options = {
            "dataset": BatchMaker(self._dataset_fetcher, snapshot, int(self._base_seed)),
            "num_workers": count,
            "prefetch_factor": prefetch,
            "collate_fn": _unchanged,
            "sampler": (),
            "batch_sampler": None,
            "worker_init_fn": None,
            "persistent_workers": False,
            "in_order": True,
            "generator": torch.Generator(),  # torch's iterator draws a seed again: not from the training's generator
            "hasten_within": True,
        }
        within = copy.copy(loader)
        within.__dict__.update(options, _DataLoader__multiprocessing_context=torch.multiprocessing.get_context("fork"))
        within.__dict__["_dataset_kind"] = _DatasetKind.Map
        me = weakref.ref(self)  # no reference cycle, so that workers end as soon as the pass is abandoned

        def task() -> Any:
            known = me()
            if known is None:
                raise StopIteration
            return known._hasten_task()

        self._hasten_ahead = True
        self._hasten_workers = _Workers(within, task)
        self._hasten_pids = [worker.pid for worker in self._hasten_workers._workers]  # torch never replaces a worker

    def _hasten_task(self) -> Any:
        """Return the next task for a worker: a batch's number and indices, or END for each worker at the end."""
        try:
            indices = self._next_index()
        except StopIteration:  # ask each worker for a last, full comparison
            if self._hasten_ends == self._hasten_counts[0]:
                raise
            self._hasten_ends += 1
            return END
        self._hasten_sent.append(indices)
        return self._hasten_number, indices

    def _hasten_made(self) -> MadeBatch | None:
        """Return the next batch from the workers; None if the training has to make it."""
        assert self._hasten_snapshot is not None
        workers = self._hasten_workers
        assert workers is not None
        rows = self._hasten_positions.indices(self._hasten_drawn[0]) if self._hasten_drawn else ()
        why = self._hasten_snapshot.changed(rows)
        if self._hasten_positions.exchanged(rows, self._hasten_sent):
            why = why or "what the sampler orders"
        if _ambient() != self._hasten_ambient:
            why = why or "torch's default type or grad mode"
        if batching(self._hasten_batcher) != self._hasten_batching:
            self._hasten_batch_again()
            why = why or "the batch size"
        if why:
            self._hasten_dismiss(f"{why} changed during a pass")
            return None
        if self._hasten_drawn and (short := self._hasten_handed.room.short(self._hasten_pids)):
            self._hasten_pause(short)
            return None
        try:
            batch = workers.hasten_next() if self._hasten_drawn else self._hasten_ended(workers)
        except StopIteration:
            raise
        except Exception as error:  # let the training make this batch, and raise the error itself if it is the sample's
            self._hasten_dismiss(f"a worker failed ({type(error).__name__})")
            return None
        self._hasten_handed.room.holds(batch.size)
        if batch.changed:
            self._hasten_dismiss(batch.changed)
            return None
        if batch.full:
            self._hasten_pause(batch.full)
            return None
        if path := changed_file(batch.files):
            self._hasten_dismiss(f"{path} changed during a pass")
            return None
        if path := mapped_file(batch.files):
            self._hasten_dismiss(f"{path} is mapped to be written to, which shows no change")
            return None
        self._hasten_drawn.popleft()
        self._hasten_sent.popleft()
        return batch

    def _hasten_ended(self, workers: _Workers) -> MadeBatch:
        """End the pass: run a full comparison here and in each worker, report changes, and raise StopIteration."""
        assert self._hasten_snapshot is not None
        here = self._hasten_snapshot.changed_at_all()
        reports = [workers.hasten_next() for _ in range(self._hasten_counts[0])]
        self._hasten_handed.room.measure(self._hasten_pids)
        self._hasten_workers = None
        workers.hasten_end()
        if part := here or next((report.changed for report in reports if report.changed), ""):
            self._hasten_let_go(
                f"{part} changed during a pass, seen only at its end: batches of this pass may not be what they "
                "would have been"
            )
        raise StopIteration

    def _hasten_dismiss(self, why: str) -> None:
        """Let the training make the rest of this pass, and all later passes."""
        self._hasten_end_workers()
        self._hasten_let_go(why)

    def _hasten_pause(self, why: str) -> None:
        """Let the training make the rest of this pass for lack of memory; the next uses as many workers as fit."""
        assert self._hasten_snapshot is not None
        if changed := self._hasten_snapshot.changed_at_all():  # now, as there is no comparison at this pass's end
            self._hasten_dismiss(f"{changed} changed during a pass")
            return
        self._hasten_handed.room.measure(self._hasten_pids)
        self._hasten_end_workers()
        self._hasten_alone = True
        self._hasten_handed.tell(f"the training makes the rest of this pass itself: {why}")

    def _hasten_end_workers(self) -> None:
        """Shut down the workers and draw no more indices ahead."""
        workers, self._hasten_workers, self._hasten_ahead = self._hasten_workers, None, False
        if workers is not None:
            workers.hasten_end()

    def _hasten_as_workers_do(self) -> Any:
        """Make the next batch here with a worker's random numbers, and leave the training's generators unchanged."""
        number = self._hasten_number - len(self._hasten_drawn) + 1
        indices = self._next_index()
        with unmoved():
            seed_batch(int(self._base_seed), number)
            batch = self._dataset_fetcher.fetch(indices)
        # A worker that had no room for its batch may not know its size, and two that ran short at once leave more room
        # free than either had.
        self._hasten_handed.room.holds(shared_bytes(batch))
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _hasten_batch_again(self) -> None:
        """Put the indices that were drawn ahead into batches of the new batch size."""
        rest = itertools.chain.from_iterable(list(self._hasten_drawn))
        self._hasten_drawn = deque()
        self._sampler_iter = batches(
            itertools.chain(rest, itertools.chain.from_iterable(self._sampler_iter)), self._hasten_batcher
        )


def _ambient() -> Any:
    """Return torch's default dtype and grad mode, which forked workers keep as they were at the fork."""
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
