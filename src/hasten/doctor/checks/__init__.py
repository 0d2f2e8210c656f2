"""The checks: small rules, one a class, grouped by what they look at."""

from hasten.doctor.checks import (
    compute,
    convergence,
    data,
    gradients,
    memory,
    number_types,
    optimization,
    own_code,
    pace,
    parallel,
    safety,
    shapes,
    system,
    transfer,
    workers,
)
from hasten.doctor.checks.base import Check

ALL: tuple[type[Check], ...] = (
    *data.CHECKS,
    *own_code.CHECKS,
    *pace.CHECKS,
    *workers.CHECKS,
    *transfer.CHECKS,
    *memory.CHECKS,
    *system.CHECKS,
    *parallel.CHECKS,
    *number_types.CHECKS,
    *compute.CHECKS,
    *gradients.CHECKS,
    *shapes.CHECKS,
    *optimization.CHECKS,
    *convergence.CHECKS,
    *safety.CHECKS,
)

__all__ = ["ALL", "Check"]
