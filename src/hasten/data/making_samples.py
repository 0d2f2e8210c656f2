"""Whether a thread is making samples: a module that it calls then is a dataset's own, and none that is trained."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.utils.data._utils import worker as _worker

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


class _Thread(threading.local):
    makes_samples = False


_thread = _Thread()


def only_makes_samples() -> None:
    """Say that the calling thread makes samples, and does nothing else."""
    _thread.makes_samples = True


def makes_samples(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Have it known, while `make` runs, that this thread is making samples."""

    @functools.wraps(make)
    def making(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        before = _thread.makes_samples
        _thread.makes_samples = True
        try:
            return make(*args, **kwargs)
        finally:
            _thread.makes_samples = before

    return making


def is_making_samples() -> bool:
    """Whether this thread is making samples, or this process is a DataLoader's worker, which does nothing else."""
    return _thread.makes_samples or _worker._worker_info is not None
