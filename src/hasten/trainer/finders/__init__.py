"""Finders: short trial fits in this process, on copies, for `Trainer.find_batch_size` and `LRFinder`."""

from hasten.trainer.finders.trials import find

__all__ = ["find"]
