"""Feeds a Trainer: asks for its loaders, makes them ready, and brings batches to the device."""

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
        given: As they were handed to `fit` and so on; None: module or datamodule has them.
        before: Of the run before, whose loaders stay.

    Attributes:
        source: As they are drawn from; None until they are asked for.
        limits: Batches of each that are used.
        total: Batches of a pass through all of them together.
        asked_in_epoch: When module or datamodule were asked for them.
    """

    def __init__(self, given: Any = None, before: Feed | None = None) -> None:
        self.given = given
        self.source: Any = None if before is None else before.source
        self.limits: list[float] = [] if before is None else before.limits
        self.total: float = math.inf if before is None else before.total
        self.asked_in_epoch: float = -math.inf


def setup(trainer: Trainer, kind: str) -> None:
    """Ask for the loaders of a kind and make them ready."""
    feed = trainer.engine.feeds[kind]
    limit = getattr(trainer.config, f"limit_{kind}_batches")
    mode = "max_size_cycle" if kind == "train" else "sequential"
    given = _asked_for(trainer, kind, limit)
    sources.refuse_batches(given, f"{kind}_dataloader")
    source = sources.combined(given, mode)
    if kind == "train" and source.mode == "sequential":
        feed.total = source.batches()
        raise ValueError(
            '`FitLoop` does not support CombinedLoader(mode="sequential"): training draws from its loaders together;'
            f" there are {', '.join(mode for mode in sources.MODES if mode != 'sequential')}"
        )
    leaves = []
    for leaf in source.leaves:
        sources.check_iterable(leaf, _whence(trainer, kind))
        leaves.append(_ready(trainer, leaf, kind))
    source.replace(leaves)
    limits = [
        sources.limited(sources.length(leaf), limit, f"limit_{kind}_batches", trainer.misconfigured) for leaf in leaves
    ]
    limits = [agree_on_batches(trainer.world, batches) for batches in limits]
    feed.source, feed.limits, source.limits = source, limits, limits
    feed.total = source.batches()
    # A sanity check of an epoch that does not validate leaves the question for the first one that does.
    if kind == "train" or not trainer.sanity_checking or trainer.validates_this_epoch:
        feed.asked_in_epoch = trainer.current_epoch
    if kind == "train":
        _set_val_check(trainer)


def _asked_for(trainer: Trainer, kind: str, limit: Any) -> Any:
    """Return the loaders of a kind as a person gave them: to the run, in the datamodule or in the module."""
    step = {"train": "training", "val": "validation"}.get(kind, kind) + "_step"
    if limit == 0 or (kind in ("val", "test") and not trainer.engine.has_step(step)):
        return []
    given = trainer.engine.feeds[kind].given
    if given is not None:
        return given
    own = trainer.engine.hooks.of_data(f"{kind}_dataloader")
    if own is None:
        if kind == "val" and trainer.stage.fn == "fit":
            return []
        raise sources.NotALoaderError(
            f"An invalid dataloader was {_whence(trainer, kind)}: None",
            f"give one, or define {kind}_dataloader in the module or a datamodule",
        )
    given = own()
    trainer.world.barrier("loaders")
    if given is None:
        sources.check_iterable(None, _whence(trainer, kind))
    return given


def _whence(trainer: Trainer, kind: str) -> str:
    """Return where the loaders of a kind come from, for messages."""
    hooks = trainer.engine.hooks
    if trainer.engine.feeds[kind].given is not None or hooks.of_data(f"{kind}_dataloader") is None:
        argument = f"{kind}_dataloaders" if trainer.stage.fn == "fit" else "dataloaders"
        return f"passed to `Trainer.{trainer.stage.fn}({argument}=...)`"
    owner = hooks.owner_of_data(f"{kind}_dataloader")
    return f"returned from `{type(owner).__name__}.{kind}_dataloader()`"


def _ready(trainer: Trainer, leaf: Any, kind: str) -> Any:
    config = trainer.config
    if config.overfit_batches and kind in ("train", "val"):
        same = sources.overfitting(leaf)
        if same is not leaf:
            trainer.warn(f"requested to overfit but enabled {kind} dataloader shuffling: it is off, for equal batches")
            leaf = same
    shares = trainer.engine.strategy.shares(trainer.world)
    if shares.size > 1 and config.use_distributed_sampler:
        leaf, text = distributed_loader(
            leaf, shares, train=kind == "train", seed=config.seed or 0, repeat=kind != "predict"
        )
        if text:
            trainer.say(text, once=True)
    return with_options(leaf, trainer.engine.run)


def _set_val_check(trainer: Trainer) -> None:
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


def draws(method: Any) -> bool:
    """Return whether a step draws its batches itself, from the `dataloader_iter` that it takes."""
    return "dataloader_iter" in inspect.signature(method).parameters


class DataLoaderIterator:
    """Iterator for a step that takes `dataloader_iter`: (batch, batch_idx, dataloader_idx), on the host.

    Args:
        fetch: Gives the next batch.
        done: Batches drawn before.

    Attributes:
        last: What was drawn last; the batch is None before the first. Hooks around the step are given it.
    """

    def __init__(self, fetch: Callable[[], Any], done: int = 0) -> None:
        self._fetch, self.done = fetch, done
        self.last: tuple[Any, int, int] = (None, max(0, done - 1), 0)  # resumed, the number is what it would have been

    def itself(self) -> DataLoaderIterator:
        """Return this, in place of a batch."""
        return self

    def __iter__(self) -> DataLoaderIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self.last = self._fetch(), self.done, 0
        self.done += 1
        return self.last

    def told(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that is given the batch drawn last and its number, in place of its last two arguments."""
        return lambda *args: hook(*args[:-2], *self.last[:2])


class LoadersInTurn:
    """The same for an evaluation: batches of one loader after the other.

    Args:
        batches: (batch, batch_idx, dataloader_idx), all of them.

    Attributes:
        last: What was drawn last; the batch is None before the first. Hooks around the step are given it.
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
        """Give this to one step after the other, while there are batches left."""
        while self._next is not None:
            yield self, *self._next[1:]


class Lookahead:
    """Draws one batch ahead, so that the last batch of a loader without a length is known.

    Attributes:
        over: Whether the batch given last was the last one.
        before: The random state before the batch that is held was drawn.
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
        """Return the batch that is held, and draw the one behind it."""
        if not self._next and not self.over:
            self.draw()
        if not self._next:
            raise StopIteration
        batch = self._next.pop()
        self.draw()
        return batch

    def release(self) -> None:
        """Drop the pass and the batch that is held."""
        self._fetch, self._next = nothing_left, []


def nothing_left() -> Any:
    """Stand for a pass that is over."""
    raise StopIteration


def preparing(trainer: Trainer, stage: str) -> list[Callable[[Any, int], Any]]:
    """Return what each batch goes through before a step: hooks that are defined, and the copy to the device."""
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
