"""Redirect files that torch, SQLite and safetensors open in native code to the overlay.

Native code does not call Python's `open`, so the functions that take the path are wrapped, and get the mapped path.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from hasten.taps.after_import import after_import
from hasten.taps.overlay import Overlay


def install_under_libraries(overlay: Overlay) -> None:
    """Wrap these libraries' functions that open files, once they are imported."""
    after_import("torch", lambda: _under_torch(overlay))
    after_import("sqlite3", lambda: _under_sqlite(overlay))
    after_import("safetensors.torch", lambda: _under_safetensors(overlay))


def _under_torch(overlay: Overlay) -> None:
    """Wrap the functions of torch that save, map and pack files in C++ when they are given a path."""
    torch: Any = sys.modules["torch"]
    for owner, name in ((torch, "save"), (torch.jit, "save")):
        plain = getattr(owner, name)

        def save(obj: Any, f: Any, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            if isinstance(f, str | os.PathLike):
                f = overlay.writing(f, keep=False)[0]
            return _plain(obj, f, *args, **kwargs)

        setattr(owner, name, functools.wraps(plain)(save))
    _under_archives(overlay, torch._C)
    loaded = torch.jit.load
    torch.jit.load = functools.wraps(loaded)(lambda f, *args, **kwargs: loaded(_read(overlay, f), *args, **kwargs))
    # Scripted modules and functions, and profilers (`export_chrome_trace`), write files in C++ themselves.
    for kind in (torch.jit.RecursiveScriptModule, torch.jit.ScriptFunction, torch._C._autograd._ProfilerResult):
        if hasattr(kind, "save"):  # missing in a torch built without Kineto, which writes traces in Python
            kind.save = _saving(overlay, kind.save)
    torch.from_file = _mapping(overlay, torch.from_file)
    # `torch.load(..., mmap=True)` calls this as well.
    torch.UntypedStorage.from_file = staticmethod(_mapping(overlay, torch.UntypedStorage.from_file))


def _read(overlay: Overlay, file: Any) -> Any:
    """Return the mapped path if the file is a path; anything else unchanged."""
    return overlay.reading(file)[0] if isinstance(file, str | os.PathLike) else file


def _under_archives(overlay: Overlay, native: Any) -> None:
    """Replace the C++ classes by which `torch.export` and `torch.package` open torch's zip archives."""
    writer, reader = native.PyTorchFileWriter, native.PyTorchFileReader

    class PyTorchFileWriter(writer):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(file, str):
                file = overlay.writing(file, keep=False)[0]
            super().__init__(file, *args, **kwargs)

    class PyTorchFileReader(reader):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any) -> None:
            super().__init__(_read(overlay, file))

    native.PyTorchFileWriter, native.PyTorchFileReader = PyTorchFileWriter, PyTorchFileReader


def _saving(overlay: Overlay, plain: Any) -> Any:
    """Wrap a method that writes its object to a path."""

    @functools.wraps(plain)
    def save(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, overlay.writing(path, keep=False)[0], *args, **kwargs)

    return save


def _mapping(overlay: Overlay, plain: Any) -> Any:
    """Wrap a function that maps a file to memory: with `shared`, C++ opens it for writing and writes changes back."""

    @functools.wraps(plain)
    def from_file(filename: Any, shared: bool | None = False, *args: Any, **kwargs: Any) -> Any:
        mapped = overlay.writing(filename) if shared else overlay.reading(filename)
        return plain(mapped[0], shared, *args, **kwargs)

    return from_file


def _under_sqlite(overlay: Overlay) -> None:
    """Wrap `sqlite3.connect`: SQLite opens its files in C."""
    module: Any = sys.modules["sqlite3"]
    plain = module.connect

    @functools.wraps(plain)
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        if str(database) and not str(database).startswith((":", "file:")):
            database = overlay.writing(database)[0]
        return plain(database, *args, **kwargs)

    module.connect = module.dbapi2.connect = connect


def _under_safetensors(overlay: Overlay) -> None:
    """Wrap safetensors' `save_file` and `load_file`, which write and read in Rust."""
    module: Any = sys.modules["safetensors.torch"]
    save, load = module.save_file, module.load_file
    module.save_file = lambda tensors, filename, *a, **k: save(
        tensors, overlay.writing(filename, keep=False)[0], *a, **k
    )
    module.load_file = lambda filename, *a, **k: load(overlay.reading(filename)[0], *a, **k)
