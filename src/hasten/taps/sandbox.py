"""Redirect everything a trial writes to a scratch folder, where the script finds it again.

The first layer is an overlay in Python (`overlay.py`, `overlay_functions.py`): paths that are opened for writing,
changed, made, moved or removed are mapped into the scratch folder; reading looks there first. The second layer are two
guards in the kernel, if it supports them, for native code and other programs: Landlock (`forbid_writing`) refuses their
writes elsewhere, and a seccomp filter (`metadata.py`) ignores their changes of modes, owners, times and attributes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from hasten.taps.after_import import after_import
from hasten.taps.metadata import forbid_metadata
from hasten.taps.overlay import Overlay
from hasten.taps.overlay_functions import install
from hasten.techniques.compute.compile import kernel_cache
from hasten.techniques.data.fork_safety import LONGEST_FOLDER

unguarded = ""  # why the kernel's guards are missing; "" if both are in place
overlay: Overlay | None = None  # this process's overlay, once it is confined

# Switches off loggers that would send a trial's numbers to a server, or write by native code.
_QUIET_LOGGERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}
# Variables that name caches. The folders stay writable: native code of libraries writes to them.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")


def confine(scratch: str, also: tuple[str, ...] = ()) -> None:
    """Redirect everything this process and its children write to `scratch`.

    Args:
        scratch: The folder.
        also: Folders that may be written to directly, like those of caches.
    """
    global overlay, unguarded
    home = os.path.expanduser("~")
    temporary = os.path.join(scratch, "tmp")
    os.makedirs(temporary, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernel_cache())
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "triton"))
    os.environ.update(
        TMPDIR=temporary, MLFLOW_TRACKING_URI=f"file://{scratch}/mlflow", HASTEN_TRIAL="1", **_QUIET_LOGGERS
    )
    tempfile.tempdir = temporary
    after_import("torch._inductor.codecache", _keep_headers)
    _keep_sockets_short(temporary)
    caches = [os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ.get("XDG_CACHE_HOME", f"{home}/.cache"), f"{home}/.nv"]
    caches += [os.environ[name] for name in _CACHES if os.environ.get(name)]
    # A "cache" that contains the working folder, the script or the home must not stay writable: `HF_HOME=.`,
    # `NUMBA_CACHE_DIR=/ws/`.
    user_folders = [os.getcwd(), home, *(os.path.dirname(word) or "." for word in sys.argv[:1])]
    caches = [
        folder
        for folder in map(os.path.abspath, caches)
        if not any(contains(folder, user_folder) for user_folder in user_folders)
    ]
    for folder in caches:
        with contextlib.suppress(OSError):  # the home is read-only: nothing is cached
            os.makedirs(folder, exist_ok=True)
    free = [scratch, *also, "/dev", "/proc", *caches]
    root = os.path.join(scratch, "files")
    os.makedirs(root, exist_ok=True)
    unguarded = "; ".join(filter(None, (forbid_writing(free), forbid_metadata())))
    overlay = Overlay(root, free)
    install(overlay)


def _keep_headers() -> None:
    """Store torch's precompiled C++ headers beside the cached kernels.

    torch keeps them only under TMPDIR, which differs for each trial: each would compile them again, even with cached
    kernels, which takes longer than most trials.
    """
    import torch._inductor.codecache as codecache

    if hasattr(codecache, "_HEADER_DIR"):
        folder = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "precompiled_headers")
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = folder, os.path.join(folder, "locks")


def _keep_sockets_short(temporary: str) -> None:
    """Let DataLoader workers use sockets in the temporary folder, however long its path is.

    A socket's path may have 107 characters. With a TMPDIR of 55 characters a trial's sockets would exceed that, and a
    loader would wait for its workers forever. Through this process's descriptor (`/proc/PID/fd/N`) the path is short,
    also for its children.
    """
    from multiprocessing import process

    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    config.pop("tempdir", None)  # inherited from a parent process that had DataLoader workers
    if sys.platform == "linux" and len(os.fsencode(temporary)) > LONGEST_FOLDER:
        config["tempdir"] = f"/proc/{os.getpid()}/fd/{os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)}"


def contains(folder: str, path: str) -> bool:
    """Return whether `path` is the folder or inside it; links are followed in both."""
    real = os.path.realpath(folder)
    return (os.path.realpath(path) + os.sep).startswith(real if real == os.sep else real + os.sep)


_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # Landlock's system calls, with the same numbers on every architecture
_WRITE_ABI1 = 0b1_1111_1111_0010  # write_file, remove_*, make_*; reading and executing stay allowed
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_PR_SET_NO_NEW_PRIVS = 38


def forbid_writing(except_under: Iterable[str]) -> str:
    """Forbid this process and its children, by Landlock, to write anywhere but under these paths.

    Returns:
        Why Landlock is not available on this kernel, or "".
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        return "this kernel has no Landlock"
    # ABI 1 does not know `refer`, and always refuses moving files between folders.
    rights = _WRITE_ABI1 | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attributes = struct.pack("=Q", rights)
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        return os.strerror(ctypes.get_errno())
    try:
        for path in except_under:
            if os.path.exists(path):
                _allow(libc, ruleset, path, rights)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_RESTRICT, ruleset, ctypes.c_uint32(0)):
            return os.strerror(ctypes.get_errno())
    finally:
        os.close(ruleset)
    return ""


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & (1 << 1 | _TRUNCATE), folder)
        libc.syscall(_ADD_RULE, ruleset, ctypes.c_int(1), rule, ctypes.c_uint32(0))
    finally:
        os.close(folder)
