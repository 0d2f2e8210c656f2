"""Runs scripts where they have mounts of their own: small disks, read-only ones."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from tests.taps.forks import forked
from tests.taps.scripts import Done

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER; os.unshare comes with Python 3.12


def in_own_mounts(script: Path, mounts: str, *arguments: str | Path) -> Done:
    """Run a script behind shell commands that mount, which nobody outside sees."""
    need_mounts()
    before = f"from tests.own_mounts import enter\nenter({mounts!r})"
    return forked(script.parent, script.name, *map(str, arguments), before=before)


def need_mounts() -> None:
    """Skip the test where this user may have no mounts of his own."""
    import pytest  # which a fork does not need

    try:
        allowed = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if allowed.returncode:
        pytest.skip(f"no mounts of one's own here: {allowed.stderr.strip()}")


def enter(mounts: str) -> None:
    """Turn this process, of one thread, into root of a namespace of its own, and mount there."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_USER):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    subprocess.run(["sh", "-euc", f"mount --make-rprivate /; {mounts}"], check=True)
