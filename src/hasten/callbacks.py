"""Callbacks, at the place where people look for them: `from hasten.callbacks import ModelCheckpoint`."""

from hasten.trainer.callbacks import *  # noqa: F403
from hasten.trainer.callbacks import __all__ as _callbacks
from hasten.trainer.finders.rates import LRFinder as LRFinder

__all__ = [*_callbacks, "LRFinder"]  # noqa: PLE0604
