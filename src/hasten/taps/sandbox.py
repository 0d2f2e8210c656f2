"""A trial's writes: what the script saves goes to a scratch folder, and the script finds it there again.

An overlay in Python: paths that are opened for writing, made, moved or removed are mapped into the scratch folder;
reading looks there first. Behind it stands the kernel's guard (`landlock.py`), where the kernel has it.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from hasten.taps.boot import after_import
from hasten.taps.landlock import forbid_writing
from hasten.techniques.compute.compile import kernel_cache

unguarded = ""  # why the kernel's guard is not behind the sandbox, if it is not

_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Loggers that would send a trial's numbers to a server, or write by native code, are asked to keep still.
_QUIET_LOGGERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}


def confine(scratch: str) -> None:
    """Send everything this process and its children write to `scratch`."""
    global unguarded
    home = os.path.expanduser("~")
    temporary = os.path.join(scratch, "tmp")
    os.makedirs(temporary, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernel_cache())
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "triton"))
    os.environ.update(
        TMPDIR=temporary, MLFLOW_TRACKING_URI=f"file://{scratch}/mlflow", HASTEN_TRIAL="1", **_QUIET_LOGGERS
    )
    tempfile.tempdir = temporary
    caches = [
        os.environ["TORCHINDUCTOR_CACHE_DIR"],
        os.environ.get("XDG_CACHE_HOME", f"{home}/.cache"),
        f"{home}/.nv",
    ]
    os.makedirs(caches[0], exist_ok=True)
    free = [scratch, "/dev", "/proc", *caches]
    Overlay(os.path.join(scratch, "files"), free).install()
    unguarded = forbid_writing(free)


class Overlay:
    """Maps paths into `root`, except those under the folders in `free`."""

    def __init__(self, root: str, free: list[str]) -> None:
        self.root = root
        self.free = tuple(os.path.abspath(folder) for folder in free)
        self.removed: set[str] = set()
        self.stat, self.lstat, self.mkdirs = os.stat, os.lstat, os.makedirs
        self.listdir, self.scandir, self.open, self.mkdir = os.listdir, os.scandir, builtins.open, os.mkdir

    # -- where a path really is ------------------------------------------------------------------------

    def _there(self, path: str) -> bool:
        try:
            self.lstat(path)
        except OSError:
            return False
        return True

    def _absolute(self, path: Any) -> str | None:
        """The path as text, or None where it is none of the overlay's business."""
        if isinstance(path, int) or path is None:
            return None
        try:
            absolute = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        if any(absolute == folder or absolute.startswith(folder + os.sep) for folder in self.free):
            return None
        return absolute

    def reading(self, path: Any) -> Any:
        """Where a path is to be read from."""
        absolute = self._absolute(path)
        if absolute is None:
            return path
        inside = self.root + absolute
        return inside if self._there(inside) or self._is_removed(absolute) else path

    def writing(self, path: Any, keep: bool = True) -> Any:
        """Where a path is to be written to; `keep` brings what it holds along."""
        absolute = self._absolute(path)
        if absolute is None:
            return path
        inside = self.root + absolute
        parent = os.path.dirname(absolute)
        if self._there(self.reading(parent)):
            self._make(self.root + parent)
        if keep and not self._there(inside) and self._there(absolute) and not self._is_removed(absolute):
            if os.path.isfile(absolute):
                self._copy(absolute, inside)
        self.removed.discard(absolute)
        return inside

    def _make(self, folder: str) -> None:
        if not self._there(folder):
            self._make(os.path.dirname(folder))
            self.mkdir(folder)

    def _copy(self, source: str, target: str) -> None:
        with self.open(source, "rb") as old, self.open(target, "wb") as new:
            shutil.copyfileobj(old, new)

    def _is_removed(self, absolute: str) -> bool:
        while absolute != "/":
            if absolute in self.removed:
                return True
            absolute = os.path.dirname(absolute)
        return False

    def _remove(self, path: Any, really: Callable[[str], None]) -> None:
        absolute = self._absolute(path)
        if absolute is None:
            really(path)
            return
        if not self._there(self.reading(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        if self._there(self.root + absolute):
            really(self.root + absolute)
        if self._there(absolute):
            self.removed.add(absolute)

    def _move(self, source: Any, target: Any, really: Callable[[str, str], None]) -> None:
        origin, inside = self._absolute(source), self.writing(target, keep=False)
        if origin is None or self._there(self.root + origin):
            really(self.reading(source), inside)
        elif os.path.isdir(origin):
            shutil.copytree(origin, inside)
        else:
            self._copy(os.fspath(self.reading(source)), inside)
        if origin is not None and self._there(origin):
            self.removed.add(origin)

    # -- folders -----------------------------------------------------------------------------------------

    def _names(self, path: Any = ".") -> Any:
        absolute = self._absolute(path)
        if absolute is None or not (self._there(self.root + absolute) or self.removed):
            return self.listdir(path)
        found = set(self.listdir(self.root + absolute)) if self._there(self.root + absolute) else set()
        if self._there(absolute) and not self._is_removed(absolute):
            found.update(name for name in self.listdir(absolute) if os.path.join(absolute, name) not in self.removed)
        elif not self._there(self.root + absolute):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return sorted(found)

    def _scan(self, path: Any = ".") -> Any:
        absolute = self._absolute(path)
        if absolute is None or not (self._there(self.root + absolute) or self.removed):
            return self.scandir(path)
        entries: dict[str, Any] = {}
        if self._there(absolute) and not self._is_removed(absolute):
            entries = {e.name: e for e in self.scandir(absolute) if os.path.join(absolute, e.name) not in self.removed}
        if self._there(self.root + absolute):
            entries.update({entry.name: entry for entry in self.scandir(self.root + absolute)})
        return _Entries(iter(entries.values()))

    # -- the functions of Python that touch files ----------------------------------------------------------

    def install(self) -> None:
        """Put the overlay under `open`, `os`, `shutil` and the writers of torch and safetensors."""
        self._make(self.root)
        builtins.open = io.open = self._opening(builtins.open)
        os.open = self._opening_descriptor(os.open)
        for name in ("stat", "lstat", "access", "readlink", "chdir", "statvfs"):
            setattr(os, name, self._mapped(getattr(os, name), self.reading))
        for name in ("mkdir", "truncate", "chmod", "utime", "mkfifo", "setxattr", "chown"):
            if hasattr(os, name):
                writing = functools.partial(self.writing, keep=name != "mkdir")
                setattr(os, name, self._mapped(getattr(os, name), writing))
        os.mkdir = self._making(os.mkdir)
        for name in ("remove", "unlink", "rmdir"):
            setattr(os, name, self._removing(getattr(os, name)))
        shutil.rmtree = self._removing_tree(shutil.rmtree)
        for name in ("rename", "replace"):
            setattr(os, name, self._moving(getattr(os, name)))
        for name in ("link", "symlink"):
            setattr(os, name, self._linking(getattr(os, name)))
        os.listdir, os.scandir = self._names, self._scan
        after_import("torch", self._under_torch)
        after_import("safetensors.torch", self._under_safetensors)

    def _opening(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(file, int):
                writes = any(letter in mode for letter in "wax+")
                file = self.writing(file, keep="w" not in mode) if writes else self.reading(file)
            return plain(file, mode, *args, **kwargs)

        return opened

    def _opening_descriptor(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None:
                path = self.writing(path) if flags & _WRITING_FLAGS else self.reading(path)
            return int(plain(path, flags, mode, dir_fd=dir_fd))

        return opened

    def _mapped(self, plain: Any, where: Callable[[Any], Any]) -> Any:
        @functools.wraps(plain)
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(path if kwargs.get("dir_fd") is not None else where(path), *args, **kwargs)

        return call

    def _making(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            if self._absolute(path) is not None and self._there(self.reading(path)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
            plain(path, *args, **kwargs)

        return mkdir

    def _removing(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None:
                plain(path, dir_fd=dir_fd)
            else:
                self._remove(path, plain)

        return remove

    def _removing_tree(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def rmtree(path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
            if self._absolute(path) is None:
                return plain(path, ignore_errors, *args, **kwargs)  # type: ignore[no-any-return]
            try:
                self._remove(path, functools.partial(plain, ignore_errors=ignore_errors))
            except FileNotFoundError:
                if not ignore_errors:
                    raise

        return rmtree

    def _moving(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def move(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            if src_dir_fd is not None or dst_dir_fd is not None:
                return plain(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)  # type: ignore[no-any-return]
            return self._move(source, target, plain)

        return move

    def _linking(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            plain(self.reading(source), self.writing(target, keep=False), *args, **kwargs)

        return link

    def _under_torch(self) -> None:
        """torch.save given a path writes it in C++."""
        torch = sys.modules["torch"]
        for owner, name in ((torch, "save"), (torch.jit, "save")):
            plain = getattr(owner, name)

            def save(obj: Any, f: Any, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
                return _plain(
                    obj,
                    self.writing(f, keep=False) if isinstance(f, str | os.PathLike) else f,
                    *args,
                    **kwargs,
                )

            setattr(owner, name, functools.wraps(plain)(save))

    def _under_safetensors(self) -> None:
        """safetensors writes and reads in Rust."""
        module: Any = sys.modules["safetensors.torch"]
        save, load = module.save_file, module.load_file
        module.save_file = lambda tensors, filename, *a, **k: save(tensors, self.writing(filename, keep=False), *a, **k)
        module.load_file = lambda filename, *a, **k: load(self.reading(filename), *a, **k)


class _Entries:
    """What `os.scandir` gives: an iterator that is also a context manager."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held open."""
