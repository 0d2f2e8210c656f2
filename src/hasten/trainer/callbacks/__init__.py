"""The callbacks that ship with the Trainer. rich is imported only when a progress line is drawn."""

from hasten.trainer.callbacks.base import Callback
from hasten.trainer.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from hasten.trainer.callbacks.ema import EMA
from hasten.trainer.callbacks.lr_monitor import LearningRateMonitor
from hasten.trainer.callbacks.model_checkpoint import ModelCheckpoint
from hasten.trainer.callbacks.nan_watch import NaNWatch
from hasten.trainer.callbacks.noise_scale import GradientNoiseScale
from hasten.trainer.callbacks.progress import Progress
from hasten.trainer.callbacks.small import GradientAccumulationScheduler, LambdaCallback
from hasten.trainer.callbacks.step_monitor import StepMonitor
from hasten.trainer.callbacks.summary import LayerSummary, ModelSummary, Summary, summarize
from hasten.trainer.callbacks.timer import Timer

__all__ = [
    "EMA",
    "Callback",
    "EarlyStopping",
    "EarlyStoppingReason",
    "GradientAccumulationScheduler",
    "GradientNoiseScale",
    "LambdaCallback",
    "LayerSummary",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "NaNWatch",
    "Progress",
    "StepMonitor",
    "Summary",
    "Timer",
    "summarize",
]
