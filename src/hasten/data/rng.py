"""Saves and restores the states of random generators, as plain values and tensors that a checkpoint can hold.

The process-wide generators: `state`, `restore`, `digest`. The generators stored inside an object, such as a loader's
sampler or dataset: `find`, `states_of`, `set_states`. Both together, in a form that is quick to take and compare:
`raw`, with `from_raw` and `to_raw` to convert it from and to plain values.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_DEPTH, _MOST, _SHORT = 6, 2000, 64  # limits of `find`: levels, objects, entries of a list or dict
# Not searched: they hold no generators of a loader, or (models) far too many objects.
_OPAQUE = (str, bytes, int, float, torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType)


def state(device_types: Sequence[str] = ("cuda", "xpu", "mps")) -> dict[str, Any]:
    """Return the states of the process-wide generators: Python's, NumPy's (if imported), torch's on CPU and devices.

    Args:
        device_types: Device types to include, if in use in this process; `()` for the CPU alone.

    Returns:
        Plain values and uint8 tensors on the CPU, 10 KB plus 16 bytes per device, for `restore`.
    """
    states: dict[str, Any] = {"python": _python(random.getstate()), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = _plain(numpy.random.get_state(legacy=False))
    for kind in device_types:
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        if kind == "mps":
            states[kind] = [module.get_rng_state()]
        elif module.is_initialized():
            states[kind] = list(module.get_rng_state_all())
    return states


def restore(states: dict[str, Any]) -> None:
    """Restore the generators to what `state` returned; skip devices that this machine lacks."""
    random.setstate(_of_python(states["python"]))
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])  # noqa: NPY002 - the global generator is what is restored
    for kind, of_devices in states.items():
        if kind in ("python", "numpy", "torch"):
            continue
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        if kind == "mps":
            module.set_rng_state(of_devices[0].cpu())
            continue
        for index, device_state in enumerate(of_devices[: module.device_count()]):
            module.set_rng_state(device_state.cpu(), index)


def digest() -> str:
    """Return a digest of the states of the process-wide CPU generators, to detect whether anything drew."""
    return hashlib.blake2b(repr(raw({})).encode(), digest_size=16).hexdigest()


def find(root: Any) -> dict[str, Any]:
    """Return the generators and `epoch` counters stored in an object, by the path of attributes to them.

    It finds torch.Generator, numpy.random.Generator and RandomState, random.Random, and ints named `epoch` (samplers
    derive their order from them) in attributes, lists and dicts, several levels deep; it skips attributes named
    `_iterator`.

    Returns:
        Path -> generator, or the object that has the `epoch` (the path then ends in `epoch`). A generator that is
        reachable in two ways is listed once.
    """
    return dict(_walk(root))


def _walk(root: Any) -> Iterator[tuple[str, Any]]:
    visited: set[int] = set()
    level = [("", root)]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in visited or len(visited) > _MOST or value is None or isinstance(value, _OPAQUE):
                continue
            visited.add(id(value))
            if is_generator(value):
                yield path, value
                continue
            epoch = getattr(value, "__dict__", {}).get("epoch")
            if isinstance(epoch, int) and not isinstance(epoch, bool):
                yield f"{path}.epoch".lstrip("."), value
            below.extend((f"{path}.{name}".lstrip("."), inner) for name, inner in _inside(value))
        level = below


def _inside(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= _SHORT else []
    if isinstance(value, (list, tuple)):
        return list(enumerate(value)) if len(value) <= _SHORT else []
    if isinstance(value, MethodType):
        return [("__self__", value.__self__)]
    return [(name, inner) for name, inner in getattr(value, "__dict__", {}).items() if name != "_iterator"]


def is_generator(value: Any) -> bool:
    """Return whether an object is a random generator whose state can be copied."""
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState)


def states_of(generators: dict[str, Any]) -> dict[str, Any]:
    """Return the states of the generators and counters that `find` returned, as plain values and tensors."""
    return {path: _state_of(generator) for path, generator in generators.items()}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return _python(generator.getstate())
    if not is_generator(generator):
        return generator.epoch
    if hasattr(generator, "bit_generator"):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def set_states(generators: dict[str, Any], states: dict[str, Any]) -> list[str]:
    """Restore the generators and counters to the states that `states_of` returned.

    Returns:
        The paths that only one of the two has, or that now hold something of another kind; those are left unchanged.
    """
    strange = sorted(set(generators) ^ set(states))
    for path in generators.keys() & states.keys():
        generator, saved = generators[path], states[path]
        if isinstance(generator, torch.Generator) and isinstance(saved, torch.Tensor):
            generator.set_state(saved.cpu())
        elif not is_generator(generator) and isinstance(saved, int):
            generator.epoch = saved
        elif isinstance(generator, random.Random) and isinstance(saved, dict) and "words" in saved:
            generator.setstate(_of_python(saved))
        elif hasattr(generator, "bit_generator") and _same_kind(generator.bit_generator.state, saved):
            generator.bit_generator.state = saved
        elif hasattr(generator, "set_state") and not isinstance(generator, torch.Generator) and isinstance(saved, dict):
            generator.set_state(saved)
        else:
            strange.append(path)
    return strange


def _same_kind(now: Any, saved: Any) -> bool:
    return isinstance(saved, dict) and saved.get("bit_generator") == now.get("bit_generator")


def raw(generators: dict[str, Any]) -> tuple[Any, ...]:
    """Return `state(())` and `states_of(found)` in a form that is quick to take, compare and send to a process."""
    own = tuple((path, _bytes(state)) for path, state in states_of(generators).items()) if generators else ()
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else _numpy_raw(numpy), _bytes(torch.get_rng_state()), own


def from_raw(packed: tuple[Any, ...]) -> dict[str, Any]:
    """Convert the result of `raw` to plain values: those of `state(())`, with the object's own states under "own"."""
    python, numpy, cpu, own_states = packed
    states: dict[str, Any] = {
        "python": _python(python),
        "torch": _tensor(cpu),
        "own": {path: _tensor(state) if isinstance(state, bytes) else state for path, state in own_states},
    }
    if numpy is not None:
        import numpy as np

        kind, key, position, has_gauss, cached = numpy
        states["numpy"] = {
            "bit_generator": kind,
            "state": {"key": np.frombuffer(key, np.uint32).tolist(), "pos": position},
            "has_gauss": has_gauss,
            "gauss": cached,
        }
    return states


def to_raw(states: dict[str, Any]) -> tuple[Any, ...]:
    """Convert plain values back: the inverse of `from_raw`."""
    numpy, packed = states.get("numpy"), None
    if numpy is not None:
        import numpy as np

        key = np.asarray(numpy["state"]["key"], np.uint32).tobytes()
        packed = numpy["bit_generator"], key, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]
    own = tuple((path, _bytes(kept)) for path, kept in states["own"].items())
    return _of_python(states["python"]), packed, _bytes(states["torch"]), own


def _python(state: tuple[Any, ...]) -> dict[str, Any]:
    """Convert the result of `random.getstate()` to plain values; `_of_python` is the inverse."""
    version, words, gauss = state
    return {"version": version, "words": list(words), "gauss": gauss}


def _of_python(state: dict[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"]), state["gauss"]


def _numpy_raw(numpy: Any) -> tuple[Any, ...]:
    kind, key, position, has_gauss, cached = numpy.random.get_state()
    return kind, key.tobytes(), int(position), int(has_gauss), float(cached)


def _bytes(value: Any) -> Any:
    return value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    """Convert NumPy arrays and scalars, also inside dicts, to lists, ints and floats."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
