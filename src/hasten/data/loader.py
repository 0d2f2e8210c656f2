"""`hasten.data.DataLoader`: torch's signature, exact elastic resume, and samples that do not depend on workers.

How the parts work together:

- `ElasticSampler` computes the order of an epoch from (seed, epoch) and gives each rank its share, so the state of a
  pass is a few numbers, and a run with other ranks or workers can resume it.
- `ElasticBatches` cuts that share into batches, each labelled with its seed, epoch and number (`KeyedBatch`).
- `SampleFetcher` reseeds the random generators by (seed, epoch, index) before it makes each sample.
- `passes` and `thread_pass` hold the iterators: in this process, in torch's worker processes, or in threads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, Sampler

from hasten.data import rng
from hasten.data.elastic import ElasticBatches, ElasticSampler, Order, check_rank
from hasten.data.passes import InProcess, WorkerProcesses
from hasten.data.permutation import Permutation, key_of
from hasten.data.sample_fetcher import ON_ERROR, FaultLedger, SampleFault
from hasten.data.sample_keys import Reseed, unmoved
from hasten.data.thread_pass import ThreadPass
from hasten.errors import HastenError
from hasten.messages import warn

_log = logging.getLogger("hasten")


class DataLoader(TorchDataLoader[Any]):
    """A DataLoader for map-style datasets that resumes exactly, with any numbers of workers and ranks.

    The order is computed from (seed, epoch). Before each sample, the generators of `random`, NumPy and torch, and
    those stored in the dataset, are seeded by (seed, epoch, index), so every worker makes the same sample (in thread
    workers, only those of `hasten.data.sample_rng()`); the training's own generators keep their state. The loader
    shards samples across ranks: no DistributedSampler and no `set_epoch` are needed, though
    `loader.sampler.set_epoch(epoch)` sets the epoch of the next pass.

    Not supported, unlike torch's loader: iterable datasets, `batch_sampler`, `batch_size=None`, `in_order=False`.

    Args:
        dataset: Has `__len__` and `__getitem__` (or `__getitems__`).
        batch_size: Samples per batch, on each rank.
        shuffle: Use a new random order each epoch.
        sampler: Gives the order; needs a length, such as a WeightedRandomSampler. Its draws are seeded by
            (seed, epoch).
        batch_sampler: Refused.
        num_workers: Workers that make batches; 0: the training process makes them itself.
        collate_fn: As in torch.
        pin_memory: As in torch.
        drop_last: Drop the samples that do not fill a batch on all ranks. Otherwise the last batch is smaller, and if
            the ranks cannot share it equally, it repeats the epoch's first samples.
        timeout: Seconds to wait for a batch before an error names the worker, the sample it makes, and its stack.
        worker_init_fn: As in torch.
        multiprocessing_context: As in torch.
        generator: Its `initial_seed()` is the seed if `seed` is not given. Nothing is drawn from it.
        prefetch_factor: Batches each worker makes ahead; default 2.
        persistent_workers: Keep worker processes from pass to pass.
        pin_memory_device: As in torch.
        in_order: Must be True.
        seed: Seed of the order and of the samples, the same on all ranks; default 0.
        workers: "process", or "thread" for datasets that spend their time with the GIL released; None: for a
            ParquetDataset its `best_workers`, else "process".
        on_error: What to do when a sample raises: "raise", "skip" it (the batch is smaller), or "substitute" another
            sample chosen by seed, epoch and index. `faults` lists the skipped and replaced samples.
        rank: Rank of this process; default: torch.distributed's, else the variable RANK.
        world_size: Number of ranks; default: torch.distributed's, else the variable WORLD_SIZE.

    Example:
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4, seed=1)
        >>> loader.load_state_dict(checkpoint["loader"])  # from any number of workers and ranks
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[int] | None = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        workers: Literal["process", "thread"] | None = None,
        on_error: Literal["raise", "skip", "substitute"] = "raise",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        workers = workers or _best_workers(dataset)
        _check(dataset, batch_size, batch_sampler, sampler, shuffle, in_order, workers, on_error)
        if (rank is None) != (world_size is None):
            raise HastenError("DataLoader was given only one of rank and world_size", "give both, or neither")
        if rank is not None and world_size is not None:
            check_rank(rank, world_size)
        assert batch_size is not None
        if seed is None:
            seed = 0 if generator is None else generator.initial_seed()
        order, length, name = _order(dataset, bool(shuffle), sampler)
        shares = ElasticSampler(dataset, length, order, _fingerprint(dataset, name), int(seed), rank, world_size)
        self.workers = workers
        self.on_error = on_error
        self.ledger = FaultLedger()
        self._warned = False
        super().__init__(
            dataset,
            batch_sampler=ElasticBatches(shares, batch_size, drop_last),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=None if workers == "thread" else multiprocessing_context,
            # torch's iterators draw a base seed for their workers from this generator. Nothing here depends on that
            # seed, but with `generator=None` they would draw it from the training's generator.
            generator=torch.Generator().manual_seed(key_of(seed) >> 1),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        # With a batch_sampler, torch sets batch_size=None, drop_last=False and a default sampler, and its __setattr__
        # refuses to change them. Users, trainers and reports read them, so write past it.
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last, sampler=shares)

    def __iter__(self) -> Any:
        """Begin a pass over the next epoch, or over the rest of the epoch in a loaded state."""
        sampler = self.sampler
        if isinstance(sampler, ElasticSampler):
            self._warn_of_uneven_ranks(sampler)
            sampler.begin(self.batch_size or 1)
        return super().__iter__()

    def _get_iterator(self) -> Any:
        if not isinstance(self.sampler, ElasticSampler):
            return super()._get_iterator()
        if not self.num_workers:
            return InProcess(self)
        if self.workers == "thread":
            return ThreadPass(self)
        self.check_worker_number_rationality()
        return WorkerProcesses(self)

    @contextlib.contextmanager
    def lent(self, **attributes: Any) -> Iterator[None]:
        """Replace attributes of this loader temporarily, while torch's iterator reads them in its `__init__`."""
        before = {name: self.__dict__[name] for name in attributes}
        self.__dict__.update(attributes)
        try:
            yield
        finally:
            self.__dict__.update(before)

    @property
    def faults(self) -> list[SampleFault]:
        """The samples skipped or replaced so far, over all passes."""
        return self.ledger.faults

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: seed, epoch, samples consumed over all ranks, fingerprint of the data.

        It counts the batches that the loader has yielded. It is the same on all ranks, and under 1 KB.
        """
        return self._elastic().state_dict()

    def state_after(self, batches: int) -> dict[str, Any]:
        """Return the state after `batches` batches of the latest pass, even if more were prefetched than consumed."""
        return self._elastic().state_dict(batches)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass begin at a saved state. A state saved after an epoch's last batch gives an empty pass."""
        elastic = self._elastic()
        seed = elastic.seed
        elastic.load_state_dict(state)
        if elastic.seed != seed:
            _log.info("the loader goes on with the state's seed %d, not %d", elastic.seed, seed)
        if self._iterator is not None:  # persistent workers still have prefetched batches of the old position
            self._iterator = None

    def _elastic(self) -> ElasticSampler:
        if not isinstance(self.sampler, ElasticSampler):
            raise HastenError("this loader's sampler was replaced, so it has no state", "make a new loader")
        return self.sampler

    def _warn_of_uneven_ranks(self, sampler: ElasticSampler) -> None:
        """Warn once, on rank 0, how many samples are dropped or repeated because of the number of ranks.

        Raises:
            HastenError: `drop_last` leaves no batch at all.
        """
        if self._warned or not isinstance(self.batch_sampler, ElasticBatches):
            return
        self._warned = True
        rank, size = sampler.world()
        extra = self.batch_sampler.left_over()
        if not len(self) and sampler.length:
            raise HastenError(
                f"drop_last leaves no batch: {sampler.length} samples, batches of {self.batch_size} on {size} ranks",
                "give a smaller batch_size, or drop_last=False",
            )
        if size == 1 or rank or not extra:
            return
        if extra > 0:
            effect = f"the last {extra} of each epoch are left out (drop_last), so that all ranks get equally many"
        else:
            effect = (
                f"{-extra} come twice in each epoch, so that all ranks get equally many (drop_last leaves some out)"
            )
        warn(f"{sampler.length} samples on {size} ranks: {effect}", stacklevel=3)


def _best_workers(dataset: Any) -> Literal["process", "thread"]:
    if not hasattr(dataset, "read_batch"):
        return "process"
    best: Literal["process", "thread"] = getattr(dataset, "best_workers", "thread")  # a ParquetDataset knows
    return best


def _check(
    dataset: Any,
    batch_size: Any,
    batch_sampler: Any,
    sampler: Any,
    shuffle: bool | None,
    in_order: bool,
    workers: str,
    on_error: str,
) -> None:
    """Raise HastenError for options that this loader does not support, before anything is built."""
    fix = "use torch.utils.data.DataLoader for it: hasten's Trainer resumes that too"
    if isinstance(dataset, IterableDataset):
        raise HastenError(
            f"{type(dataset).__name__} is an IterableDataset: its samples have no index to go on from",
            f"give a dataset with __getitem__ and __len__ (hasten.data.ParquetDataset reads files), or {fix}",
        )
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")) or not hasattr(dataset, "__len__"):
        raise HastenError(f"a {type(dataset).__name__} is no dataset: it needs __getitem__ and __len__")
    if batch_sampler is not None:
        raise HastenError("hasten.data.DataLoader makes batches itself and takes no batch_sampler", fix)
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise HastenError(f"batch_size={batch_size!r} must be a whole number of at least 1")
    if not in_order:
        raise HastenError("in_order=False cannot be resumed exactly", f"leave it out, or {fix}")
    if workers not in ("process", "thread"):
        raise HastenError(f"workers={workers!r} must be 'process' or 'thread'")
    if on_error not in ON_ERROR:
        raise HastenError(f"on_error={on_error!r} must be one of {', '.join(map(repr, ON_ERROR))}")
    if sampler is not None and shuffle:
        raise HastenError("a sampler gives the order, so shuffle cannot be True", "leave one of them out")
    if isinstance(sampler, DistributedSampler):
        raise HastenError(
            "this loader shares samples out among ranks itself, and was given a DistributedSampler",
            "leave the sampler out and give shuffle=True or False",
        )
    if sampler is not None and not hasattr(sampler, "__len__"):
        raise HastenError(f"{type(sampler).__name__} has no length, so its epochs have no end to share out", fix)


def _order(dataset: Any, shuffle: bool, sampler: Sampler[int] | None) -> tuple[Callable[[int, int], Order], int, str]:
    """Return the epoch's index order, its number of samples, and the order's name for the fingerprint."""
    # A plain RandomSampler means shuffle=True: the computed permutation replaces it, which needs no stored order.
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(dataset):
        sampler, shuffle = None, True
    if sampler is not None:
        return functools.partial(_drawn, sampler), len(sampler), type(sampler).__name__  # type: ignore[arg-type]
    if shuffle and hasattr(dataset, "order"):  # a ParquetDataset: its order keeps only a few row groups open at a time
        return dataset.order, len(dataset), "shuffled"
    if shuffle:
        return functools.partial(Permutation, len(dataset)), len(dataset), "shuffled"
    return getattr(dataset, "order_in_files", _in_order), len(dataset), "in order"


def _in_order(seed: int, epoch: int) -> Order:
    return lambda positions: positions


def _drawn(sampler: Sampler[int], seed: int, epoch: int) -> Order:
    """Return the order that a sampler draws with its generators seeded by (seed, epoch), and leave them unchanged."""
    own = rng.find(sampler)
    before = rng.states_of(own)
    with unmoved():
        Reseed(sampler)(key_of(seed, epoch))
        drawn = np.fromiter(sampler, dtype=np.int64)
    rng.set_states(own, before)
    return lambda positions: drawn[positions]


def _fingerprint(dataset: Any, order: str) -> str:
    """Return a short text that identifies the data and its order: a state with another one cannot be resumed."""
    own = getattr(dataset, "fingerprint", None)
    text = f"{len(dataset)} samples {order}"
    if isinstance(own, str):
        return f"{text}, {hashlib.blake2b(own.encode(), digest_size=8).hexdigest()}"
    return text
