"""Loggers, at the place where people look for them: `from hasten.loggers import CSVLogger`."""

from hasten.trainer.loggers import *  # noqa: F403
from hasten.trainer.loggers import __all__ as __all__
