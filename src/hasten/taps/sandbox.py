"""A trial's writes: what the script saves goes to a scratch folder, and the script finds it there again.

An overlay in Python (`overlay.py`, `overlaid.py`): paths that are opened for writing, changed, made, moved or removed
are mapped into the scratch folder; reading looks there first. Behind it stand the kernel's guards, where the kernel has
them: `landlock.py` refuses what native code and other programs would write elsewhere, `metadata.py` passes over their
changes of modes, owners, times and attributes.
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

unguarded = ""  # why the kernel's guards are not behind the sandbox, if they are not
overlay: Overlay | None = None  # of this process, once it is confined

# Loggers that would send a trial's numbers to a server, or write by native code, are asked to keep still.
_QUIET_LOGGERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}
# Folders that are caches by definition; libraries write them by native code, too.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")


def confine(scratch: str, also: tuple[str, ...] = ()) -> None:
    """Send everything this process and its children write to `scratch`; folders in `also` may be written to as well."""
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
    # A cache that holds the working folder, the script or the home is no cache: `HF_HOME=.`, `NUMBA_CACHE_DIR=/ws/`.
    theirs = [os.getcwd(), home, *(os.path.dirname(word) or "." for word in sys.argv[:1])]
    caches = [folder for folder in map(os.path.abspath, caches) if not any(holds(folder, place) for place in theirs)]
    for folder in caches:
        with contextlib.suppress(OSError):  # a home that cannot be written to: then nothing is cached
            os.makedirs(folder, exist_ok=True)
    free = [scratch, *also, "/dev", "/proc", *caches]
    root = os.path.join(scratch, "files")
    os.makedirs(root, exist_ok=True)
    unguarded = "; ".join(filter(None, (forbid_writing(free), forbid_metadata())))
    overlay = Overlay(root, free)
    install(overlay)


def _keep_headers() -> None:
    """Keep torch's compiled C++ headers beside the kernels.

    torch looks for them below TMPDIR alone, which is each trial's own: each would compile them again, kernels kept or
    not, which takes longer than most trials.
    """
    import torch._inductor.codecache as codecache

    if hasattr(codecache, "_HEADER_DIR"):
        folder = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "precompiled_headers")
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = folder, os.path.join(folder, "locks")


def _keep_sockets_short(temporary: str) -> None:
    """Let loaders' workers find sockets below the temporary folder, however long its path is.

    Below a TMPDIR of 55 letters a trial's would have more than the 107 that a socket's name may have, and a loader then
    waits for its workers for ever. By this process's descriptor of the folder the name is short, for its children too.
    """
    from multiprocessing import process

    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    config.pop("tempdir", None)  # of a parent that has had loaders' workers
    if sys.platform == "linux" and len(os.fsencode(temporary)) > LONGEST_FOLDER:
        config["tempdir"] = f"/proc/{os.getpid()}/fd/{os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)}"


def holds(folder: str, place: str) -> bool:
    """Whether a place is a folder or lies in it, however both are spelled."""
    real = os.path.realpath(folder)
    return (os.path.realpath(place) + os.sep).startswith(real if real == os.sep else real + os.sep)


_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_WRITE_ABI1 = 0b1_1111_1111_0010  # write_file, remove_*, make_*; reading and executing stay free
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_PR_SET_NO_NEW_PRIVS = 38


def forbid_writing(except_under: Iterable[str]) -> str:
    """Forbid this process and its children to write anywhere but under these paths.

    Returns:
        Why it could not be done on this kernel, or "".
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        return "this kernel has no Landlock"
    # `refer` stays unhandled only in ABI 1, where moving between folders is always refused.
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
