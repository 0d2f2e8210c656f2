"""Loggers: destinations for metrics. A logging library is imported only when something is logged."""

from hasten.trainer.loggers.base import FolderLogger, Logger
from hasten.trainer.loggers.csv_logger import CSVLogger
from hasten.trainer.loggers.remote import MLFlowLogger, WandbLogger
from hasten.trainer.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "FolderLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]
