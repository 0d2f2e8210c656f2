"""Record events: single lines of the script that make training wait, copy or lose time.

This module taps the methods that read a tensor (`item`, `tolist`, `cpu`, `numpy`, printing) and `torch.tensor` of large
data. It also installs the rest: `calls` (functions that are rarely called), `copies` (copies to a device), `call_probe`
(calls that only a close look at a few steps shows) and `remote` (files read over a network).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from hasten.doctor.observe.call_probe import install_call_probe
from hasten.doctor.observe.calls import tap_calls
from hasten.doctor.observe.copies import tap_copies
from hasten.doctor.observe.event_log import EventLog, device_of, event_log
from hasten.doctor.observe.remote import tap_files
from hasten.taps.protocol import Session
from hasten.taps.results import untapped_for_script
from hasten.taps.wrapping import tap

_ONE_NUMBER = ("item", "__bool__", "__float__", "__int__", "__index__", "__complex__")
_LARGE = 1000  # numbers in a list from which building a tensor from it counts (some 50 us)


def install(session: Session) -> None:
    """Set the taps. A part that fails is skipped, and the report names it."""
    log = event_log(session)
    parts: dict[str, Callable[[], None]] = {
        "tensors that are read": lambda: _tap_reads(log),
        "torch.tensor": lambda: _tap_tensor_constructors(log),
        "calls": lambda: tap_calls(session, log),
        "copies": lambda: tap_copies(session, log),
        "looks": lambda: install_call_probe(session, session.recorder),
        "remote files": lambda: tap_files(session, log),
    }
    for name, install_part in parts.items():
        with session.run.guard(f"observing {name}"):
            install_part()


def _tap_reads(log: EventLog) -> None:
    """Tap the methods that read a tensor's values."""
    import torch

    for name in _ONE_NUMBER:
        tap(torch.Tensor, name, lambda plain: _read(plain, "item", log))
    tap(torch.Tensor, "tolist", lambda plain: _read(plain, "tolist", log))
    for name in ("numpy", "__array__"):
        tap(torch.Tensor, name, lambda plain: _read_with_arguments(plain, "numpy", log))
    tap(torch.Tensor, "cpu", lambda plain: _read_with_arguments(plain, "cpu", log))
    tap(torch.Tensor, "__format__", lambda plain: _read_with_arguments(plain, "print", log))
    tap(torch.Tensor, "__repr__", lambda plain: _read_with_arguments(plain, "print", log))


def _read(plain: Any, kind: str, log: EventLog) -> Any:
    """Wrap a method without arguments; the quicker sibling of `_read_with_arguments`, as `item` may be called often."""
    from torch import Tensor
    from torch.compiler import is_compiling

    in_step, note = log.in_step, log.note

    def read(self: Any) -> Any:
        if is_compiling() or in_step() < 0:
            return plain(self)
        start = perf_counter()
        value = plain(self)
        seconds = perf_counter() - start
        note(kind, seconds, "cpu" if type(self) is Tensor and self.is_cpu else device_of(self))
        return value

    return read


def _read_with_arguments(plain: Any, kind: str, log: EventLog) -> Any:
    """Wrap a method with any arguments."""
    from torch.compiler import is_compiling

    in_step = log.in_step

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or in_step() < 0:
            return plain(self, *args, **kwargs)
        start = perf_counter()
        value = plain(self, *args, **kwargs)
        log.note(kind, perf_counter() - start, device_of(self))
        return value

    return read


def _tap_tensor_constructors(log: EventLog) -> None:
    """Tap `torch.tensor` and `torch.as_tensor` of data that takes long to convert."""
    import torch
    from torch.compiler import is_compiling

    def make(plain: Any, noted_kinds: tuple[str, ...]) -> Any:
        def tensor(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return plain(*args, **kwargs)
            data = args[0] if args else kwargs.get("data")
            source = "" if isinstance(data, int | float) else data_kind(data)
            if not source.startswith(noted_kinds):
                return plain(*args, **kwargs)
            start = perf_counter()
            result = plain(*args, **kwargs)
            log.note("torch_tensor", perf_counter() - start, device_of(result), source)
            return result

        return tensor

    plains = {name: getattr(torch, name) for name in ("tensor", "as_tensor")}
    tap(torch, "tensor", lambda plain: make(plain, ("tensor", "array", "list")))
    tap(torch, "as_tensor", lambda plain: make(plain, ("list",)))  # from a tensor or an array it copies nothing
    untapped_for_script(torch, {name: getattr(torch, name) for name in plains}, plains)


def data_kind(data: Any) -> str:
    """Return the kind of data that a tensor is built from, if that takes time.

    Returns:
        "tensor", "array", "list of tensors", "list of arrays", "list" (of at least `_LARGE` numbers), or "".
    """
    import torch

    if isinstance(data, torch.Tensor):
        return "tensor"
    if type(data).__name__ == "ndarray":
        return "array"
    if not isinstance(data, list | tuple) or not data:
        return ""
    first = data[0]
    if isinstance(first, torch.Tensor):
        return "list of tensors"
    if type(first).__name__ == "ndarray":
        return "list of arrays"
    size = len(data)
    while isinstance(first, list | tuple) and first:
        size *= len(first)
        first = first[0]
    return "list" if size >= _LARGE else ""
