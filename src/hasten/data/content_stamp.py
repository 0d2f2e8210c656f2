"""Stamps of arrays, tensors and random generators: equal for equal contents."""

from __future__ import annotations

import array
import hashlib
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any

_BLOCK = 1 << 15  # elements summed with one set of odd weights
_MOST_COPIED = 8 << 20  # bytes of an array whose rows are kept: enough for the labels of a million samples
_weights: Any = None


class Stamp:
    """A stamp of an array, tensor or generator, equal for equal contents.

    Args:
        name: Its name in messages.
        value: The object.
        head: Reads what is quick to read: memory address, shape, version counter.
        body: Reads a checksum of its contents.
        size: Bytes of the contents.
    """

    def __init__(
        self, name: str, value: Any, head: Callable[[Any], Any], body: Callable[[Any], Any], size: int
    ) -> None:
        self.name, self.size = name, size
        self._value, self._head, self._body = value, head, body
        self._was = head(value), body(value)
        self._memory = Stamp.memory_of(value)
        self._rows: Any = None

    @property
    def value(self) -> Any:
        """The array, tensor or generator itself."""
        return self._value

    def content_digest(self) -> bytes:
        """Return a digest of the contents that is the same in every process."""
        held = _rows_of(self._value) if not isinstance(self._value, bytearray | array.array) else None
        if held is None and Stamp.memory_of(self._value) is not None:
            held = _bits_of(self._value)
        if held is None:
            return repr(self._body(self._value)).encode()
        import numpy

        shape = (str(getattr(self._value, "dtype", "")), tuple(self._value.shape), _order(self._value))
        content = numpy.ascontiguousarray(held).reshape(-1).view(numpy.uint8)
        return repr(shape).encode() + hashlib.blake2b(content.data, digest_size=20).digest()

    def keep_rows(self) -> bool:
        """Copy an array or tensor with rows, so that single rows can be compared; return False if it has none."""
        rows = _rows_of(self._value)
        if rows is None or rows.ndim == 0 or len(rows) < 2 or rows.nbytes > _MOST_COPIED:
            return False
        self._rows = rows.copy()
        return True

    def row_changed(self, indices: list[Any]) -> bool:
        """Return whether these rows have changed since `keep_rows`."""
        rows = _rows_of(self._value)
        asked = [i for i in indices if type(i) is int and -len(self._rows) <= i < len(self._rows)]
        if rows is None or rows.shape != self._rows.shape or rows.dtype != self._rows.dtype:
            return True
        return bool(rows[asked].tobytes() != self._rows[asked].tobytes())

    def changed(self, in_full: bool) -> bool:
        """Return whether the object has changed: its head only or, if `in_full`, its contents too."""
        return bool(self._head(self._value) != self._was[0] or (in_full and self._body(self._value) != self._was[1]))

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether its memory overlaps this range of addresses."""
        return self._memory is not None and start < self._memory[1] and self._memory[0] < end

    @staticmethod
    def memory_of(value: Any) -> tuple[int, int] | None:
        """Return the first address and the end of an array's or tensor's memory; None for anything else."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type == "meta":
                return None
            storage = value.untyped_storage()
            return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if numpy is not None and isinstance(value, numpy.ndarray):
            low = high = int(value.__array_interface__["data"][0])
            for size, stride in zip(value.shape, value.strides, strict=True):
                low, high = low + min(0, (size - 1) * stride), high + max(0, (size - 1) * stride)
            return low, high + (value.itemsize if value.size else 0)
        return None

    @staticmethod
    def of(name: str, value: Any) -> Stamp | str | None:
        """Return a value's stamp, or, as text, why an array or generator can't have one; None for other values."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if isinstance(value, array.array | bytearray):
            return Stamp(name, value, len, lambda held: zlib.crc32(bytes(held)), len(bytes(value)))
        if isinstance(value, random.SystemRandom):
            return "draws from the system's random numbers"
        if isinstance(value, random.Random):
            return Stamp(name, value, type, lambda held: held.getstate(), 3000)
        if torch is not None and isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
                return f"holds a tensor on {value.device.type} or of an unusual kind"
            return Stamp(name, value, _tensor_head, _tensor_body, value.numel() * value.element_size())
        if torch is not None and isinstance(value, torch.Generator):
            return Stamp(name, value, type, lambda held: held.get_state().numpy().tobytes(), 5000)
        if numpy is not None:
            return _of_numpy(numpy, name, value)
        return None


def _rows_of(value: Any) -> Any:
    """Return an object's contents as a NumPy array; None if it is no array, or NumPy lacks its kind."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        return value
    if torch is None or not isinstance(value, torch.Tensor) or value.dtype is torch.bfloat16:
        return None
    return None if value.is_conj() or value.is_neg() else value.detach().numpy()


def _bits_of(tensor: Any) -> Any:
    """Return a tensor's bytes as an array, also for dtypes that NumPy lacks and for conjugated views."""
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()


def _order(value: Any) -> tuple[int, ...]:
    """Return the strides, which decide the kernels that run and so the results' rounding."""
    return tuple(value.stride()) if hasattr(value, "stride") else tuple(value.strides)


def _of_numpy(numpy: Any, name: str, value: Any) -> Stamp | str | None:
    if isinstance(value, numpy.random.Generator):
        return Stamp(name, value, type, lambda held: repr(held.bit_generator.state), 1000)
    if isinstance(value, numpy.random.RandomState):
        return Stamp(name, value, type, lambda held: zlib.crc32(held.get_state()[1]), 2500)
    if not isinstance(value, numpy.ndarray):
        return None
    if isinstance(value, numpy.memmap):
        return "holds a memory-mapped file"
    if value.dtype.hasobject:
        return None if value.dtype == object else "holds an array of records with objects"
    return Stamp(name, value, _array_head, checksum, value.nbytes)


def _tensor_head(tensor: Any) -> Any:
    version = None if tensor.is_inference() else tensor._version
    fields = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
    return *fields, version, len(tensor.__dict__)  # the script may set attributes on a tensor


def _tensor_body(tensor: Any) -> int:
    return checksum(_bits_of(tensor))


def _array_head(array: Any) -> Any:
    return array.__array_interface__["data"], array.shape, array.strides, array.dtype


def checksum(array: Any) -> int:
    """Return a checksum of an array's contents that changes with any single element, and with the elements' order.

    Each block of 64-bit words is multiplied by fixed random odd weights and summed: an odd weight never cancels the
    change of a single word, and different weights tell the order. Modulo 2^64 all odd weights act alike on a word's top
    bit, the sign of a float64, so two flipped signs would cancel: the top bits have a CRC of their own.
    """
    global _weights
    import numpy

    raw = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    even = raw.size // 8 * 8
    words = raw[:even].view(numpy.uint64)
    if words.size < 4096:
        return zlib.crc32(raw.data)
    if _weights is None:
        _weights = numpy.random.default_rng(1).integers(0, 2**63, _BLOCK, dtype=numpy.uint64) * 2 + 1
    sums, signs = [], 0
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        sums.append(int(numpy.dot(block, _weights[: block.size])))
        signs = zlib.crc32(numpy.packbits(block.view(numpy.int64) < 0).data, signs)
    return hash((tuple(sums), signs, zlib.crc32(raw[even:].data)))
