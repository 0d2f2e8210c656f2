"""Gives each rank its share of a loader's samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from hasten.errors import HastenError
from hasten.parallel.world import World


class UnrepeatedSampler(DistributedSampler[Any]):
    """A DistributedSampler that gives each sample once: ranks may differ by one. For predictions."""

    def __init__(self, dataset: Dataset[Any], num_replicas: int, rank: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False)
        self.total_size = len(dataset)  # type: ignore[arg-type]
        self.num_samples = len(range(rank, self.total_size, num_replicas))


class ShareOfSampler(DistributedSampler[Any]):
    """A rank's share of what a sampler of the user's own draws: all ranks draw the same, each takes every size-th.

    Args:
        sampler: Of known length; one that draws from torch's global state draws again each epoch.
        num_replicas: How many ranks.
        rank: Which this is.
        seed: The same on all ranks.
    """

    def __init__(self, sampler: Sampler[Any], num_replicas: int, rank: int, seed: int = 0) -> None:
        super().__init__(sampler, num_replicas, rank, shuffle=False, seed=seed)  # type: ignore[arg-type]
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.epoch)
            drawn = list(self.sampler)
        return (drawn[index] for index in super().__iter__())


def distributed_loader(
    loader: Any, world: World, *, train: bool, seed: int = 0, repeat: bool = True
) -> tuple[Any, str | None]:
    """A loader of this rank's share of the samples, in all else a copy of the one given.

    Left as they are: loaders that have a DistributedSampler, and those that cannot be shared out; for these, and
    only these, the text says why.

    Args:
        loader: Usually a DataLoader, of whatever class.
        world: Alone, the loader is given back.
        train: Shuffle as the loader did; else in order. The sampler's `set_epoch` makes epochs differ.
        seed: Of the shuffling; the same on all ranks.
        repeat: Ranks get equally many samples, the first ones repeated where they do not divide; with False each
            sample comes once, so ranks may differ in length: only where no rank waits for another.

    Returns:
        The loader, and what to tell the user.

    Raises:
        HastenError: Its DistributedSampler gives this rank another one's share of the training data.
    """
    if world.size == 1 or not isinstance(loader, DataLoader) or _sampler_of(loader) is None:
        return loader, None if world.size == 1 else _unshared(loader)
    sampler = _sampler_of(loader)
    if isinstance(sampler, DistributedSampler):
        if train and (sampler.num_replicas, sampler.rank) != (world.size, world.rank):
            raise HastenError(
                f"The DistributedSampler of the training data gives rank {world.rank} of {world.size} the share"
                f" {sampler.rank} of {sampler.num_replicas}: samples would be trained on several times, or never.",
                "Build it without num_replicas and rank, or leave it out: the Trainer shares the samples out.",
            )
        return loader, None
    batching = loader.batch_sampler
    if batching is not None and not _plain(batching):
        return loader, _unshared(loader)
    dataset = loader.dataset
    share: DistributedSampler[Any]
    kind = type(sampler).__name__  # torchdata has a RandomSampler of its own
    if kind not in {"SequentialSampler", "RandomSampler"} or getattr(sampler, "replacement", False):
        share = ShareOfSampler(sampler, world.size, world.rank, seed)
    elif not repeat:
        share = UnrepeatedSampler(dataset, world.size, world.rank)
    else:
        shuffle = train and kind == "RandomSampler"
        share = DistributedSampler(dataset, world.size, world.rank, shuffle=shuffle, seed=seed)
    return _with_sampler(loader, share), None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader which epoch comes, where they ask for it: they shuffle by it."""
    batching = getattr(loader, "batch_sampler", None)
    visited = set[int]()
    for sampler in (getattr(loader, "sampler", None), batching, getattr(batching, "sampler", None)):
        if sampler is not None and id(sampler) not in visited and callable(getattr(sampler, "set_epoch", None)):
            visited.add(id(sampler))
            sampler.set_epoch(epoch)


def agree_on_batches(world: World, batches: float) -> float:
    """How many batches each rank takes: as many as the rank that has fewest. A rank that took more would wait forever.

    Args:
        world: All its ranks call this.
        batches: This rank's number; `math.inf` when its loader has no length.

    Returns:
        An int, or `math.inf` when no rank knows.
    """
    if world.size == 1:
        return batches
    fewest = float(world.reduce(torch.tensor(float(batches), dtype=torch.float64), "min"))
    return int(fewest) if fewest != float("inf") else fewest


def _sampler_of(loader: DataLoader[Any]) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return loader.sampler if sampler is None else sampler


def _plain(batching: Any) -> bool:
    """Whether a batch sampler is made of a sampler, a size and drop_last, and nothing else."""
    return type(batching) is BatchSampler or type(batching).__module__.startswith("torchdata.")


def _with_sampler(loader: DataLoader[Any], sampler: Sampler[Any]) -> DataLoader[Any]:
    """A copy that draws by another sampler. Copied, not rebuilt: a class of the user's own may take other arguments.

    DataLoader forbids to set these attributes by plain assignment, since its workers would not hear of it; a copy that
    has not been iterated has none.
    """
    changed = copy.copy(loader)
    changed.__dict__["_iterator"] = None
    batching: Any = loader.batch_sampler
    if batching is None:  # batch_size=None: samples one by one
        changed.__dict__["sampler"] = sampler
        return changed
    changed.__dict__["sampler"] = sampler
    changed.__dict__["batch_sampler"] = type(batching)(sampler, batching.batch_size, batching.drop_last)
    return changed


def _unshared(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        what = f"a {type(loader).__name__} is not a DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        what = f"{type(loader.dataset).__name__} is an IterableDataset"
    else:
        what = f"{type(loader.batch_sampler).__name__} is a batch sampler of its own kind"
    return (
        f"{what}: hasten cannot share it out, so each rank reads all of it. Share it out yourself by "
        "torch.distributed.get_rank() and get_world_size(), or give it a DistributedSampler."
    )
