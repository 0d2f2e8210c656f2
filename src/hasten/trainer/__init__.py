"""Trainer, Module, and what belongs to them."""

from hasten.trainer.module import Module
from hasten.trainer.trainer import Trainer, seed_everything

__all__ = ["Module", "Trainer", "seed_everything"]
