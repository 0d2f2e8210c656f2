"""The kernel's guard behind the sandbox: a trial cannot write outside its scratch folder by any means.

Landlock (Linux 5.13) lets an unprivileged process give up rights for itself and its children. The sandbox in
front of it redirects what Python writes; what native code or a subprocess tries to write elsewhere is refused.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

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
