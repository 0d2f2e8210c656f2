"""Goal: the quality that a training must reach, written as `val_loss<=1.88`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from hasten.errors import HastenError

_WRITTEN = re.compile(r"\s*(?P<name>[^<>=]+?)\s*(?P<sign><=|>=|<|>)\s*(?P<value>[-+.\w]+)\s*(?P<percent>%?)\s*")
_EXAMPLE = 'write --target "val_loss<=1.88" or --target "accuracy>=0.97", in quotes: < and > are the shell\'s own signs'
_PERCENT = 1.5  # a reading above it cannot be a share, which is at most 1


@dataclass(frozen=True)
class Goal:
    """The name of a quality, the direction that is better, and the value to reach.

    Attributes:
        name: Name of the quality, as the user writes it.
        falls: Whether less is better.
        value: The value to reach.

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
        """Return whether a value is good enough; NaN never is."""
        return value <= self.value if self.falls else value >= self.value

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of the values; None if there are none, or only NaN."""
        finite = [value for value in values if not math.isnan(value)]
        return (min(finite) if self.falls else max(finite)) if finite else None

    def easier(self, value: float) -> Goal:
        """Return a goal with this value if that is easier to reach; else this goal."""
        return self if self.is_met(value) else Goal(self.name, self.falls, value)

    def within_reach_of(self, best: float) -> Goal:
        """Return a goal that the best value meets, rounded to three significant digits as a person would write it."""
        if abs(best) < 1e-12 or not math.isfinite(best):
            return Goal(self.name, self.falls, best)
        step = 10.0 ** (math.floor(math.log10(abs(best))) - 2)
        value = float(f"{(math.ceil if self.falls else math.floor)(best / step) * step:.6g}")
        goal = Goal(self.name, self.falls, value)
        # Floating-point rounding may have put the rounded value just out of reach.
        return goal if goal.is_met(best) else Goal(self.name, self.falls, best)

    def looks_like_percent(self, values: Iterable[float]) -> bool:
        """Return whether the goal is a share (`accuracy>=0.97`) while the readings are in percent (93.1)."""
        return not self.falls and 0 < self.value <= 1 and any(value > _PERCENT for value in values)


def parse_goal(text: str) -> Goal:
    """Parse `NAME<=VALUE` or `NAME>=VALUE`. `<` and `>` mean the same as `<=` and `>=`.

    Raises:
        HastenError: The text has another form.
    """
    match = _WRITTEN.fullmatch(text)
    try:
        value = float(match["value"]) if match is not None else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value) or not re.search(r"[^\W\d]", match["name"]):
        raise HastenError(f"--target {text!r}: not NAME<=VALUE or NAME>=VALUE", _EXAMPLE)
    return Goal(match["name"], match["sign"].startswith("<"), value)
