"""Format numbers and untrusted text, the same way in every view of a proof."""

from __future__ import annotations

import math
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hasten.evidence import figures

EFFECTS = {
    "exact": "same numbers",
    "rounding": "same mathematics, other rounding",
    "sampling": "same distribution, other random draws",
    "trajectory": "another optimisation path",
}
_PHASE_LABELS = {"data": "data wait", "transfer": "copy to device", "sync": "gradient sync"}
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode categories: control, format, surrogate, line and paragraph separator
NONE = "–"
_LEAST_SECONDS = 0.5  # seconds: shorter stages of a tune are not listed
percent = figures.percent


@dataclass(frozen=True)
class Figure:
    """One labelled figure: `whole epochs: 2.10x, 95 % interval 2.0x to 2.2x`."""

    label: str
    value: str
    detail: str = ""


def clean(text: str) -> str:
    """Return text that cannot control a terminal or break a page.

    Control characters, direction marks and bytes that were not UTF-8 become U+FFFD; each run of whitespace becomes one
    space.
    """
    text = " ".join(text.split())
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(letter) in _HIDDEN else letter for letter in text)


def code(line: str) -> str:
    """Return a line of source with its spaces kept and invisible characters replaced by U+FFFD."""
    line = line.expandtabs(4).rstrip()
    return "".join("\ufffd" if unicodedata.category(letter) in _HIDDEN else letter for letter in line)


def known(value: float | None) -> bool:
    """Return whether a number is neither None, NaN nor infinite."""
    return value is not None and math.isfinite(value)


def times(ratio: float | None) -> str:
    """Format a ratio: `2.31x`."""
    if ratio is None or not math.isfinite(ratio):
        return NONE
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def signed(share: float | None) -> str:
    """Format a relative difference with its sign: `+1.4 %`."""
    if share is None or not math.isfinite(share):
        return NONE
    return f"+{percent(share)}" if share > 0 else percent(share or 0.0)


def interval(low: float | None, high: float | None) -> str:
    """Format a ratio's interval: `2.24x to 2.38x`."""
    if not (known(low) and known(high)):
        return NONE
    return f"{times(low)} to {times(high)}"


def duration(seconds: float | None) -> str:
    """Format a time in the unit that suits its length: `3.1 ms`, `41 s`, `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        rounded = round(seconds)
        return f"{rounded // 60} min {rounded % 60:02d} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 86400:,.1f} days"


def spent(stages: Mapping[str, float]) -> str:
    """List the stages of a tune that took at least half a second: `search 96 s, check 43.2 s`."""
    return ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in stages.items() if seconds >= _LEAST_SECONDS)


def alike(seconds: float, longest: float) -> str:
    """Format a time in the unit that suits the column's longest time, so that the column compares at a glance."""
    scale, unit = (1e6, "µs") if longest < 1e-3 else (1e3, "ms") if longest < 1 else (1.0, "s")
    decimals = 0 if longest * scale >= 100 else 1 if longest * scale >= 10 else 2
    return f"{seconds * scale:.{decimals}f} {unit}"


def size(amount: int | None) -> str:
    """Format an amount of bytes in the unit that suits: `1.24 GiB`."""
    if amount is None:
        return NONE
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.3g} TiB"


def number(value: float | None) -> str:
    """Format a loss or metric with four significant digits."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:#.4g}".removesuffix(".")


def setting(value: Any) -> str:
    """Format a technique's setting as a person would write it in a plan."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return clean(", ".join(f"{key} = {setting(entry)}" for key, entry in value.items()))
    return clean(f"{value:g}" if isinstance(value, float) else str(value))


def plan(techniques: Mapping[str, Any]) -> str:
    """Format a plan in one line; `baseline` if it is empty."""
    return "; ".join(f"{clean(name)}: {setting(value)}" for name, value in techniques.items()) or "baseline"


def phase(name: str) -> str:
    """Return a phase's display name."""
    return _PHASE_LABELS.get(name, clean(name.replace("_", " ")))


def command(arguments: Sequence[str]) -> str:
    """Format a command line for pasting into a shell. A leading `~` stays unquoted, so that the shell expands it."""
    return clean(" ".join(_quoted(argument) for argument in arguments))


def _quoted(argument: str) -> str:
    if argument == "~":
        return argument
    return f"~/{shlex.quote(argument[2:])}" if argument.startswith("~/") and argument[2:] else shlex.quote(argument)


def moment(written: str) -> str:
    """Format an ISO 8601 time to the minute; return any other text cleaned."""
    try:
        time = datetime.fromisoformat(written)
    except ValueError:
        return clean(written)
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


def count(amount: int, noun: str) -> str:
    """Format a count: `1 seed`, `3 seeds`."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"


def change(before: float, after: float) -> str:
    """Format how much less or more `after` is than `before`: `38 % less`."""
    if not (known(before) and known(after)) or before <= 0:
        return NONE
    share = after / before - 1
    if abs(share) < 0.005:
        return "the same"
    return f"{percent(abs(share))} {'less' if share < 0 else 'more'}"
