"""Tracks whether a thread is making samples: modules that it calls then belong to the dataset, not to the training."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.utils.data._utils import worker as _worker

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class _Thread(threading.local):
    makes_samples = False


_thread = _Thread()


def only_makes_samples() -> None:
    """Mark the calling thread as making samples, for as long as it lives."""
    _thread.makes_samples = True


def makes_samples(make: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Wrap `make` so that the thread counts as making samples while it runs."""

    @functools.wraps(make)
    def making(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        before = _thread.makes_samples
        _thread.makes_samples = True
        try:
            return make(*args, **kwargs)
        finally:
            _thread.makes_samples = before

    return making


def is_making_samples() -> bool:
    """Return whether this thread is making samples, or this process is a DataLoader worker, which only does that."""
    return _thread.makes_samples or _worker._worker_info is not None
