"""Save the states of random generators before a forward, and restore them to recompute it.

torch's states are always copied. Copying NumPy's and Python's takes long compared with a small block, so after a
module's first forwards their states are copied only if the module has drawn from them. Otherwise a mark (position and
first words of the Mersenne Twister, which every draw changes) tells afterwards whether it did.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

_LOOKS = 4  # number of a module's first forwards for which all states are copied and compared in full
_WORD = 4  # bytes
_KEYS = 624  # words of a Mersenne Twister


class GeneratorUse:
    """The slow process-wide generators that a module's forwards draw from, learned after each forward.

    A copy of NumPy's state takes 30 us, of Python's 9 us. So they are copied only for modules known to draw from them;
    for others a mark in the state tells after the forward whether it did.
    """

    def __init__(self) -> None:
        self.python = False
        self.numpy = False
        self.looks = 0


class States:
    """States of the process-wide generators, and of those that a module holds."""

    __slots__ = ("_cuda", "_full", "_marks", "_module_generators", "_numpy", "_python", "_torch", "_use")

    def __init__(self, use: GeneratorUse, module_generators: list[Any]) -> None:
        """Copy the present states.

        Args:
            use: The generators that the module is known to draw from.
            module_generators: Generators that the module holds.
        """
        self._use = use
        self._full = use.looks < _LOOKS
        self._python = random.getstate() if use.python or self._full else None
        self._numpy = _numpy_state() if use.numpy or self._full else None
        self._marks = _marks()
        self._torch = torch.default_generator.get_state()
        self._cuda = _cuda_states()
        self._module_generators = [(generator, _state_of(generator)) for generator in module_generators]

    def drew_unseen(self) -> str:
        """Return which generator was drawn from without a copy of its state; "" for none. Update `GeneratorUse`."""
        drawn = self._use
        drawn.looks += 1
        python, numpy = _marks()
        if not drawn.python and (python != self._marks[0] or (self._full and random.getstate() != self._python)):
            drawn.python = True
            if self._python is None:
                return "Python's random numbers"
        if not drawn.numpy and (numpy != self._marks[1] or (self._full and not _equal(self._numpy, _numpy_state()))):
            drawn.numpy = True
            if self._numpy is None:
                return "NumPy's random numbers"
        return ""

    def moved(self) -> bool:
        """Return whether a generator whose state was not copied has been drawn from since `put_back`."""
        python, numpy = _marks()
        return (self._python is None and python != self._marks[0]) or (self._numpy is None and numpy != self._marks[1])

    def cover(self, other: States) -> None:
        """Copy the present states of all generators that `other` will overwrite, so that they can be restored after it.

        A module's first forwards have full copies. By the time of their backward the module may copy fewer states, and
        restoring the full copies for the repetition would lose the draws made since.
        """
        if self._python is None and other._python is not None:
            self._python = random.getstate()
        if self._numpy is None and other._numpy is not None:
            self._numpy = _numpy_state()
        devices = {device for device, _ in self._cuda}
        self._cuda += [(device, torch.cuda.get_rng_state(device)) for device, _ in other._cuda if device not in devices]
        known = {id(generator) for generator, _ in self._module_generators}
        self._module_generators += [
            (generator, _state_of(generator)) for generator, _ in other._module_generators if id(generator) not in known
        ]

    def put_back(self) -> None:
        """Restore the copied states."""
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        for generator, state in self._module_generators:
            _set_state(generator, state)
        # Generators that were not copied may have been drawn from since the forward, by code outside of the module (a
        # model that skips blocks by `random.random()`): marks start from their present state.
        self._marks = _marks()


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _cuda_states() -> list[tuple[int, Any]]:
    if not torch.cuda.is_initialized():
        return []
    device = torch.cuda.current_device()
    return [(device, torch.cuda.get_rng_state(device))]


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states of NumPy's generator are equal. A state is None if NumPy was not imported."""
    if one is None or other is None:
        return one is other
    return bool((one[1] == other[1]).all()) and (one[0], *one[2:]) == (other[0], *other[2:])


# -- marks: the few bytes of a Mersenne Twister that every draw changes ---------------------------------


def _marks() -> tuple[Any, Any]:
    return _python_mark(), _numpy_mark()


def _python_layout_is_known() -> bool:
    """Return whether this CPython stores position and words of a `random.Random` directly after the object's header."""
    twister = random.Random(7)
    twister.random()
    words = twister.getstate()[1]
    raw: bytes = ctypes.string_at(id(twister) + object.__basicsize__, 2 * _WORD)
    return raw == b"".join(word.to_bytes(_WORD, sys.byteorder) for word in (words[-1], words[0]))


_PYTHON: Any = random._inst
_PYTHON_AT = id(_PYTHON) + object.__basicsize__ if _python_layout_is_known() else 0
_numpy_at: dict[int, tuple[Any, int]] = {}


def _python_mark() -> Any:
    """Return position, first words and the spare number of `gauss`; the whole state if the memory layout is unknown."""
    if not _PYTHON_AT:
        return random.getstate()
    return ctypes.string_at(_PYTHON_AT, 3 * _WORD), _PYTHON.gauss_next


def _numpy_mark() -> Any:
    """Return position and first words of NumPy's global generator; its whole state for another bit generator."""
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is None:
        return None
    bits = numpy._rand._bit_generator
    known = _numpy_at.get(id(bits))
    if known is None:
        address = bits.ctypes.state_address if type(bits).__name__ == "MT19937" else 0
        known = _numpy_at[id(bits)] = bits, address
    address = known[1]
    if not address:
        return repr(numpy._rand.get_state(legacy=False))
    return ctypes.string_at(address + _KEYS * _WORD, _WORD), ctypes.string_at(address, 2 * _WORD)
