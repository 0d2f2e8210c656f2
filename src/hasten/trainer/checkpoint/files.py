"""Checkpoint files: a dict of tensors and plain values, verified when written and read, free of pickled code.

The format is that of safetensors (https://github.com/huggingface/safetensors#format): eight bytes with the header's
length, a JSON header, the tensors' bytes. The header's `__metadata__` begins with a checksum: the SHA-256 of the whole
file with zeros in the checksum's place. Its `state` is the rest of the dict as JSON.

The safetensors package is not used (tests read these files with it). It keeps no checksum. Its `save_file` needs all
tensors at once, contiguous, in separate memory and on the CPU, where this module copies one at a time. And it opens a
path itself, where `whole_file` passes a locked temporary file, which it syncs and reads back.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hasten.errors import HastenError
from hasten.trainer.checkpoint.errors import PREVIOUS, CheckpointError, MissingCheckpointError, damaged, unreadable
from hasten.trainer.checkpoint.plain import Packed, pack, unpack
from hasten.trainer.checkpoint.tensors import DTYPES, STRUCTURE
from hasten.trainer.checkpoint.torch_format import read_torch, verify_torch
from hasten.trainer.checkpoint.writing import whole_file

VERSION = 1
_BEGINNING = '{{"__metadata__":{{"format":"hasten","version":"{}","checksum":"{}","state":'
_HEAD = re.compile(rb'\{"__metadata__":\{"format":"hasten","version":"(\d{1,9})","checksum":"([0-9a-f]{64})","state":')
_HEAD_START = b'{"__metadata__":{"format":"hasten"'
_UNKNOWN = "0" * 64  # placeholder of the checksum while it is computed
_LONGEST_HEADER = 100_000_000  # safetensors refuses longer ones
_LONG_STRUCTURE = 16 << 20  # a longer structure is stored as an entry among the tensors
_CHUNK = 8 << 20
_DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


def write(path: str | Path, state: dict[Any, Any] | Packed, format: str = "hasten") -> list[str]:
    """Write a checkpoint atomically: the file is verified on disk before it replaces the old one.

    Args:
        path: The file; its folder is created.
        state: Tensors and plain values in dicts, lists and tuples; or the result of `pack`.
        format: "hasten" (safetensors with a checksum), or "torch" (for `torch.load(weights_only=True)` in other tools).

    Returns:
        One sentence for each value that could not be stored safely. `read` returns a `NotSaved` in its place.

    Raises:
        HastenError: The file could not be written; the old one is untouched.
    """
    path = Path(path)
    packed = state if isinstance(state, Packed) else pack(state)
    size = sum(tensor.nbytes for tensor in packed.tensors.values())
    if format == "hasten":
        header, tensors, size = _header(packed)
        whole_file(path, lambda file: _write_all(file, header, tensors), verify, size)
    elif format == "torch":
        # torch.save writes a view's whole storage: clone views, so that only their own elements are written.
        lean = {n: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for n, t in packed.tensors.items()}
        plain = unpack(Packed(packed.structure, lean, ()), simple=True)
        whole_file(path, lambda file: torch.save(plain, file), verify, size)
    else:
        raise HastenError(f"There is no checkpoint format {format!r}.", "Use 'hasten' or 'torch'.")
    return list(packed.notes)


def read(path: str | Path, map_location: str | torch.device = "cpu", verify: bool = True) -> dict[Any, Any]:
    """Read a checkpoint of either format, including those of a framework that hasten knows. Never runs code from it.

    Args:
        path: The file.
        map_location: The device for its tensors.
        verify: Check that no bit of it changed.

    Returns:
        The state. Tensors that shared memory share it again, unless they overlapped only in part.

    Raises:
        CheckpointError: The file is missing (then the error is a FileNotFoundError too), damaged, not a checkpoint, of
            a newer version, or cannot be loaded without running code.
    """
    path = Path(path)
    with _open(path) as file:
        if _is_torch(file):
            return read_torch(path, file, map_location, verify)
        layout = _layout(path, file)
        tensors, digest = _read_tensors(path, file, layout)
    if verify:
        _compare(path, layout, digest.hexdigest())
    structure = layout.structure
    try:
        if structure == "":
            structure = tensors.pop(STRUCTURE).numpy().tobytes().decode()
        parsed = json.loads(structure)
    except (ValueError, KeyError, RecursionError) as error:
        raise damaged(path, f"its structure is no JSON ({type(error).__name__}: {error})") from error
    tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    try:
        state = unpack(Packed(parsed, tensors, ()))
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        struct.error,
        RuntimeError,
        MemoryError,
    ) as error:
        raise damaged(path, f"its structure makes no sense ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise damaged(path, "it holds no dict")
    return state


def verify(path: str | Path) -> None:
    """Check that a checkpoint is as it was written, without loading it.

    Raises:
        CheckpointError: It is missing, truncated, changed, not a checkpoint, or of a newer version.
    """
    path = Path(path)
    with _open(path) as file:
        if _is_torch(file):
            verify_torch(path, file)
            return
        layout = _layout(path, file)
        digest = layout.digest
        buffer = memoryview(bytearray(_CHUNK))
        bytes_left = layout.size
        while bytes_left:
            count = _read_into(path, file, buffer[: min(bytes_left, _CHUNK)])
            digest.update(buffer[:count])
            bytes_left -= count
    _compare(path, layout, digest.hexdigest())


def read_structure(path: Path) -> str | None:
    """Return the plain part of a checkpoint as JSON; "" if it is stored among the tensors, None for torch's format.

    Raises:
        CheckpointError: The file is missing, or its beginning is damaged or of another kind.
    """
    with _open(path) as file:
        return None if _is_torch(file) else _layout(path, file).structure


@dataclass(frozen=True)
class _Layout:
    """The contents of a file's header."""

    checksum: str
    structure: str
    entries: list[tuple[str, torch.dtype, list[int], int]]  # name, dtype, shape, bytes; in the file's order
    size: int  # bytes of all entries
    digest: Any  # of the header so far


def _header(packed: Packed) -> tuple[bytes, list[torch.Tensor], int]:
    """Return the bytes before the tensors, the tensors in the file's order, and the file's size in bytes."""
    structure = json.dumps(packed.structure, separators=(",", ":"), allow_nan=False)
    named = sorted(
        packed.tensors.items(), key=lambda item: -item[1].element_size()
    )  # large elements first, so that every tensor is aligned
    if len(structure) > _LONG_STRUCTURE:
        named.append((STRUCTURE, torch.frombuffer(bytearray(structure.encode()), dtype=torch.uint8)))
        structure = ""
    parts = [_BEGINNING.format(VERSION, _UNKNOWN), json.dumps(structure), "}"]
    offset = 0
    for name, tensor in named:
        known = tensor.dtype in DTYPES
        entry = {
            "dtype": DTYPES[tensor.dtype] if known else "U8",
            "shape": list(tensor.shape) if known else [tensor.nbytes],
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        parts.append(f",{json.dumps(name)}:{json.dumps(entry, separators=(',', ':'))}")
        offset += tensor.nbytes
    text = "".join([*parts, "}"]).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise HastenError(
            f"A checkpoint of {len(named):,} tensors needs a header of {len(text):,} bytes, more than can be read.",
            "Put small tensors together into fewer large ones.",
        )
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in named], 8 + len(text) + offset


def _write_all(file: BinaryIO, header: bytes, tensors: list[torch.Tensor]) -> None:
    """Write header and tensors, then the checksum over its placeholder in the header."""
    digest = hashlib.sha256(header)
    file.write(header)
    for tensor in tensors:
        # One at a time: tensors on a device or not contiguous are copied here, so memory for only one copy is needed.
        flat = tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            digest.update(part)
            file.write(part)
    file.seek(8 + header[8:].index(_UNKNOWN.encode()))
    file.write(digest.hexdigest().encode())


def _open(path: Path) -> BinaryIO:
    """Open a checkpoint for reading, or raise an error that says what to do."""
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.ckpt"))[-5:] if path.parent.is_dir() else []
        fix = f"There are: {', '.join(near)}." if near else "Check the path; there is no checkpoint in that folder."
        raise MissingCheckpointError(f"Checkpoint file not found: {path}.", fix) from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder, not a checkpoint file.", "Give a file in it.") from None
    except OSError as error:
        raise unreadable(path, error) from error


def _is_torch(file: BinaryIO) -> bool:
    """Return whether a file is a zip archive, as torch.save writes."""
    start = os.pread(file.fileno(), 4, 0)
    return start == b"PK\x03\x04"


def _layout(path: Path, file: BinaryIO) -> _Layout:
    """Read and check the header; leaves the file position at its end."""
    size = os.fstat(file.fileno()).st_size
    start = os.pread(file.fileno(), 8 + 256, 0)
    length = int.from_bytes(start[:8], "little")
    head = _HEAD.match(start, 8)
    if not size:
        raise damaged(path, "it is empty")
    known = _HEAD_START[: max(0, size - 8)]
    if start[8 : 8 + len(known)] == known and head is None:
        raise damaged(path, f"it is truncated or its first bytes were changed (it has {size:,} bytes)")
    if head is None:
        raise _no_checkpoint(path, start, size)
    if int(head[1]) > VERSION:
        raise CheckpointError(
            f"{path} is in version {int(head[1])} of the format; this hasten reads up to {VERSION}.",
            "Upgrade hasten (`pip install -U hasten`).",
        )
    if length > _LONGEST_HEADER:
        raise damaged(path, "its first bytes, the header's length, were changed")
    if 8 + length > size:
        raise damaged(path, f"it is truncated: at least {8 + length:,} bytes expected, it has {size:,}")
    raw = bytearray(8 + length)
    _read_into(path, file, memoryview(raw))
    raw[head.start(2) : head.end(2)] = _UNKNOWN.encode()
    try:
        header = json.loads(bytes(raw[8:]))
        structure = str(header.pop("__metadata__")["state"])
        entries, end = _entries(header)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its header was changed ({type(error).__name__}: {error})") from error
    if 8 + length + end != size:
        difference = "truncated" if size < 8 + length + end else "too long"
        raise damaged(path, f"it is {difference}: {8 + length + end:,} bytes expected, it has {size:,}")
    return _Layout(head[2].decode(), structure, entries, end, hashlib.sha256(raw))


def _entries(header: dict[str, Any]) -> tuple[list[tuple[str, torch.dtype, list[int], int]], int]:
    """Return the header's entries in the file's order, and their size; raises if they overlap or leave gaps."""
    entries = []
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = _DTYPE_OF_NAME[entry["dtype"]]
        begin, stop = map(operator.index, entry["data_offsets"])
        count = 1
        for extent in entry["shape"]:
            if type(extent) is not int or extent < 0:
                raise ValueError(f"entry {name!r} has a strange shape")
            count *= extent
        if begin != end or stop - begin != count * dtype.itemsize:
            raise ValueError(f"entry {name!r} has the wrong place")
        entries.append((name, dtype, entry["shape"], stop - begin))
        end = stop
    return entries, end


def _read_tensors(path: Path, file: BinaryIO, layout: _Layout) -> tuple[dict[str, torch.Tensor], Any]:
    """Read the tensors, and return them with the digest of the whole file."""
    tensors = {}
    for name, dtype, shape, size in layout.entries:
        raw = torch.empty(size, dtype=torch.uint8, device="cpu")
        view = raw.numpy().data
        for start in range(0, size, _CHUNK):
            _read_into(path, file, view[start : start + _CHUNK])
            layout.digest.update(view[start : start + _CHUNK])
        tensors[name] = raw.view(dtype).reshape(shape)
    return tensors, layout.digest


def _read_into(path: Path, file: BinaryIO, view: memoryview) -> int:
    """Fill a buffer from a file; a read may return fewer bytes than asked for."""
    done = 0
    while done < len(view):
        try:
            count = file.readinto(view[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise unreadable(path, error) from error
        if not count:
            raise damaged(path, "it was cut short while it was read")
        done += count
    return done


def _compare(path: Path, layout: _Layout, checksum: str) -> None:
    """Raise if the checksum differs from the one in the header."""
    if checksum != layout.checksum:
        raise damaged(path, f"its checksum is {checksum[:12]}…, and it was written with {layout.checksum[:12]}…")


def _no_checkpoint(path: Path, start: bytes, size: int) -> CheckpointError:
    """Return the error for a file of another kind."""
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size:
        return CheckpointError(
            f"{path} is a safetensors file, but not a checkpoint of hasten, or its first bytes were changed.",
            "Load weights with safetensors.torch.load_file(path) and give them to module.load_state_dict.",
        )
    if start[:1] == b"\x80":
        return CheckpointError(
            f"{path} is a pickle (torch.save before 1.6, or another tool), which hasten does not load.",
            "If you trust it, load it with torch.load(path, weights_only=True) and save it again with torch.save.",
        )
    return CheckpointError(
        f"{path} ({size:,} bytes) is not a checkpoint, or its first bytes were changed.",
        f"Give a file that hasten, a framework that it knows, or torch.save wrote. {PREVIOUS}",
    )


def is_hasten(path: Any) -> bool:
    """Return whether a file is a checkpoint in hasten's format, judged by its first bytes."""
    try:
        with Path(path).open("rb") as file:
            return file.read(8 + len(_HEAD_START))[8:] == _HEAD_START
    except (OSError, ValueError):
        return False
