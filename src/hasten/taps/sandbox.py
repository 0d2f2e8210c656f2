"""A trial's writes: what the script saves goes to a scratch folder, and the script finds it there again.

An overlay in Python: paths that are opened for writing, made, moved or removed are mapped into the scratch folder;
reading looks there first. Behind it stands the kernel's guard (`landlock.py`), where the kernel has it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import io
import os
import shutil
import stat
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
# Folders that are caches by definition; libraries write them by native code, too.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "NUMBA_CACHE_DIR", "MPLCONFIGDIR")


def confine(scratch: str, also: tuple[str, ...] = ()) -> None:
    """Send everything this process and its children write to `scratch`; folders in `also` may be written to as well."""
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
    caches += [os.environ[name] for name in _CACHES if os.environ.get(name)]
    # A cache that holds the working folder, the script or the home is no cache: `HF_HOME=.`, `NUMBA_CACHE_DIR=/ws/`.
    theirs = [os.getcwd(), home, *(os.path.dirname(word) or "." for word in sys.argv[:1])]
    caches = [folder for folder in map(os.path.abspath, caches) if not any(holds(folder, place) for place in theirs)]
    for folder in caches:
        with contextlib.suppress(OSError):  # a home that cannot be written to: then nothing is cached
            os.makedirs(folder, exist_ok=True)
    free = [scratch, *also, "/dev", "/proc", *caches]
    Overlay(os.path.join(scratch, "files"), free).install()
    unguarded = forbid_writing(free)


def holds(folder: str, place: str) -> bool:
    """Whether a place is a folder or lies in it, however both are spelled."""
    real = os.path.realpath(folder)
    return (os.path.realpath(place) + os.sep).startswith(real if real == os.sep else real + os.sep)


class Overlay:
    """Maps paths into `root`, except those under the folders in `free`."""

    def __init__(self, root: str, free: list[str]) -> None:
        self.root = root
        self.free = tuple(os.path.abspath(folder) for folder in free)
        self.removed: set[str] = set()  # what the person has there is hidden, even where the script made it anew
        self.stat, self.lstat, self.mkdirs = os.stat, os.lstat, os.makedirs
        self.listdir, self.scandir, self.open, self.mkdir = os.listdir, os.scandir, builtins.open, os.mkdir
        self.getcwd = os.getcwd

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
        if absolute.startswith("/dev/shm/"):  # a disk in memory, where a person may keep things too
            return absolute
        if any(absolute == folder or absolute.startswith(folder + os.sep) for folder in self.free):
            return None
        return absolute

    def reading(self, path: Any) -> Any:
        """Where a path is to be read from."""
        absolute = self._absolute(path)
        if absolute is None:
            return path
        inside = self.root + absolute
        try:
            self.lstat(inside)
            return inside
        except NotADirectoryError:  # the script put a file where a folder would have to be
            return inside
        except OSError:
            if self._is_removed(absolute):
                return inside
        # After `chdir` into a folder of the scratch a relative path would not lead to the person's.
        return absolute if self.getcwd().startswith(self.root) else path

    def writing(self, path: Any, keep: bool = True) -> Any:
        """Where a path is to be written to; `keep` brings what it holds along."""
        absolute = self._absolute(path)
        if absolute is None:
            return path
        inside = self.root + absolute
        parent = os.path.dirname(absolute)
        if self._there(self.reading(parent)):
            self._make(self.root + parent)
        if not self._there(inside) and self._there(absolute) and not self._is_removed(absolute):
            if os.path.isdir(absolute):
                self._make(inside)
            elif keep and os.path.isfile(absolute):
                self._copy(absolute, inside)
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

    def _bring(self, absolute: str) -> str:
        """Have a file, or a folder with all that is in it, in the scratch folder; gives its place there."""
        inside = self.root + absolute
        if not self._is_folder(absolute):
            return str(self.writing(absolute)) if self._there(self.reading(absolute)) else inside
        self._make(inside)
        for name in self._names(absolute):
            self._bring(os.path.join(absolute, name))
        return inside

    def _is_folder(self, absolute: str) -> bool:
        try:
            return stat.S_ISDIR(self.lstat(self.reading(absolute)).st_mode)
        except OSError:
            return False

    def _hide(self, absolute: str) -> None:
        if self._there(absolute):
            self.removed.add(absolute)

    def _remove(self, path: Any, really: Callable[[str], None]) -> None:
        absolute = self._absolute(path)
        if absolute is None:
            really(path)
            return
        if self._is_folder(absolute):
            # Whether `rmdir` may remove it hangs on whether anything is in it.
            self._make(self.root + absolute)
            if (names := self._names(absolute)) and not self.listdir(self.root + absolute):
                self._bring(os.path.join(absolute, names[0]))
        elif self._there(self.reading(path)):
            self.writing(path)
        really(self.root + absolute)
        self._hide(absolute)

    def _move(self, source: Any, target: Any, really: Callable[[str, str], None]) -> None:
        origin, goal = self._absolute(source), self._absolute(target)
        self.writing(target, keep=False)
        if goal is not None and self._there(self.reading(goal)):
            self._bring(goal)
        really(source if origin is None else self._bring(origin), target if goal is None else self.root + goal)
        for moved in (origin, goal):
            if moved is not None and origin != goal:
                self._hide(moved)

    # -- folders -----------------------------------------------------------------------------------------

    def _layers(self, path: Any) -> list[Any]:
        """The folders that make up a folder: the person's, and the scratch folder's over it."""
        absolute = self._absolute(path)
        if absolute is None:
            return [path]
        inside = self.root + absolute
        if not self._there(inside) or self._is_removed(absolute) or not os.path.isdir(inside):
            return [self.reading(path)]
        return [absolute, inside] if self._is_theirs(absolute) else [inside]

    def _is_theirs(self, absolute: str) -> bool:
        """Whether the person has a folder there, which the script did not remove."""
        try:
            return stat.S_ISDIR(self.stat(absolute).st_mode) and not self._is_removed(absolute)
        except OSError:
            return False

    def _shown(self, layer: Any, name: Any) -> bool:
        """Whether an entry of a layer is seen; one of the person's may have been removed."""
        absolute = self._absolute(layer)
        return absolute is None or os.path.join(absolute, os.fsdecode(name)) not in self.removed

    def _names(self, path: Any = ".") -> Any:
        layers = self._layers(path)
        return list(dict.fromkeys(n for layer in layers for n in self.listdir(layer) if self._shown(layer, n)))

    def _scan(self, path: Any = ".") -> Any:
        layers = self._layers(path)
        if layers == [path] and not self.removed:
            return self.scandir(path)
        entries = {e.name: e for layer in layers for e in self.scandir(layer) if self._shown(layer, e.name)}
        return _Entries(_Entry(entry, path) if layers != [path] else entry for entry in entries.values())

    def _cwd(self) -> str:
        """Where the script believes to be."""
        folder = self.getcwd()
        return folder[len(self.root) :] or "/" if folder.startswith(self.root) else folder

    def _changing_folder(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def chdir(path: Any) -> None:
            absolute = self._absolute(path)
            plain(absolute if absolute is not None and self._is_theirs(absolute) else self.reading(path))

        return chdir

    # -- the functions of Python that touch files ----------------------------------------------------------

    def install(self) -> None:
        """Put the overlay under `open`, `os`, `shutil` and the writers of torch and safetensors."""
        self._make(self.root)
        plain = builtins.open
        builtins.open = io.open = self._opening(plain)
        for module in list(sys.modules.values()):  # bz2, lzma and tarfile keep it under a name of their own
            for name in ("_builtin_open", "bltn_open"):
                if vars(module).get(name) is plain:
                    setattr(module, name, builtins.open)
        os.open = self._opening_descriptor(os.open)
        for name in ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr"):
            if hasattr(os, name):
                setattr(os, name, self._mapped(getattr(os, name), self.reading))
        os.chdir, os.getcwd = self._changing_folder(os.chdir), self._cwd
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
        after_import("sqlite3", self._under_sqlite)
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
            if dir_fd is None and flags & os.O_TMPFILE != os.O_TMPFILE:  # a file without a name replaces none
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
            absolute = str(self._absolute(path))
            if self._is_folder(absolute):
                self._make(self.root + absolute)
            elif self._there(self.reading(path)):
                self.writing(path)
            plain(self.root + absolute, ignore_errors, *args, **kwargs)
            if not self._there(self.root + absolute):
                self._hide(absolute)
            return None

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
        torch.jit.load = self._mapped(torch.jit.load, self.reading)
        script = torch.jit.RecursiveScriptModule
        whole = script.save
        script.save = lambda module, f, **kwargs: whole(module, self.writing(f, keep=False), **kwargs)
        # `torch.load(..., mmap=True)` maps the file in C++.
        torch.UntypedStorage.from_file = staticmethod(self._mapped(torch.UntypedStorage.from_file, self.reading))

    def _under_sqlite(self) -> None:
        """SQLite opens its files in C."""
        module: Any = sys.modules["sqlite3"]
        plain = module.connect

        @functools.wraps(plain)
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            if str(database) and not str(database).startswith((":", "file:")):
                database = self.writing(database)
            return plain(database, *args, **kwargs)

        module.connect = module.dbapi2.connect = connect

    def _under_safetensors(self) -> None:
        """safetensors writes and reads in Rust."""
        module: Any = sys.modules["safetensors.torch"]
        save, load = module.save_file, module.load_file
        module.save_file = lambda tensors, filename, *a, **k: save(tensors, self.writing(filename, keep=False), *a, **k)
        module.load_file = lambda filename, *a, **k: load(self.reading(filename), *a, **k)


class _Entry:
    """An entry of a folder in the scratch, under the path that the script asked for."""

    def __init__(self, entry: Any, folder: Any) -> None:
        self._entry = entry
        self.name = entry.name
        self.path = os.path.join(folder, entry.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> Any:
        return self.path


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
