"""Native file access redirected to the overlay: torch, SQLite and safetensors."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from hasten.taps.after_import import after_import
from hasten.taps.overlay import Overlay


def install_under_libraries(overlay: Overlay) -> None:
    """Put the overlay under what these libraries open, once they are imported."""
    after_import("torch", lambda: _under_torch(overlay))
    after_import("sqlite3", lambda: _under_sqlite(overlay))
    after_import("safetensors.torch", lambda: _under_safetensors(overlay))


def _under_torch(overlay: Overlay) -> None:
    """torch saves, maps and packs files in C++ where it is given a path."""
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
    # Scripted modules and functions, and profilers (`export_chrome_trace`), have writers of their own.
    for kind in (torch.jit.RecursiveScriptModule, torch.jit.ScriptFunction, torch._C._autograd._ProfilerResult):
        if hasattr(kind, "save"):  # a torch that is built without Kineto writes traces in Python
            kind.save = _saving(overlay, kind.save)
    torch.from_file = _mapping(overlay, torch.from_file)
    # Also called by `torch.load(..., mmap=True)`.
    torch.UntypedStorage.from_file = staticmethod(_mapping(overlay, torch.UntypedStorage.from_file))


def _read(overlay: Overlay, file: Any) -> Any:
    """Where a file given by its path is read, and anything else as it is."""
    return overlay.reading(file)[0] if isinstance(file, str | os.PathLike) else file


def _under_archives(overlay: Overlay, native: Any) -> None:
    """`torch.export` and `torch.package` open torch's zip archives by classes of C++."""
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
    """A method that writes itself to the path it is given."""

    @functools.wraps(plain)
    def save(written: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(written, overlay.writing(path, keep=False)[0], *args, **kwargs)

    return save


def _mapping(overlay: Overlay, plain: Any) -> Any:
    """A function that maps a file to memory: `shared` memory is written back to it, and C++ opens it for writing."""

    @functools.wraps(plain)
    def from_file(filename: Any, shared: bool | None = False, *args: Any, **kwargs: Any) -> Any:
        place = overlay.writing(filename) if shared else overlay.reading(filename)
        return plain(place[0], shared, *args, **kwargs)

    return from_file


def _under_sqlite(overlay: Overlay) -> None:
    """SQLite opens its files in C."""
    module: Any = sys.modules["sqlite3"]
    plain = module.connect

    @functools.wraps(plain)
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        if str(database) and not str(database).startswith((":", "file:")):
            database = overlay.writing(database)[0]
        return plain(database, *args, **kwargs)

    module.connect = module.dbapi2.connect = connect


def _under_safetensors(overlay: Overlay) -> None:
    """safetensors writes and reads in Rust."""
    module: Any = sys.modules["safetensors.torch"]
    save, load = module.save_file, module.load_file
    module.save_file = lambda tensors, filename, *a, **k: save(
        tensors, overlay.writing(filename, keep=False)[0], *a, **k
    )
    module.load_file = lambda filename, *a, **k: load(overlay.reading(filename)[0], *a, **k)
