"""A batch computed in parts of fewer samples, with the gradient of the whole: `microbatch=32`, `microbatch="auto"`."""

from hasten.trainer.microbatch.parts import in_parts

__all__ = ["in_parts"]
