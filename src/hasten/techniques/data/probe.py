"""Ask a dataset for a few samples several times, to find out whether they repeat and what they cost."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from hasten.data.sample_store import pack
from hasten.data.snapshot import random_states
from hasten.evidence import Probe
from hasten.techniques.data.batched_fetch import holds_rows
from hasten.techniques.data.fork_safety import holds_open
from hasten.techniques.data.sample_cache import with_loader_function

_INDICES = 8
_REPEATS = 3
_SECONDS = 2.0  # time limit, for slow datasets


def probe(loader: Any) -> Probe:
    """Probe the dataset of a DataLoader. Calls `dataset[i]`, and changes the global random states."""
    from torch.utils.data import default_collate

    dataset = loader.dataset
    unsafe = holds_open(dataset)
    in_memory = loader._auto_collation and loader.collate_fn is default_collate and holds_rows(dataset)
    try:
        length = len(dataset)
        indices = sorted({i * (length - 1) // (_INDICES - 1) for i in range(_INDICES)}) if length else []
        if not indices:
            return Probe(fork_unsafe=unsafe, failed="it is empty")
        repeatable, seconds, size = _ask(dataset.__getitem__, indices)
        one_thread = _on_one_thread(dataset.__getitem__, indices) if seconds < _SECONDS / 4 else 0.0
        function = _loader_function(dataset, indices)
        return Probe(repeatable, seconds, size, *function, in_memory, unsafe, one_thread=one_thread)
    except Exception as error:  # whatever the dataset raises, its samples cannot be cached
        return Probe(in_memory=in_memory, fork_unsafe=unsafe, failed=f"{type(error).__name__}: {error}")


def _loader_function(dataset: Any, indices: list[int]) -> tuple[str, bool, float, int]:
    """Return name, repeatability, seconds and bytes of the dataset's `loader` function; "" if it has none."""
    inner = with_loader_function(dataset)
    if inner is None:
        return "", False, 0.0, 0
    asked: list[Any] = []
    function = inner.loader

    def listening(*args: Any) -> Any:
        asked.append(args)
        return function(*args)

    inner.loader = listening
    try:
        for index in indices:
            dataset[index]
    finally:
        inner.loader = function
    keys = [args[0] for args in asked if len(args) == 1 and isinstance(args[0], str | bytes | int)]
    if not keys:
        return "", False, 0.0, 0
    return getattr(function, "__name__", "loader"), *_ask(function, keys)


def _ask(give: Callable[[Any], Any], keys: list[Any]) -> tuple[bool, float, int]:
    """Return whether `give(key)` is repeatable, its seconds, and the bytes of its result.

    Each call is made under other random states. A function that draws from a global random state counts as not
    repeatable, even if the draw did not matter this time. One with its own random state shows in the repetitions.
    """
    seconds, sizes, repeatable = [], [], True
    deadline = time.perf_counter() + _SECONDS
    for number, key in enumerate(keys):
        first: bytes | None = None
        for repeat in range(1 + _REPEATS):
            _reseed(1 + number * (1 + _REPEATS) + repeat)
            before = random_states()
            start = time.perf_counter()
            sample = give(key)
            seconds.append(time.perf_counter() - start)
            packed = pack(sample)
            repeatable = repeatable and packed == (first or packed) and random_states() == before
            first = first or packed
        sizes.append(len(first or b""))
        if time.perf_counter() > deadline:
            break
    return repeatable, sorted(seconds)[len(seconds) // 2], sum(sizes) // len(sizes)


def _on_one_thread(give: Callable[[Any], Any], keys: list[Any]) -> float:
    """Return the time of `give(key)` with one thread of torch, in that with the present number of threads."""
    import torch

    threads = torch.get_num_threads()
    if threads == 1:
        return 1.0
    many: list[float] = []
    one: list[float] = []
    deadline = time.perf_counter() + _SECONDS
    try:
        for key in keys:
            for count, seconds in ((threads, many), (1, one)):
                torch.set_num_threads(count)
                start = time.perf_counter()
                give(key)
                seconds.append(time.perf_counter() - start)
            if time.perf_counter() > deadline:
                break
    finally:
        torch.set_num_threads(threads)
    return statistics.median(one) / max(statistics.median(many), 1e-9)


def _reseed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
