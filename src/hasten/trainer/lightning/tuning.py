"""Support for Lightning's Tuner, learning-rate finder and batch-size finder, which run the loops for trials."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hasten.trainer import evaluate, feeding, session
from hasten.trainer.checkpoint import read

if TYPE_CHECKING:
    from hasten.trainer.sources import Combined
    from hasten.trainer.trainer import Trainer


def fit(trainer: Trainer) -> None:
    """Train up to the current limits, within a `fit` that has not begun to train."""
    stage = trainer.stage.stage
    session.train(trainer, None)
    trainer.engine.loop = trainer.engine.board = None
    trainer.stage.stage = stage


def run_evaluation(trainer: Trainer, kind: str) -> None:
    """Evaluate or predict up to the current limits, within such a run before its first batch."""
    engine, feed = trainer.engine, trainer.engine.feeds[kind]
    before = engine.board
    if kind == "predict":
        evaluate.predict(trainer, engine.hooks, feed.source, feed.limits, False)
    else:
        board = engine.board = engine.new_board(training=False)
        evaluate.evaluate(trainer, engine.hooks, board, feed.source, feed.limits, str(trainer.stage.fn))
    engine.board = before


def forget_loaders(trainer: Trainer, kind: str) -> None:
    """Make the run ask for its loaders again: the tuner has changed them.

    An evaluation that has begun continues with the new loaders: its source and limits are changed in place.
    """
    feed = trainer.engine.feeds[kind]
    old: Combined | None = feed.source
    if trainer.stage.fn == "fit" or old is None:
        feed.source = None
        return
    limits = feed.limits
    feeding.setup(trainer, kind)
    new: Combined = feed.source
    old.replace(new.leaves)
    limits[:] = new.limits
    old.limits = new.limits
    feed.source, feed.limits = old, limits


def restore(trainer: Trainer, path: Any) -> None:
    """Restore a checkpoint that the tuner saved at the beginning of this run."""
    checkpointing = trainer.checkpointing
    checkpointing.saver.wait()
    before = checkpointing.loaded
    checkpointing.loaded = read(os.fspath(path))
    checkpointing.restore_model()
    if trainer.stage.fn == "fit":
        checkpointing.restore_training()
    checkpointing.loaded = before


class Loaders:
    """The loaders of a kind, as the finders read them."""

    def __init__(self, source: Combined) -> None:
        self._source = source

    @property
    def flattened(self) -> list[Any]:
        """The loaders in one list."""
        return self._source.leaves

    def _dataset_length(self) -> int:
        """Return the samples of the combined loaders; raises NotImplementedError if a dataset has no length."""
        sizes = []
        for leaf in self._source.leaves:
            try:
                sizes.append(len(getattr(leaf, "dataset", leaf)))
            except TypeError:
                raise NotImplementedError("a dataset has no length") from None
        if self._source.mode == "sequential":
            return sum(sizes)
        return min(sizes) if self._source.mode == "min_size" else max(sizes)
