"""Prepares a Trainer's loaders and brings their batches to the device.

`setup` requests the loaders of a kind (from the arguments of `fit`, the datamodule or the module), shards and
configures them, and counts their batches, into a `Feed`. The iterators below serve steps that draw their batches
themselves (`dataloader_iter`) and loaders without a length (`Lookahead`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hasten.data import rng
from hasten.loading import with_options
from hasten.parallel import agree_on_batches, distributed_loader
from hasten.trainer import sources
from hasten.trainer.batches import to_device
from hasten.trainer.flag_values import is_duration, seconds

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


class Feed:
    """The loaders of a kind ("train", "val", "test", "predict").

    Args:
        passed: The loaders passed to `fit`, `validate` and so on; None: the datamodule or the module provides them.
        before: The Feed of the previous run, to keep its loaders.

    Attributes:
        source: The loaders as batches are drawn from them; None until `setup`.
        limits: Number of batches used from each loader.
        total: Number of batches in a pass through all loaders together.
        asked_in_epoch: The epoch in which datamodule or module were last asked for the loaders.
    """

    def __init__(self, passed: Any = None, before: Feed | None = None) -> None:
        self.passed = passed
        self.source: Any = None if before is None else before.source
        self.limits: list[float] = [] if before is None else before.limits
        self.total: float = math.inf if before is None else before.total
        self.asked_in_epoch: float = -math.inf


def setup(trainer: Trainer, kind: str) -> None:
    """Request the loaders of a kind and prepare them: samplers, techniques, limits."""
    feed = trainer.engine.feeds[kind]
    limit = getattr(trainer.config, f"limit_{kind}_batches")
    mode = "max_size_cycle" if kind == "train" else "sequential"
    loaders = _asked_for(trainer, kind, limit)
    sources.refuse_batches(loaders, f"{kind}_dataloader")
    source = sources.combined(loaders, mode)
    if kind == "train" and source.mode == "sequential":
        feed.total = source.batches()
        raise ValueError(
            '`FitLoop` does not support CombinedLoader(mode="sequential"): training draws from its loaders together;'
            f" there are {', '.join(mode for mode in sources.MODES if mode != 'sequential')}"
        )
    leaves = []
    for leaf in source.leaves:
        sources.check_iterable(leaf, _origin(trainer, kind))
        leaves.append(_ready(trainer, leaf, kind))
    source.replace(leaves)
    limits = [
        sources.limited(sources.length(leaf), limit, f"limit_{kind}_batches", trainer.misconfigured) for leaf in leaves
    ]
    # Ranks may have loaders of different lengths; a rank with more batches than the others would wait for them forever.
    limits = [agree_on_batches(trainer.world, batches) for batches in limits]
    feed.source, feed.limits, source.limits = source, limits, limits
    feed.total = source.batches()
    # With check_val_every_n_epoch=2, say, the sanity check is in an epoch that does not validate: its loaders do not
    # count for reload_dataloaders_every_n_epochs, so the first epoch that validates requests them.
    if kind == "train" or not trainer.sanity_checking or trainer.validates_this_epoch:
        feed.asked_in_epoch = trainer.current_epoch
    if kind == "train":
        _set_val_check(trainer)


def _asked_for(trainer: Trainer, kind: str, limit: Any) -> Any:
    """Return the loaders of a kind as the user gave them: as an argument, in the datamodule or in the module."""
    step = {"train": "training", "val": "validation"}.get(kind, kind) + "_step"
    if limit == 0 or (kind in ("val", "test") and not trainer.engine.has_step(step)):
        return []
    loaders = trainer.engine.feeds[kind].passed
    if loaders is not None:
        return loaders
    hook = trainer.engine.hooks.of_data(f"{kind}_dataloader")
    if hook is None:
        if kind == "val" and trainer.stage.fn == "fit":
            return []
        raise sources.NotALoaderError(
            f"An invalid dataloader was {_origin(trainer, kind)}: None",
            f"give one, or define {kind}_dataloader in the module or a datamodule",
        )
    loaders = hook()
    trainer.world.barrier("loaders")
    if loaders is None:
        sources.check_iterable(None, _origin(trainer, kind))
    return loaders


def _origin(trainer: Trainer, kind: str) -> str:
    """Return where the loaders of a kind came from, for messages."""
    hooks = trainer.engine.hooks
    if trainer.engine.feeds[kind].passed is not None or hooks.of_data(f"{kind}_dataloader") is None:
        argument = f"{kind}_dataloaders" if trainer.stage.fn == "fit" else "dataloaders"
        return f"passed to `Trainer.{trainer.stage.fn}({argument}=...)`"
    owner = hooks.owner_of_data(f"{kind}_dataloader")
    return f"returned from `{type(owner).__name__}.{kind}_dataloader()`"


def _ready(trainer: Trainer, leaf: Any, kind: str) -> Any:
    """Return a loader with the sampler and the options that flags, ranks and techniques ask for."""
    config = trainer.config
    if config.overfit_batches and kind in ("train", "val"):
        same = sources.overfitting(leaf)
        if same is not leaf:
            trainer.warn(f"requested to overfit but enabled {kind} dataloader shuffling: it is off, for equal batches")
            leaf = same
    shares = trainer.engine.strategy.shares(trainer.world)  # ranks of a pipeline, for example, share one batch
    if shares.size > 1 and config.use_distributed_sampler:
        leaf, text = distributed_loader(
            leaf, shares, train=kind == "train", seed=config.seed or 0, repeat=kind != "predict"
        )
        if text:
            trainer.say(text, once=True)
    return with_options(leaf, trainer.engine.run)


def _set_val_check(trainer: Trainer) -> None:
    """Convert `val_check_interval` to a number of training batches, or of seconds."""
    engine, config = trainer.engine, trainer.config
    total, interval = engine.feeds["train"].total, config.val_check_interval
    engine.val_check_seconds = None
    if is_duration(interval):
        engine.val_check_seconds = seconds("val_check_interval", interval)
        return
    validates = config.limit_val_batches != 0
    if isinstance(interval, int):
        engine.val_check_batch = interval
        if validates and interval > total and config.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={interval} must be less than or equal to the number of the training batches"
                f" ({total:g}): validation would never run; check_val_every_n_epoch=None counts batches over epochs"
            )
    elif math.isinf(total):
        if validates and interval != 1.0:
            raise trainer.misconfigured(
                f"val_check_interval={interval} is a share of a loader whose length is not known", "give an int"
            )
        engine.val_check_batch = math.inf
    else:
        engine.val_check_batch = max(1, int(total * interval))
    if trainer.loggers and total < config.log_every_n_steps and not config.fast_dev_run:
        trainer.warn(
            f"The number of training batches ({total:g}) is smaller than the logging interval"
            f" log_every_n_steps={config.log_every_n_steps}: the loggers may never get a step's values"
        )


def draws_batches(method: Any) -> bool:
    """Return whether a step draws its batches itself: it has an argument `dataloader_iter`."""
    return "dataloader_iter" in inspect.signature(method).parameters


class DataLoaderIterator:
    """Iterator for a training step that takes `dataloader_iter`: (batch, batch_idx, dataloader_idx), on the host.

    Args:
        fetch: Returns the next batch.
        count: Number of batches drawn before.

    Attributes:
        last: The item drawn last; its batch is None before the first. Hooks around the step get it.
    """

    def __init__(self, fetch: Callable[[], Any], count: int = 0) -> None:
        self._fetch, self.count = fetch, count
        self.last: tuple[Any, int, int] = (None, max(0, count - 1), 0)  # after a resume, count on

    def itself(self) -> DataLoaderIterator:
        """Return this iterator, in place of a batch."""
        return self

    def __iter__(self) -> DataLoaderIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self.last = self._fetch(), self.count, 0
        self.count += 1
        return self.last

    def with_last_batch(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook so that its last two arguments are the batch drawn last and its number."""
        return lambda *args: hook(*args[:-2], *self.last[:2])


class LoadersInTurn:
    """Iterator for an evaluation step that takes `dataloader_iter`: batches of one loader after the other.

    Args:
        batches: Yields all (batch, batch_idx, dataloader_idx).

    Attributes:
        last: The item drawn last; its batch is None before the first. Hooks around the step get it.
    """

    def __init__(self, batches: Iterator[tuple[Any, int, int]]) -> None:
        self._batches = batches
        self._next = next(batches, None)
        self.last: tuple[Any, int, int] = (None, 0, 0)

    def __iter__(self) -> LoadersInTurn:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._next is None:
            raise StopIteration
        self.last, self._next = self._next, next(self._batches, None)
        return self.last

    def steps(self) -> Iterator[tuple[LoadersInTurn, int, int]]:
        """Yield this iterator for one step after another, while batches are left."""
        while self._next is not None:
            yield self, *self._next[1:]


class Lookahead:
    """Draws one batch ahead, so that the last batch of a loader without a length is known to be the last.

    Attributes:
        over: Whether the batch returned last was the loader's last.
        before: The random state before the held batch was drawn. A checkpoint stores it, to draw that batch again.
    """

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._next: list[Any] = []
        self.over = False
        self.before: dict[str, Any] | None = None

    def draw(self) -> None:
        """Draw the next batch and hold it."""
        self.before = rng.state()
        try:
            self._next = [self._fetch()]
        except StopIteration:
            self._next, self.over = [], True

    def fetch(self) -> Any:
        """Return the held batch, after drawing the next one."""
        if not self._next and not self.over:
            self.draw()
        if not self._next:
            raise StopIteration
        batch = self._next.pop()
        self.draw()
        return batch

    def release(self) -> None:
        """Drop the pass and the held batch."""
        self._fetch, self._next = nothing_left, []


def nothing_left() -> Any:
    """Raise StopIteration; replaces the fetch function of a finished pass."""
    raise StopIteration


def batch_transforms(trainer: Trainer, stage: str) -> list[Callable[[Any, int], Any]]:
    """Return the functions applied to each batch before a step: hooks that are defined, and the copy to the device."""
    hooks, device = trainer.engine.hooks, trainer.device
    path: list[Callable[[Any, int], Any]] = []
    if (own := hooks.of_data("on_before_batch_transfer")) is not None:
        path.append(own)
    if (move := hooks.of_data("transfer_batch_to_device")) is not None:
        path.append(lambda batch, index: move(batch, device, index))
    elif device.type != "cpu" or trainer.engine.guest.moves_batches:
        path.append(lambda batch, index: to_device(batch, device))
    if (own := hooks.of_data("on_after_batch_transfer")) is not None:
        path.append(own)
    return path
