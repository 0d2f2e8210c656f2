"""`Trainer.find_batch_size`: the search of `hasten batch`, by attempts in this process on copies."""

from hasten.trainer.finders.trials import find

__all__ = ["find"]
