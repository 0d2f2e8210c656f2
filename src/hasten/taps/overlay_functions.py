"""Redirect Python's file functions to the overlay: `open` and those of `os` and `shutil`.

Each function is replaced by a wrapper that maps its path arguments through the overlay and calls the plain function.
"""

from __future__ import annotations

import builtins
import errno
import functools
import glob
import io
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from hasten.taps.overlay import Overlay
from hasten.taps.overlay_libraries import install_under_libraries

_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = ("stat", "access", "statvfs", "listxattr", "getxattr", "pathconf")
_CHANGING = ("chmod", "fchmod", "chown", "fchown", "utime", "setxattr", "removexattr", "truncate")
_MAKING = ("mkdir", "mkfifo", "mknod")


def install(overlay: Overlay) -> None:
    """Redirect every function of Python that opens, changes, lists, makes, moves or removes files to the overlay."""
    plain = builtins.open
    builtins.open = io.open = _opening(overlay, plain)
    for module in list(sys.modules.values()):  # bz2, lzma and tarfile hold `open` under other names
        for name in ("_builtin_open", "bltn_open"):
            if vars(module).get(name) is plain:
                setattr(module, name, builtins.open)
    _replace("open", _opening_descriptor(overlay, os.open))
    for name in _READING:
        _replace(name, _reading(overlay, getattr(os, name)))
    for name in ("lstat", "readlink"):
        _replace(name, _reading(overlay, getattr(os, name), follow=False))
    # `fchmod` and others get a path if a user's file is open under the descriptor: the overlay's copy is changed then.
    # So they are made from the plain functions without the "f", which take a descriptor or a path.
    plains = {name: getattr(os, name[1:] if name[1:] in _CHANGING else name) for name in _CHANGING}
    for name, change in plains.items():
        _replace(name, _changing(overlay, change))
    _replace("lchown", functools.partial(os.chown, follow_symlinks=False))
    for name in _MAKING:
        _replace(name, _making(overlay, getattr(os, name)))
    for name in ("remove", "unlink", "rmdir"):
        _replace(name, _removing(overlay, getattr(os, name)))
    for name in ("rename", "replace"):
        _replace(name, _moving(overlay, getattr(os, name)))
    _replace("link", _linking(overlay, os.link))
    _replace("symlink", _symlinking(overlay, os.symlink))
    _replace("listdir", _listing(overlay, os.listdir))
    _replace_scandir(_scanning(overlay, os.scandir))
    _replace("chdir", _changing_folder(overlay, os.chdir))
    os.getcwd, os.getcwdb = overlay.cwd, lambda: os.fsencode(overlay.cwd())
    shutil.rmtree = _removing_tree(overlay, shutil.rmtree)
    install_under_libraries(overlay)


def _replace(name: str, replacement: Any) -> None:
    """Replace a function of `os`, also in the sets in which `os` says what its functions support."""
    plain = getattr(os, name)
    for supported in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if plain in supported:
            supported.add(replacement)
    setattr(os, name, replacement)


def _replace_scandir(replacement: Any) -> None:
    """Replace `os.scandir`, also where Python 3.13's `Path.glob` holds it; 3.11, 3.12 and 3.14 look it up in `os`."""
    plain, globber = os.scandir, getattr(glob, "_StringGlobber", None)
    if getattr(globber, "scandir", None) is plain:
        globber.scandir = staticmethod(replacement)  # type: ignore[union-attr]
    _replace("scandir", replacement)


# -- opening -------------------------------------------------------------------------------------------


def _opening(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int):
            if any(letter in mode for letter in "wax+"):
                file = overlay.writing(file, keep="w" not in mode, follow="x" not in mode)[0]
            else:
                file = overlay.reading(file)[0]
        return plain(file, mode, *args, **kwargs)

    return opened


def _opening_descriptor(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        follow = not flags & (os.O_NOFOLLOW | os.O_EXCL)
        if flags & os.O_TMPFILE == os.O_TMPFILE:  # an unnamed file: `path` is its folder, which must exist
            absolute = overlay.resolve(path, dir_fd=dir_fd)
            if absolute is not None and overlay.is_users_folder(absolute):
                path, dir_fd = overlay.make_folder(absolute), None
        elif flags & _WRITING_FLAGS:
            path, dir_fd = overlay.writing(path, follow=follow, dir_fd=dir_fd)
        else:
            path, dir_fd = overlay.reading(path, follow, dir_fd)
        return int(plain(path, flags, mode, dir_fd=dir_fd))

    return opened


# -- reading and changing what is there ----------------------------------------------------------------


def _reading(overlay: Overlay, plain: Any, follow: bool = True) -> Any:
    @functools.wraps(plain)
    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int):  # a descriptor was already mapped when it was opened
            dir_fd = kwargs.pop("dir_fd", None)
            path, dir_fd = overlay.reading(path, follow and kwargs.get("follow_symlinks", True), dir_fd)
            if dir_fd is not None:
                kwargs["dir_fd"] = dir_fd
        return plain(path, *args, **kwargs)

    return call


def _changing(overlay: Overlay, plain: Any) -> Any:
    """Wrap a function that changes content or metadata, by path or descriptor: change a copy of the user's file."""

    @functools.wraps(plain)
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        dir_fd = kwargs.pop("dir_fd", None)
        absolute = overlay.resolve(path, kwargs.get("follow_symlinks", True), dir_fd)
        if isinstance(path, int) and (absolute is None or overlay.is_in_scratch(path)):
            return plain(path, *args, **kwargs)
        if absolute is not None:
            exists = overlay.exists_in_view(absolute)  # if not, the plain function raises its usual error below
            return plain(
                overlay.writable_path(absolute) if exists else overlay.readable_path(absolute), *args, **kwargs
            )
        if dir_fd is not None:
            kwargs["dir_fd"] = dir_fd
        return plain(path, *args, **kwargs)

    return call


# -- making, removing, moving --------------------------------------------------------------------------


def _refuse_present(overlay: Overlay, absolute: str | None, path: Any) -> None:
    if absolute is not None and overlay.exists_in_view(absolute):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))


def _making(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def make(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        absolute = overlay.resolve(path, False, dir_fd)
        _refuse_present(overlay, absolute, path)
        if absolute is not None:
            path, dir_fd = overlay.writable_path(absolute, keep=False), None
        plain(path, *args, **kwargs, **({} if dir_fd is None else {"dir_fd": dir_fd}))

    return make


def _removing(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        absolute = overlay.resolve(path, False, dir_fd)
        if absolute is None:
            plain(path, dir_fd=dir_fd)
            overlay.forget_links()
        else:
            overlay.remove(absolute, plain)

    return remove


def _removing_tree(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def rmtree(path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        absolute = overlay.resolve(path, False, kwargs.get("dir_fd"))
        if absolute is None:
            if overlay.contains_scratch(path, kwargs.get("dir_fd")):
                # In the scratch folder the script sees the whole file system: removing it would empty the caches.
                return
            plain(path, ignore_errors, *args, **kwargs)
            overlay.forget_links()
            return
        kwargs.pop("dir_fd", None)
        overlay.remove_tree(absolute, lambda inside: plain(inside, ignore_errors, *args, **kwargs))

    # A documented attribute of the function: whether it is safe against links that others create while it runs.
    rmtree.avoids_symlink_attacks = plain.avoids_symlink_attacks  # type: ignore[attr-defined]
    return rmtree


def _moving(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def move(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        origin, goal = overlay.resolve(source, False, src_dir_fd), overlay.resolve(target, False, dst_dir_fd)
        if goal is not None:
            overlay.writable_path(goal, keep=False)
            if overlay.exists_in_view(goal):
                overlay.copy_up(goal)
            target, dst_dir_fd = overlay.root + goal, None
        if origin is not None:
            source, src_dir_fd = overlay.copy_up(origin), None
        plain(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        for moved in (origin, goal):
            if moved is not None and origin != goal:
                overlay.hide(moved)
        overlay.forget_links()

    return move


def _linking(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def link(
        source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **kwargs: Any
    ) -> None:
        goal = overlay.resolve(target, False, dst_dir_fd)
        _refuse_present(overlay, goal, target)
        # A hard link to the user's own file would be a way to change it, so the link is to a copy.
        source, src_dir_fd = overlay.writing(source, follow=False, dir_fd=src_dir_fd)
        if goal is not None:
            target, dst_dir_fd = overlay.writable_path(goal, keep=False), None
        plain(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **kwargs)

    return link


def _symlinking(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def symlink(source: Any, target: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        goal = overlay.resolve(target, False, dir_fd)
        _refuse_present(overlay, goal, target)
        if goal is not None:
            target, dir_fd = overlay.writable_path(goal, keep=False), None
        plain(source, target, target_is_directory, dir_fd=dir_fd)  # its target is not mapped: the overlay follows links
        overlay.forget_links()

    return symlink


# -- folders -------------------------------------------------------------------------------------------


def _listing(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def listdir(path: Any = ".") -> Any:
        absolute = overlay.resolve("." if path is None else path)
        if absolute is None:
            return plain(path)
        layers = overlay.layers(absolute)
        if len(layers) == 1 and not overlay.removed:
            return plain(path if isinstance(path, int) else overlay.reading("." if path is None else path)[0])
        names = overlay.names(absolute)
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    return listdir


def _scanning(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def scandir(path: Any = ".") -> Any:
        shown = "." if path is None else path
        absolute = overlay.resolve(shown)
        if absolute is None:
            return plain(path)
        layers = overlay.layers(absolute)
        if layers == [absolute] and not overlay.removed:
            mapped = shown if isinstance(shown, int) else overlay.reading(shown)[0]
            if mapped == shown:
                return plain(path)
        entries = {e.name: e for layer in layers for e in plain(layer) if overlay.shows(layer, e.name)}
        return _Entries(iter([_LayeredEntry(entry, shown) for entry in entries.values()]))

    return scandir


def _changing_folder(overlay: Overlay, plain: Any) -> Any:
    @functools.wraps(plain)
    def chdir(path: Any) -> None:
        absolute = overlay.resolve(path)
        plain(
            path
            if absolute is None
            else absolute
            if overlay.is_users_folder(absolute)
            else overlay.readable_path(absolute)
        )

    return chdir


class _LayeredEntry:
    """A `DirEntry` of a folder with two layers, whose path begins with the folder as the script spelled it."""

    def __init__(self, entry: Any, folder: Any) -> None:
        self._entry = entry
        named_in_bytes = isinstance(folder, bytes)
        self.name = os.fsencode(entry.name) if named_in_bytes else entry.name
        self.path = self.name if isinstance(folder, int) else os.path.join(folder, self.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> Any:
        return self.path


class _Entries:
    """The result of `os.scandir`: an iterator that is also a context manager."""

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
        """Do nothing: all entries were read already, and no descriptor is open."""
