"""Whose code a file is: installed packages and the standard library, or the script's own."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path

# Of this environment; others may lie on the path as well: the user's own (`pip install --user`), the system's below
# `--system-site-packages`, Debian's, a cluster's module.
_FOLDERS = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_NAMED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_library(file: str) -> bool:
    """Return whether a file is an installed package's, torch's or the standard library's.

    Args:
        file: Its path.
    """
    return _is_installed(file) or is_torch(file)


@functools.cache
def _is_installed(file: str) -> bool:
    return file.startswith(_FOLDERS) or any(name in file for name in _NAMED)


def is_torch(file: str) -> bool:
    """Return whether a file is torch's, wherever that lies: people build it in a folder of their own."""
    return file.startswith(_folder_of(getattr(sys.modules.get("torch"), "__file__", None)))


@functools.cache
def _folder_of(init: str | None) -> str:
    """The folder of a package, of which this is the `__init__.py`; of none, one that no file lies in."""
    return f"{Path(init).parent}{os.sep}" if init else "\0"


def folders_of_packages() -> list[str]:
    """Return the folders on the path of modules in which packages are installed."""
    named = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    return list(dict.fromkeys([*(sysconfig.get_path(kind) for kind in ("purelib", "platlib")), *named]))
