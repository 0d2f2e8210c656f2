"""Checks of flags: each takes the flag's name and value, and returns the value in its normal form or raises."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from hasten.plan import Plan
from hasten.trainer.errors import WrongValueError, misconfigured
from hasten.trainer.precision import PRECISIONS
from hasten.trainer.strategies import Strategy, strategy_named

Check = Callable[[str, Any], Any]


def at_least(least: int, optional: bool = True) -> Check:
    """Return the check of an int flag that is at least `least`; `optional` allows None."""

    def check(name: str, value: Any) -> Any:
        if value is None and optional:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            count = "must be a non-negative integer or -1" if least == -1 else f"should be an int >= {least}"
            raise misconfigured(f"`{name}` {count}, not {value!r}", "-1 means no limit" if least == -1 else "")
        return value

    return check


def sanity_steps(name: str, value: Any) -> Any:
    """Check `num_sanity_val_steps`: a number of batches; -1 means all, as infinity."""
    return math.inf if value in (-1, math.inf) and not isinstance(value, bool) else at_least(-1)(name, value)


def share_or_count(name: str, value: Any) -> Any:
    """Check a limit of batches: an int is a number, a float a share."""
    if value is None:
        return None
    fine = (isinstance(value, int) and not isinstance(value, bool) and value >= 0) or (
        isinstance(value, float) and 0.0 <= value <= 1.0
    )
    if not fine:
        raise misconfigured(
            f"You have passed invalid value {value!r} for {name}",
            "it must be a number of batches (int) or a share of them (0.0 to 1.0)",
        )
    return value


def to_try(name: str, value: Any) -> int | bool:
    """Check `fast_dev_run`: a number of batches; 1 becomes True."""
    if not isinstance(value, int) or value < 0:
        raise misconfigured(f"{name}={value!r} should be >= 0", "it is a number of batches")
    return True if value == 1 else value


def accumulation(name: str, value: Any) -> int | dict[int, int]:
    """Check `accumulate_grad_batches`: a number, or a schedule {epoch: number}."""
    if not isinstance(value, Mapping):
        at_least(1, optional=False)(name, value)
        return value  # type: ignore[no-any-return]
    for epoch, every in value.items():
        at_least(0, optional=False)(f"{name}: epoch", epoch)
        at_least(1, optional=False)(f"{name} at epoch {epoch}", every)
    return dict(value)


def microbatch(name: str, value: Any) -> int | str | None:
    """Check `microbatch`: a number of samples, or "auto"."""
    if value in (None, "auto"):
        return value  # type: ignore[no-any-return]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise misconfigured(f'`{name}` should be an int >= 1 or "auto", not {value!r}', "it counts samples")
    return value


class ClipAlgorithm(StrEnum):
    """Ways to clip gradients."""

    NORM = "norm"
    VALUE = "value"


def clip_value(name: str, value: Any) -> Any:
    """Check `gradient_clip_val`: a norm or a value, not negative."""
    if value is not None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"`{name}` should be an int or a float, not {value!r}")
        if value < 0:
            raise misconfigured(f"{name}={value} is negative", "give the largest norm allowed, such as 1.0")
    return value


def clip_algorithm(name: str, value: Any) -> ClipAlgorithm | None:
    """Check `gradient_clip_algorithm`: a name, or a member of any framework's enum."""
    if value is None:
        return None
    word = str(getattr(value, "value", value)).lower()
    if word not in list(ClipAlgorithm):
        raise misconfigured(f"`{name}` {value} is invalid", 'there are "norm" and "value"')
    return ClipAlgorithm(word)


def seconds(name: str, value: Any) -> float | None:
    """Return a duration (a timedelta, "DD:HH:MM:SS" or a dict of timedelta's arguments) in seconds."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        try:
            return timedelta(**value).total_seconds()
        except TypeError as error:
            raise misconfigured(f"{name}={dict(value)!r}: {error}", 'such as {"hours": 2, "minutes": 30}') from None
    if isinstance(value, str):
        parts = value.strip().split(":")
        if len(parts) == 4 and all(part.isdecimal() for part in parts):
            days, hours, minutes, secs = map(int, parts)
            if hours < 24 and minutes < 60 and secs < 60:
                return timedelta(days=days, hours=hours, minutes=minutes, seconds=secs).total_seconds()
    raise misconfigured(f"{name}={value!r} is no duration", 'give a timedelta, "DD:HH:MM:SS" or {"hours": 2}')


def duration(name: str, value: Any) -> Any:
    """Check `max_time`: a duration, kept as given."""
    seconds(name, value)
    return value


def interval(name: str, value: Any) -> Any:
    """Check `val_check_interval`: a number of batches, a share of them, or a duration."""
    if value is None:
        return None
    if is_duration(value):
        seconds(name, value)
        return value
    share_or_count(name, value)
    if not value:
        raise misconfigured(f"{name}={value!r} never comes", "to switch validation off: limit_val_batches=0")
    return value


def is_duration(value: Any) -> bool:
    """Return whether an interval is a duration, not a number or share of batches."""
    return isinstance(value, str | timedelta | Mapping)


def switch(name: str, value: Any) -> Any:
    """Check a flag that is True, False or None (the default); a string such as "no" would count as True."""
    if value not in (True, False, None):
        raise WrongValueError(f"{name}={value!r} must be True or False")
    return value


def deterministic(name: str, value: Any) -> Any:
    """Check `deterministic`: True, False or "warn"."""
    if value not in (True, False, None, "warn"):
        raise WrongValueError(f'{name}={value!r} must be True, False or "warn"')
    return value


def one_of(*names: str) -> Check:
    """Return the check of a flag that is one of these names."""

    def check(name: str, value: Any) -> Any:
        if value not in names:
            raise misconfigured(f"{name}={value!r}", f"it is {' or '.join(map(repr, names))}".replace("'", '"'))
        return value

    return check


def _path(name: str, value: Any, *other_types: type) -> None:
    """Raise if a value is not a path, None or of another accepted type."""
    if value is not None and not isinstance(value, (str, os.PathLike, *other_types)):
        raise WrongValueError(f"{name}={value!r} is a {type(value).__name__}, not a path")


def plan(name: str, value: Any) -> Any:
    """Check `plan`: a Plan, or the path of its file."""
    _path(name, value, Plan)
    return value


def folder(name: str, value: Any) -> str:
    """Check `default_root_dir`: return its absolute path, by default the current folder. Links are not resolved."""
    _path(name, value)
    return os.path.abspath(Path(value or Path.cwd()).expanduser())  # noqa: PTH100


def precision(name: str, value: Any) -> str:
    """Check `precision`: return its full name; short names such as "bf16" are accepted."""
    if value is None:
        return "32-true"
    full = PRECISIONS.get(str(value))
    if full is None:
        close = difflib.get_close_matches(str(value), PRECISIONS, n=1, cutoff=0.4)
        hint = f"did you mean {PRECISIONS[close[0]]!r}? " if close else ""
        known = ", ".join(dict.fromkeys(PRECISIONS.values()))
        raise WrongValueError(f"Precision {value!r} is invalid", f"{hint}there are: {known}")
    return full


def devices(name: str, value: Any) -> Any:
    """Check `devices`: at least one."""
    if value in (0, "0") or (isinstance(value, list | tuple) and not value):
        raise misconfigured(
            f"{name}={value!r}: the value is not a valid input using any accelerator",
            'give a number of at least 1, a list of GPU numbers, or "auto"',
        )
    return value


def accelerator(name: str, value: Any) -> Any:
    """Check `accelerator`: the name of a kind of device."""
    if value not in ("auto", "cpu", "gpu", "cuda"):
        raise WrongValueError(
            f"You selected an invalid accelerator name: `{name}={value!r}`",
            'there are "auto", "cpu", "gpu" and "cuda": hasten trains on CPUs and NVIDIA GPUs',
        )
    return value


def strategy(name: str, value: Any) -> str | Strategy:
    """Check `strategy`: a name, or an object; another framework's object becomes hasten's."""
    strategy_object = strategy_named(value)
    return value if isinstance(value, str) else strategy_object


def seed(name: str, value: Any) -> int | None:
    """Check `seed`: an int in NumPy's range."""
    import numpy

    if value is None:
        return None
    if not isinstance(value, int | numpy.integer) or not 0 <= value < 2**32:
        raise WrongValueError(f"{name}={value!r} must be a whole number from 0 to {2**32 - 1}")
    return int(value)
