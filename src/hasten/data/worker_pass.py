"""A pass with num_workers=0 whose batches worker processes make, as long as they give what it would have given.

torch's own iterator draws what it draws; at its first batch, workers are forked: they know all that the training
knows by then. Each batch comes with what its making changed. As soon as anything that samples depend on changed, in
the training or in a worker, the workers are dismissed, and this batch and all later ones are made by the training.
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
from hasten.data.sample_keys import unmoved
from hasten.data.sampler_order import Positions, batches, batching, why_not
from hasten.data.snapshot import Snapshot
from hasten.data.worker_batch import END, BatchMaker, MadeBatch, says, seed_batch
from hasten.data.worker_deaths import DeferredWorkerDeath
from hasten.data.worker_room import WorkerRoom


def _as_it_is(made: MadeBatch) -> MadeBatch:
    return made


class _Workers(DeferredWorkerDeath, _MultiProcessingDataLoaderIter):
    """torch's own iterator over workers, which asks the pass for its indices."""

    def __init__(self, loader: Any, tasks: Callable[[], Any]) -> None:
        self._hasten_tasks = tasks
        super().__init__(loader)
        self._hasten_forget()

    def _next_index(self) -> Any:
        return self._hasten_tasks()

    def hasten_next(self) -> MadeBatch:
        """The next batch; StopIteration at the end."""
        made: MadeBatch = cast(Any, self)._next_data()
        return made

    def hasten_end(self) -> None:
        """Dismiss the workers."""
        self._shutdown_workers()


class WorkerPasses:
    """On a loader: its passes are handed over to workers.

    Args:
        workers: How many.
        prefetch: How many batches each may be ahead.
        let_go: Told why, when they must not be any more.
        fewer: Told in words when a pass has fewer workers, or goes on without them, for lack of room.
    """

    def __init__(
        self, workers: int, prefetch: int, let_go: Callable[[str], None], fewer: Callable[[str], None] | None = None
    ) -> None:
        self.workers, self.prefetch = workers, prefetch
        self._let_go, self._fewer = let_go, fewer or _nobody
        self.room = WorkerRoom(workers, prefetch)
        self._said: set[tuple[str, bool]] = set()

    def counts(self) -> tuple[int, int]:
        """Return how many workers a pass that begins has room for, and how many batches each may be ahead."""
        workers, prefetch, why = self.room.counts()
        if why:
            ahead = f"{prefetch} batch{'es' * (prefetch > 1)} ahead"
            fewer = f"{workers} of {self.workers} workers, each {ahead}, from this pass on"
            self.tell(f"{fewer if workers else 'no worker, the training makes this pass itself'}: {why}")
        return workers, prefetch

    def tell(self, why: str) -> None:
        """Say what lack of room does, once: figures differ from pass to pass, results do not."""
        kind = why.partition(":")[0], "/dev/shm" in why
        if kind not in self._said:
            self._said.add(kind)
            self._fewer(why)

    def stop(self, why: str) -> None:
        """From here on the training makes this loader's batches."""
        if self.workers:
            self.workers = 0
            self._let_go(why)

    def __reduce__(self) -> Any:
        return WorkerPasses, (0, 0, _nobody)  # a copy in another process has a loader like any other


def _nobody(why: str) -> None:
    """Tell nobody."""


def hand_over(loader: Any, to: WorkerPasses) -> None:
    """Let the passes over a loader without workers be made by workers, while passes are tapped."""
    loader.__dict__["_hasten_workers"] = to


def handing_over(plain: Any) -> Any:
    """`DataLoader._get_iterator` that looks for a HandedOver on each loader that begins a pass."""

    def _get_iterator(self: Any) -> Any:
        known = self.__dict__.get("_hasten_workers")
        if known is None or not known.workers or self.num_workers:
            return plain(self)
        return WorkerPassIterator(self, known)

    return _get_iterator


class WorkerPassIterator(_SingleProcessDataLoaderIter):
    """torch's iterator of a loader without workers, whose batches workers make.

    Args:
        loader: Without workers, over a map-style dataset.
        handed: How it is handed over.
    """

    _sampler_iter: Iterator[Any]

    def __init__(self, loader: Any, handed: WorkerPasses) -> None:
        super().__init__(loader)
        self._hasten_loader_itself = loader
        self._hasten_batcher = loader.batch_sampler  # this pass keeps it, whatever the loader's becomes
        self._hasten_positions = Positions(loader, self._sampler_iter)
        self._sampler_iter = self._hasten_positions.order
        self._hasten_counts = 0, 0
        self._hasten_pids: list[int] = []
        self._hasten_handed, self._hasten_let_go = handed, handed.stop
        self._hasten_workers: _Workers | None = None
        self._hasten_snapshot: Snapshot | None = None
        self._hasten_drawn: deque[Any] = deque()  # indices of batches that are not given yet, as they were drawn
        self._hasten_sent: deque[Any] = deque()  # and as workers got them
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
        if not self._hasten_ahead and self._hasten_drawn:  # drawn for workers that are dismissed
            return self._hasten_positions.indices(self._hasten_drawn.popleft())
        drawn = cast(Any, super())._next_index()
        self._hasten_number += 1  # counted from the pass's first batch, also where a pass is resumed later
        if self._hasten_ahead:
            self._hasten_drawn.append(drawn)
        return self._hasten_positions.indices(drawn)

    # -- the workers ----------------------------------------------------------------------------------

    def _hasten_begin(self) -> None:
        loader = self._hasten_loader_itself
        snapshot = Snapshot({"dataset": self._dataset_fetcher.dataset, "collate_fn": loader.collate_fn})
        why = (snapshot.blind and f"the dataset {snapshot.blind}") or says(snapshot)
        # Judged again: loaders that begin no second pass (timm's, Ultralytics') exchange it once they are built.
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
            "collate_fn": _as_it_is,
            "sampler": (),
            "batch_sampler": None,
            "worker_init_fn": None,
            "persistent_workers": False,
            "in_order": True,
            "generator": torch.Generator(),  # the seed is drawn already
            "hasten_within": True,
        }
        within = copy.copy(loader)
        within.__dict__.update(options, _DataLoader__multiprocessing_context=torch.multiprocessing.get_context("fork"))
        within.__dict__["_dataset_kind"] = _DatasetKind.Map
        me = weakref.ref(self)  # no circle: workers end as soon as nobody holds the pass

        def task() -> Any:
            known = me()
            if known is None:
                raise StopIteration
            return known._hasten_task()

        self._hasten_ahead = True
        self._hasten_workers = _Workers(within, task)
        self._hasten_pids = [worker.pid for worker in self._hasten_workers._workers]  # none is ever replaced

    def _hasten_task(self) -> Any:
        try:
            indices = self._next_index()
        except StopIteration:  # then each worker is asked for a last comparison
            if self._hasten_ends == self._hasten_counts[0]:
                raise
            self._hasten_ends += 1
            return END
        self._hasten_sent.append(indices)
        return self._hasten_number, indices

    def _hasten_made(self) -> MadeBatch | None:
        """The next batch from the workers; None where the training has to make it."""
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
            made = workers.hasten_next() if self._hasten_drawn else self._hasten_ended(workers)
        except StopIteration:
            raise
        except Exception as error:  # the training makes this batch, and raises what it raises
            self._hasten_dismiss(f"a worker failed ({type(error).__name__})")
            return None
        self._hasten_handed.room.holds(made.size)
        if made.changed:
            self._hasten_dismiss(made.changed)
            return None
        if made.full:
            self._hasten_pause(made.full)
            return None
        if other := changed_file(made.files):
            self._hasten_dismiss(f"{other} changed during a pass")
            return None
        if other := mapped_file(made.files):
            self._hasten_dismiss(f"{other} is mapped to be written to, which shows no change")
            return None
        self._hasten_drawn.popleft()
        self._hasten_sent.popleft()
        return made

    def _hasten_ended(self, workers: _Workers) -> MadeBatch:
        """Hear what whole looks find at a pass's end."""
        assert self._hasten_snapshot is not None
        found = self._hasten_snapshot.changed_at_all()
        reports = [workers.hasten_next() for _ in range(self._hasten_counts[0])]
        self._hasten_handed.room.measure(self._hasten_pids)
        self._hasten_workers = None
        workers.hasten_end()
        if said := found or next((report.changed for report in reports if report.changed), ""):
            self._hasten_let_go(
                f"{said} changed during a pass, seen only at its end: batches of this pass may not be what they "
                "would have been"
            )
        raise StopIteration

    def _hasten_dismiss(self, why: str) -> None:
        """Have the training make this pass's other batches, and those of all later passes."""
        self._hasten_end_workers()
        self._hasten_let_go(why)

    def _hasten_pause(self, why: str) -> None:
        """For lack of room, have the training make the rest of this pass; the next has as many workers as fit."""
        assert self._hasten_snapshot is not None
        if changed := self._hasten_snapshot.changed_at_all():  # nobody looks at this pass's end
            self._hasten_dismiss(f"{changed} changed during a pass")
            return
        self._hasten_handed.room.measure(self._hasten_pids)
        self._hasten_end_workers()
        self._hasten_alone = True
        self._hasten_handed.tell(f"the training makes the rest of this pass itself: {why}")

    def _hasten_end_workers(self) -> None:
        workers, self._hasten_workers, self._hasten_ahead = self._hasten_workers, None, False
        if workers is not None:
            workers.hasten_end()

    def _hasten_as_workers_do(self) -> Any:
        """Make the next batch here with the random numbers that a worker would draw; the training's own stay."""
        number = self._hasten_number - len(self._hasten_drawn) + 1
        indices = self._next_index()
        with unmoved():
            seed_batch(int(self._base_seed), number)
            batch = self._dataset_fetcher.fetch(indices)
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _hasten_batch_again(self) -> None:
        """The batch size changed: indices that were drawn ahead are put into batches of the new size."""
        rest = itertools.chain.from_iterable(list(self._hasten_drawn))
        self._hasten_drawn = deque()
        self._sampler_iter = batches(
            itertools.chain(rest, itertools.chain.from_iterable(self._sampler_iter)), self._hasten_batcher
        )


def _ambient() -> Any:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
