"""Give each rank its share of a loader's samples, by replacing the loader's sampler in a copy of it."""

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
    """DistributedSampler that yields each sample once, for predictions: the ranks' lengths may differ by one."""

    def __init__(self, dataset: Dataset[Any], num_replicas: int, rank: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False)
        self.total_size = len(dataset)  # type: ignore[arg-type]
        self.num_samples = len(range(rank, self.total_size, num_replicas))


class ShareOfSampler(DistributedSampler[Any]):
    """This rank's share of a user-defined sampler: all ranks draw the same indices, each takes every size-th one.

    Args:
        sampler: Sampler of known length. If it draws from torch's global RNG, each epoch has a new order.
        num_replicas: Number of ranks.
        rank: This rank.
        seed: Seed, the same on all ranks.
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
    """Return a copy of a loader that yields this rank's share of the samples.

    Loaders that have a DistributedSampler, and those that cannot be split among ranks, are returned unchanged. For the
    latter, a text that says why is returned, too.

    Args:
        loader: Usually a DataLoader, of any class.
        world: The ranks; if there is only one, the loader is returned unchanged.
        train: Whether to shuffle if the loader did; otherwise samples come in order. The sampler's `set_epoch` makes
            epochs differ.
        seed: Seed of the shuffling, the same on all ranks.
        repeat: Whether all ranks get equally many samples, by repeating the first ones if needed. If False, each sample
            comes once, so the ranks' lengths may differ: only for loops in which no rank waits for another.

    Returns:
        The loader, and a message for the user (None if it was split, or needed no splitting).

    Raises:
        HastenError: Its DistributedSampler gives this rank the share of another rank, for training data.
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
    kind = type(sampler).__name__  # by name: torchdata has its own RandomSampler
    if kind not in {"SequentialSampler", "RandomSampler"} or getattr(sampler, "replacement", False):
        share = ShareOfSampler(sampler, world.size, world.rank, seed)
    elif not repeat:
        share = UnrepeatedSampler(dataset, world.size, world.rank)
    else:
        shuffle = train and kind == "RandomSampler"
        share = DistributedSampler(dataset, world.size, world.rank, shuffle=shuffle, seed=seed)
    return _with_sampler(loader, share), None


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on a loader's samplers that have it; they seed their shuffling with the epoch."""
    batching = getattr(loader, "batch_sampler", None)
    visited = set[int]()
    for sampler in (getattr(loader, "sampler", None), batching, getattr(batching, "sampler", None)):
        if sampler is not None and id(sampler) not in visited and callable(getattr(sampler, "set_epoch", None)):
            visited.add(id(sampler))
            sampler.set_epoch(epoch)


def agree_on_batches(world: World, batches: float) -> float:
    """Return the number of batches that each rank takes: the smallest of all ranks' numbers.

    A rank that took more would wait for the others forever.

    Args:
        world: The ranks; all of them call this.
        batches: This rank's number; `math.inf` if its loader has no length.

    Returns:
        An int, or `math.inf` if no rank's loader has a length.
    """
    if world.size == 1:
        return batches
    fewest = float(world.reduce(torch.tensor(float(batches), dtype=torch.float64), "min"))
    return int(fewest) if fewest != float("inf") else fewest


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler of single samples that a loader draws by; None for an IterableDataset."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return loader.sampler if sampler is None else sampler


def _plain(batching: Any) -> bool:
    """Return whether a batch sampler can be rebuilt from a sampler, a batch size and drop_last."""
    return type(batching) is BatchSampler or type(batching).__module__.startswith("torchdata.")


def _with_sampler(loader: DataLoader[Any], sampler: Sampler[Any]) -> DataLoader[Any]:
    """Return a copy of a loader with another sampler. Copied, not rebuilt: a user's subclass may take other arguments.

    DataLoader refuses assignments to these attributes, because running workers would not see the change. A copy that
    has not been iterated has no workers, so `__dict__` is written directly.
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
    """Return the message that a loader cannot be split among ranks, and why."""
    if not isinstance(loader, DataLoader):
        why = f"a {type(loader).__name__} is not a DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        why = f"{type(loader.dataset).__name__} is an IterableDataset"
    else:
        why = f"{type(loader.batch_sampler).__name__} is a batch sampler of its own kind"
    return (
        f"{why}: hasten cannot share it out, so each rank reads all of it. Share it out yourself by "
        "torch.distributed.get_rank() and get_world_size(), or give it a DistributedSampler."
    )
