"""The overlay's two layers: the user's files, and above them a scratch folder that takes everything the script writes.

Each path that the script uses is first resolved to the file's one real path in the script's view: links are followed in
that view, `..` and folder descriptors are resolved as the kernel does. A file with the real path `/a/b` is stored in
the scratch folder at `root` + `/a/b`. Reading takes the scratch folder's file if there is one, else the user's. Before
a change the user's file is copied into the scratch folder; removed files are remembered in `removed` and hidden.

In this file "absolute" is a real path in the script's view, and "inside" its place in the scratch folder.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

_LINKS = 40  # most links to follow in one path; the kernel's limit too
_SHARED_MEMORY = "/dev/shm/"  # a RAM disk under /dev (which is free), where the user may keep files too


class Overlay:
    """Maps paths into `root`, except those under the folders in `free`."""

    def __init__(self, root: str, free: list[str]) -> None:
        self.root = os.path.realpath(root)
        free_folders = [os.path.realpath(folder) + os.sep for folder in free]
        self._free = tuple(free_folders)
        self._memory = tuple(folder for folder in free_folders if folder.startswith(_SHARED_MEMORY))
        self.removed: set[str] = set()  # paths at which the user's files are hidden, even if the script made new ones
        self._folders: dict[str, tuple[str, bool]] = {}  # folder as spelled by the script -> result of `_walk`
        # Python's own functions, from before the overlay replaces them.
        self.stat, self.lstat, self.readlink, self.symlink = os.stat, os.lstat, os.readlink, os.symlink
        self.listdir, self.scandir, self.open, self.mkdir = os.listdir, os.scandir, builtins.open, os.mkdir
        self.getcwd, self.chmod, self.utime = os.getcwd, os.chmod, os.utime
        self.listxattr, self.getxattr, self.setxattr = os.listxattr, os.getxattr, os.setxattr

    # -- one spelling for each file --------------------------------------------------------------------

    def resolve(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> str | None:
        """Return a file's real path in the script's view; None if the overlay does not handle it (free, or no path)."""
        return self._resolve(path, follow, dir_fd)[0]

    def _resolve(self, path: Any, follow: bool, dir_fd: int | None) -> tuple[str | None, bool, str | None]:
        """Return the result of `resolve`, whether a link was followed on the way, and where to read, if known."""
        text = self._full(path, dir_fd)
        if text is None:
            return None, False, None
        folder, _, name = text.rpartition("/")
        readable = None
        if name in ("", ".", ".."):
            absolute, linked = self._walk(text)
        else:
            if (walked := self._folders.get(folder)) is None:
                walked = self._folders[folder] = self._walk(folder)
            absolute, linked = f"{walked[0].rstrip('/')}/{name}", walked[1]
            if follow:
                link, readable = self._look(absolute)
                if link is not None:
                    absolute, linked, readable = self._walk(absolute)[0], True, None
        return (None if self.is_free(absolute) else absolute), linked, readable

    def is_free(self, absolute: str) -> bool:
        """Return whether a real path may be written to directly."""
        if absolute.startswith(_SHARED_MEMORY):
            return (absolute + os.sep).startswith(self._memory)
        return (absolute + os.sep).startswith(self._free)

    def _full(self, path: Any, dir_fd: int | None) -> str | None:
        """Return a path from the root on, as text; for a descriptor the open file's path. None if there is none."""
        if path is None:
            return None
        if isinstance(path, int):
            return self.of_descriptor(path)
        try:
            text = os.fsdecode(path)
        except TypeError:
            return None
        if not text or text.startswith("/"):
            return text or None
        base = self.cwd() if dir_fd is None else self.of_descriptor(dir_fd)
        return None if base is None else f"{base}/{text}"

    def of_descriptor(self, fd: int) -> str | None:
        """Return an open file's path in the script's view; None for a pipe, a socket or a deleted file."""
        try:
            target = self.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return None
        if not target.startswith("/") or target.endswith(" (deleted)"):
            return None
        return self.outside(target)

    def outside(self, physical: str) -> str:
        """Return the script's path for a path in the scratch folder; other paths unchanged."""
        if (physical + os.sep).startswith(self.root + os.sep):
            return physical[len(self.root) :] or "/"
        return physical

    def cwd(self) -> str:
        """Return the working folder in the script's view."""
        return self.outside(self.getcwd())

    def _walk(self, path: str) -> tuple[str, bool]:
        """Resolve a path in the script's view; return it, and whether it contained links."""
        remaining, resolved, links = path.split("/")[::-1], "", 0
        while remaining:
            part = remaining.pop()
            if part in ("", "."):
                continue
            if part == "..":
                resolved = resolved.rpartition("/")[0]
                continue
            candidate = f"{resolved}/{part}"
            link = self._look(candidate)[0] if links < _LINKS else None
            if link is None:
                resolved = candidate
                continue
            links += 1
            resolved = "" if link.startswith("/") else resolved
            remaining += link.split("/")[::-1]
        return resolved or "/", links > 0

    def _look(self, absolute: str) -> tuple[str | None, str]:
        """Return a link's target, None for anything else; and where to read it: in the scratch folder or the user's."""
        inside = self.root + absolute
        try:
            is_link = stat.S_ISLNK(self.lstat(inside).st_mode)
            return self.readlink(inside) if is_link else None, inside
        except NotADirectoryError:  # the script replaced a parent folder by a file
            return None, inside
        except OSError:
            if self.removed and self.is_removed(absolute):
                return None, inside
        try:
            return self.readlink(absolute), absolute
        except OSError:
            return None, absolute

    def forget_links(self) -> None:
        """Clear the cache of resolved folders, after something was moved, removed or linked."""
        self._folders.clear()

    # -- where a file is stored ------------------------------------------------------------------------

    def exists(self, physical: str) -> bool:
        """Return whether anything, even a broken link, is at a path on the disk."""
        try:
            self.lstat(physical)
        except OSError:
            return False
        return True

    def readable_path(self, absolute: str) -> str:
        """Return where to read a file: in the scratch folder, or the user's path."""
        inside = self.root + absolute
        try:
            self.lstat(inside)
            return inside
        except NotADirectoryError:  # the script replaced a parent folder by a file
            return inside
        except OSError:
            return inside if self.removed and self.is_removed(absolute) else absolute

    def exists_in_view(self, absolute: str) -> bool:
        """Return whether anything is at a path in the script's view."""
        return self.exists(self.readable_path(absolute))

    def reading(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> tuple[Any, int | None]:
        """Return the path and folder descriptor with which to call Python's own functions to read a file."""
        absolute, linked, readable = self._resolve(path, follow, dir_fd)
        if absolute is None:
            return path, dir_fd
        readable = readable or self.readable_path(absolute)
        # Keep the script's own spelling if it leads to the same file: it shows in messages and in `file.name`. A
        # relative path does not if the working folder is really one in the scratch folder.
        if readable == absolute and not linked and (_is_full(path) or not self.is_in_scratch(dir_fd)):
            return path, dir_fd
        return readable, None

    def is_in_scratch(self, fd: int | None) -> bool:
        """Return whether an open file or folder is in the scratch folder; None stands for the working folder."""
        base = self.getcwd() if fd is None else self.readlink(f"/proc/self/fd/{fd}")
        return (base + os.sep).startswith(self.root + os.sep)

    def writing(
        self, path: Any, keep: bool = True, follow: bool = True, dir_fd: int | None = None
    ) -> tuple[Any, int | None]:
        """Return the path and folder descriptor with which to call Python's own functions to write a file.

        Args:
            path: The file, as the script gave it.
            keep: Whether to copy the user's file first, because the script may keep part of its content.
            follow: Whether to follow a link at the path's end.
            dir_fd: Descriptor of the folder to which a relative path is relative; None: the working folder.
        """
        absolute = self.resolve(path, follow, dir_fd)
        return (path, dir_fd) if absolute is None else (self.writable_path(absolute, keep), None)

    def writable_path(self, absolute: str, keep: bool = True) -> str:
        """Return a file's place in the scratch folder, ready for writing: with its folder, and with `keep` a copy."""
        inside = self.root + absolute
        parent = os.path.dirname(absolute)
        if self.exists_in_view(parent):
            self.make_folder(parent)
        if not self.exists(inside) and not self.is_removed(absolute) and self.exists(absolute):
            mode = self.lstat(absolute).st_mode
            if stat.S_ISDIR(mode):
                self.make_folder(absolute)
            elif keep and stat.S_ISLNK(mode):
                self.symlink(self.readlink(absolute), inside)
            elif keep and stat.S_ISREG(mode):
                self._copy(absolute, inside)
        return inside

    def make_folder(self, absolute: str) -> str:
        """Create a folder in the scratch folder if it is missing, with the mode of the user's folder, and return it."""
        inside = self.root + absolute
        if not self.exists(inside):
            if absolute not in ("", "/"):
                self.make_folder(os.path.dirname(absolute))
            self.mkdir(inside)
            if self.is_users_folder(absolute):
                self.chmod(inside, stat.S_IMODE(self.stat(absolute).st_mode) | stat.S_IRWXU)
        return inside

    def _copy(self, source: str, target: str) -> None:
        with self.open(source, "rb") as old, self.open(target, "wb") as new:
            shutil.copyfileobj(old, new)
        status = self.stat(source)
        self.chmod(target, stat.S_IMODE(status.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        with contextlib.suppress(OSError):  # the file system has no extended attributes
            for name in self.listxattr(source):
                self.setxattr(target, name, self.getxattr(source, name))
        self.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def is_removed(self, absolute: str) -> bool:
        """Return whether the script removed the user's file or folder, or a folder above it."""
        if not self.removed:
            return False
        while absolute != "/":
            if absolute in self.removed:
                return True
            absolute = os.path.dirname(absolute)
        return False

    def is_users_folder(self, absolute: str) -> bool:
        """Return whether the user has a folder there that the script did not remove."""
        try:
            return stat.S_ISDIR(self.lstat(absolute).st_mode) and not self.is_removed(absolute)
        except OSError:
            return False

    def is_folder(self, absolute: str) -> bool:
        """Return whether there is a folder in the script's view."""
        try:
            return stat.S_ISDIR(self.lstat(self.readable_path(absolute)).st_mode)
        except OSError:
            return False

    # -- removing and moving ---------------------------------------------------------------------------

    def hide(self, absolute: str) -> None:
        """Hide the user's file or folder from the script."""
        if self.exists(absolute):
            self.removed.add(absolute)
        self.forget_links()

    def copy_up(self, absolute: str) -> str:
        """Copy a file, or a folder with its whole content, into the scratch folder; return its place there."""
        if not self.is_folder(absolute):
            return self.writable_path(absolute) if self.exists_in_view(absolute) else self.root + absolute
        inside = self.make_folder(absolute)
        for name in self.names(absolute):
            self.copy_up(os.path.join(absolute, name))
        return inside

    def remove(self, absolute: str, really: Callable[[str], None]) -> None:
        """Remove a file or an empty folder, by calling `really` with its place in the scratch folder."""
        if self.is_folder(absolute):
            # `rmdir` must fail if the user's folder has entries: bring one of them into the scratch folder.
            self.make_folder(absolute)
            if (names := self.names(absolute)) and not self.listdir(self.root + absolute):
                self.copy_up(os.path.join(absolute, names[0]))
        elif self.exists_in_view(absolute):
            self.writable_path(absolute)
        really(self.root + absolute)
        self.hide(absolute)

    def contains_scratch(self, path: Any, dir_fd: int | None) -> bool:
        """Return whether a path is the scratch folder itself, or a folder that contains it."""
        full = self._full(path, dir_fd)
        return full is not None and (self.root + os.sep).startswith(os.path.realpath(full).rstrip(os.sep) + os.sep)

    def remove_tree(self, absolute: str, really: Callable[[str], None]) -> None:
        """Remove a folder with its content, by calling `really` with its place in the scratch folder."""
        if self.is_folder(absolute):
            self.make_folder(absolute)
            self.hide(absolute)  # before the removal, which then finds only the scratch folder's content
        elif self.exists_in_view(absolute):
            self.writable_path(absolute)
        really(self.root + absolute)
        self.forget_links()

    # -- folders ---------------------------------------------------------------------------------------

    def layers(self, absolute: str) -> list[str]:
        """Return the folders on the disk that together make up a folder: the user's, then the scratch folder's."""
        inside = self.root + absolute
        if not self.exists(inside) or self.is_removed(absolute) or not stat.S_ISDIR(self.lstat(inside).st_mode):
            return [self.readable_path(absolute)]
        return [absolute, inside] if self.is_users_folder(absolute) else [inside]

    def shows(self, layer: str, name: str) -> bool:
        """Return whether the script sees an entry of a layer; it may have removed the user's."""
        return layer.startswith(self.root) or os.path.join(layer, name) not in self.removed

    def names(self, absolute: str) -> list[str]:
        """Return the names in a folder in the script's view."""
        names = (name for layer in self.layers(absolute) for name in self.listdir(layer) if self.shows(layer, name))
        return list(dict.fromkeys(names))


def _is_full(path: Any) -> bool:
    """Return whether a path leads from the root on, as most do; False where that is not as quick to tell."""
    return isinstance(path, str) and path.startswith("/")
