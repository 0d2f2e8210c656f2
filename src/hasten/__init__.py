"""hasten makes PyTorch training finish sooner, and proves it."""

__version__ = "0.1.0"

from hasten.errors import HastenError
from hasten.plan import Plan

__all__ = ["HastenError", "Plan", "__version__"]
