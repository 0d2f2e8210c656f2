"""Strategies of the Trainer: how many processes train, what they exchange, and which part of the model each holds."""

from hasten.trainer.strategies.base import Strategy
from hasten.trainer.strategies.ddp import DDPStrategy
from hasten.trainer.strategies.fsdp import FSDPStrategy
from hasten.trainer.strategies.names import NAMES, strategy_named
from hasten.trainer.strategies.pipeline import PipelineStrategy
from hasten.trainer.strategies.tensor import TensorParallelStrategy

__all__ = [
    "NAMES",
    "DDPStrategy",
    "FSDPStrategy",
    "PipelineStrategy",
    "Strategy",
    "TensorParallelStrategy",
    "strategy_named",
]
