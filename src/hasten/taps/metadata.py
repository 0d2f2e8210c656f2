"""Keep every program in a trial from changing modes, owners, times or extended attributes of the user's files.

Landlock does not cover these. A seccomp filter sees numbers, not paths, so it cannot tell a file in the scratch folder
from a file of the user. Therefore `chmod`, `chown` and similar system calls do nothing for native code and other
programs, and report success; otherwise `tar` and `cp -p` would fail even in the scratch folder. Python's own calls are
let through, since the overlay has already mapped their paths: they carry a mark in an argument that the kernel ignores.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import struct
from typing import Any

_MARK = 0x68617374_656E2121
_AT_FDCWD, _NOFOLLOW = -100, 0x100
_PR_SET_NO_NEW_PRIVS, _SET_FILTER = 38, 1
_SPEC_ALLOW = 1 << 2  # otherwise older kernels turn on Spectre mitigations, which slow down the whole training
_ALLOW, _SUCCEED = 0x7FFF0000, 0x00050000  # _SUCCEED: SECCOMP_RET_ERRNO with error number 0
_REFUSE = _SUCCEED | 13  # EACCES
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# By machine: its AUDIT_ARCH number, the number of `seccomp`, the calls that `_Marked` makes, and the numbers of the
# other calls that change metadata.
_MACHINES: dict[str, tuple[int, int, dict[str, int], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        317,
        {"fchmod": 91, "fchown": 93, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197,
         "lremovexattr": 198, "fremovexattr": 199, "fchownat": 260, "fchmodat": 268, "utimensat": 280},
        (90, 92, 94, 132, 235, 261, 452, 463, 466, 469),
    ),
    "aarch64": (
        0xC00000B7,
        277,
        {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
         "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88},
        (452, 463, 466, 469),
    ),
}  # fmt: skip


def forbid_metadata() -> str:
    """Make system calls that change metadata do nothing in this process and its children, except those made by `os`.

    Returns:
        Why the filter could not be installed, or "".
    """
    machine = platform.machine()
    if machine not in _MACHINES or struct.calcsize("P") != 8:
        return f"no filter of system calls for {machine}"
    architecture, seccomp, marked_calls, other_calls = _MACHINES[machine]
    libc = ctypes.CDLL(None, use_errno=True)
    code = _program(architecture, [*marked_calls.values(), *other_calls], marked_calls["utimensat"])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return os.strerror(ctypes.get_errno())
    flags = (ctypes.c_ulong(_SET_FILTER), ctypes.c_ulong(_SPEC_ALLOW))
    if libc.syscall(ctypes.c_long(seccomp), *flags, program):
        return f"no filter of system calls: {os.strerror(ctypes.get_errno())}"
    _Marked(libc, marked_calls).install()
    return ""


def _program(architecture: int, numbers: list[int], utimensat: int) -> bytes:
    """Return the BPF program: allow every call but those in `numbers` without the mark, which only seem to succeed.

    Offsets are those of `struct seccomp_data`: the call's number at 0, the architecture at 4, argument i at 16 + 8 * i.
    Jumps skip this many instructions.
    """
    count = len(numbers)
    lines = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 0, count + 1, architecture), (_LOAD, 0, 0, 0)]
    lines += [(_JUMP_IF_EQUAL, count - index, 0, number) for index, number in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    lines += [(_LOAD, 0, 0, 56), (_JUMP_IF_EQUAL, 0, 3, _MARK & 0xFFFFFFFF)]
    lines += [(_LOAD, 0, 0, 60), (_JUMP_IF_EQUAL, 0, 1, _MARK >> 32)]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    # `touch new` that Landlock refused to create the file goes on to set its time to now (a path, and times NULL). That
    # must fail, or `touch` would report that it made a file.
    lines += [(_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 5, utimensat)]
    lines += [(_LOAD, 0, 0, 32), (_JUMP_IF_EQUAL, 0, 3, 0), (_LOAD, 0, 0, 24), (_JUMP_IF_EQUAL, 1, 0, 0)]
    lines += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _SUCCEED)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


class _Marked:
    """The functions of `os` that change metadata, called with the mark that lets them pass the filter."""

    def __init__(self, libc: ctypes.CDLL, numbers: dict[str, int]) -> None:
        self._syscall = libc.syscall
        self._numbers = numbers

    def install(self) -> None:
        """Replace the functions of `os`."""
        for name in ("chmod", "fchmod", "chown", "fchown", "lchown", "utime", "setxattr", "removexattr"):
            plain, marked = getattr(os, name), getattr(self, name)
            for supported in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
                if plain in supported:
                    supported.add(marked)
            setattr(os, name, marked)

    def _call(self, name: str, path: Any, *args: Any) -> None:
        # No call uses all six arguments: unused ones are 0, and the sixth is the mark.
        five = [ctypes.c_long(value) if isinstance(value, int) else value for value in args]
        five += [ctypes.c_long(0)] * (5 - len(five))
        if self._syscall(ctypes.c_long(self._numbers[name]), *five, ctypes.c_long(_MARK)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), None if isinstance(path, int) else path)

    def chmod(self, path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        """Do what `os.chmod` does."""
        if not follow_symlinks:
            raise NotImplementedError("chmod: follow_symlinks unavailable on this platform")
        if isinstance(path, int):
            return self.fchmod(path, mode)
        return self._call("fchmodat", path, _folder(dir_fd), os.fsencode(path), mode)

    def fchmod(self, fd: int, mode: int) -> None:
        """Do what `os.fchmod` does."""
        self._call("fchmod", fd, fd, mode)

    def chown(self, path: Any, uid: int, gid: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        """Do what `os.chown` does."""
        if isinstance(path, int):
            return self.fchown(path, uid, gid)
        flags = 0 if follow_symlinks else _NOFOLLOW
        return self._call("fchownat", path, _folder(dir_fd), os.fsencode(path), uid, gid, flags)

    def fchown(self, fd: int, uid: int, gid: int) -> None:
        """Do what `os.fchown` does."""
        self._call("fchown", fd, fd, uid, gid)

    def lchown(self, path: Any, uid: int, gid: int) -> None:
        """Do what `os.lchown` does."""
        self.chown(path, uid, gid, follow_symlinks=False)

    def utime(
        self,
        path: Any,
        times: tuple[float, float] | None = None,
        *,
        ns: tuple[int, int] | None = None,
        dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """Do what `os.utime` does."""
        if times is not None and ns is not None:
            raise ValueError("utime: you may specify either 'times' or 'ns' but not both")
        ns_times = ns if ns is not None else None if times is None else tuple(map(_nanoseconds, times))
        packed = (
            None if ns_times is None else struct.pack("qqqq", *divmod(ns_times[0], 10**9), *divmod(ns_times[1], 10**9))
        )
        if isinstance(path, int):
            self._call("utimensat", path, path, None, packed, 0)
        else:
            flags = 0 if follow_symlinks else _NOFOLLOW
            self._call("utimensat", path, _folder(dir_fd), os.fsencode(path), packed, flags)

    def setxattr(
        self, path: Any, attribute: Any, value: bytes, flags: int = 0, *, follow_symlinks: bool = True
    ) -> None:
        """Do what `os.setxattr` does."""
        data = bytes(value)
        name, target = _attribute("setxattr", path, follow_symlinks)
        self._call(name, path, target, os.fsencode(attribute), data, len(data), flags)

    def removexattr(self, path: Any, attribute: Any, *, follow_symlinks: bool = True) -> None:
        """Do what `os.removexattr` does."""
        name, target = _attribute("removexattr", path, follow_symlinks)
        self._call(name, path, target, os.fsencode(attribute))


def _folder(dir_fd: int | None) -> int:
    return _AT_FDCWD if dir_fd is None else dir_fd


def _attribute(name: str, path: Any, follow: bool) -> tuple[str, Any]:
    """Return the call for a descriptor (f...), a path, or a path whose link is not followed (l...), with its target."""
    if isinstance(path, int):
        return f"f{name}", path
    return (name if follow else f"l{name}"), os.fsencode(path)


def _nanoseconds(seconds: float) -> int:
    seconds_only = math.floor(seconds)
    return seconds_only * 10**9 + math.floor((seconds - seconds_only) * 1e9)
