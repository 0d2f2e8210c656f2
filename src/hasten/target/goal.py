"""Goal: the quality that a training is to reach, as a person writes it: `val_loss<=1.88`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from hasten.errors import HastenError

_WRITTEN = re.compile(r"\s*(?P<name>[^<>=]+?)\s*(?P<sign><=|>=|<|>)\s*(?P<value>[-+.\w]+)\s*(?P<percent>%?)\s*")
_EXAMPLE = 'write --target "val_loss<=1.88" or --target "accuracy>=0.97", in quotes: < and > are the shell\'s own signs'
_PERCENT = 1.5  # a quality above it is none that ends at 1


@dataclass(frozen=True)
class Goal:
    """A name, which way is better, and a value.

    Attributes:
        name: Of the quality, as the person writes it.
        falls: Whether less is better.
        value: What must be reached.

    Example:
        >>> parse_goal("val_loss<=1.88").is_met(1.87)
        True
    """

    name: str
    falls: bool
    value: float

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.falls else '>='}{self.value:g}"

    def is_met(self, value: float) -> bool:
        """Whether a value is good enough; NaN never is."""
        return value <= self.value if self.falls else value >= self.value

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of values; None where there is none, or only NaN."""
        finite = [value for value in values if not math.isnan(value)]
        return (min(finite) if self.falls else max(finite)) if finite else None

    def easier(self, value: float) -> Goal:
        """Return a goal with another value, where that is easier to reach; else this one."""
        return self if self.is_met(value) else Goal(self.name, self.falls, value)

    def within_reach_of(self, best: float) -> Goal:
        """Return a goal that a best value meets, in as few digits as a person would write."""
        if abs(best) < 1e-12 or not math.isfinite(best):
            return Goal(self.name, self.falls, best)
        step = 10.0 ** (math.floor(math.log10(abs(best))) - 2)
        value = float(f"{(math.ceil if self.falls else math.floor)(best / step) * step:.6g}")
        goal = Goal(self.name, self.falls, value)
        return goal if goal.is_met(best) else Goal(self.name, self.falls, best)

    def looks_like_percent(self, values: Iterable[float]) -> bool:
        """Whether a share (`accuracy>=0.97`) is asked for, and percent are reported (93.1)."""
        return not self.falls and 0 < self.value <= 1 and any(value > _PERCENT for value in values)


def parse_goal(text: str) -> Goal:
    """Read `NAME<=VALUE`, `NAME>=VALUE` (`<` and `>` mean the same: values are reached, not met exactly).

    Raises:
        HastenError: It is not of that form.
    """
    match = _WRITTEN.fullmatch(text)
    try:
        value = float(match["value"]) if match is not None else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value) or not re.search(r"[^\W\d]", match["name"]):
        raise HastenError(f"--target {text!r}: not NAME<=VALUE or NAME>=VALUE", _EXAMPLE)
    return Goal(match["name"], match["sign"].startswith("<"), value)
