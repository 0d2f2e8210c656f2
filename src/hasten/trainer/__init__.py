"""The Trainer, the Module that it trains, and their loops, callbacks, loggers, checkpoints and strategies."""

from hasten.trainer.adapter import offer as _offer
from hasten.trainer.lightning import Lightning as _Lightning
from hasten.trainer.module import Module
from hasten.trainer.trainer import Trainer, seed_everything

_offer(_Lightning())

__all__ = ["Module", "Trainer", "seed_everything"]
