"""Callbacks, at the place where people look for them: `from hasten.callbacks import ModelCheckpoint`."""

from hasten.trainer.callbacks import *  # noqa: F403
from hasten.trainer.callbacks import __all__ as __all__
