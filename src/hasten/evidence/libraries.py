"""Tell whether a file belongs to an installed package or the standard library, or to the script."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path

# Folders of this environment. Others may be on sys.path as well, and are recognised by `_NAMED`: the user's
# (`pip install --user`), the system's (`--system-site-packages`), Debian's, those of a cluster's modules.
_FOLDERS = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_NAMED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed package, to torch or to the standard library.

    Args:
        file: The file's path.
    """
    return _is_installed(file) or is_torch(file)


@functools.cache
def _is_installed(file: str) -> bool:
    return file.startswith(_FOLDERS) or any(name in file for name in _NAMED)


def is_torch(file: str) -> bool:
    """Return whether a file belongs to torch, wherever it is installed: people build it in their own folders."""
    return file.startswith(_folder_of(getattr(sys.modules.get("torch"), "__file__", None)))


@functools.cache
def _folder_of(init: str | None) -> str:
    """Return the folder of a package's `__init__.py`; without a package, a prefix that no path has."""
    return f"{Path(init).parent}{os.sep}" if init else "\0"


def folders_of_packages() -> list[str]:
    """Return the folders on sys.path in which packages are installed."""
    named = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    return list(dict.fromkeys([*(sysconfig.get_path(kind) for kind in ("purelib", "platlib")), *named]))
