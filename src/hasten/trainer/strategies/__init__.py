"""Strategies of the Trainer: on which processes it runs, what they exchange, and what each of them holds."""

from hasten.trainer.strategies.base import Strategy
from hasten.trainer.strategies.ddp import DDPStrategy
from hasten.trainer.strategies.fsdp import FSDPStrategy
from hasten.trainer.strategies.names import NAMES, strategy_named

__all__ = ["NAMES", "DDPStrategy", "FSDPStrategy", "Strategy", "strategy_named"]
