"""Strategies, at the place where people look for them: `from hasten.strategies import FSDPStrategy`."""

from hasten.trainer.strategies import DDPStrategy as DDPStrategy
from hasten.trainer.strategies import FSDPStrategy as FSDPStrategy
from hasten.trainer.strategies import PipelineStrategy as PipelineStrategy
from hasten.trainer.strategies import TensorParallelStrategy as TensorParallelStrategy

__all__ = ["DDPStrategy", "FSDPStrategy", "PipelineStrategy", "TensorParallelStrategy"]
