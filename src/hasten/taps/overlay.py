"""The overlay's layers: the person's files, and over them a scratch folder that takes what the script writes.

Both sides of every comparison are real paths: links are followed in what the script sees, `..` and folder descriptors
are resolved as the kernel resolves them, and the result is one spelling for each file. `root` + that spelling is where
the scratch folder has it.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

_LINKS = 40  # followed in one path, as in the kernel
_SHARED_MEMORY = "/dev/shm/"  # a disk in memory, where a person may keep things too


class Overlay:
    """Maps paths into `root`, except those under the folders in `free`."""

    def __init__(self, root: str, free: list[str]) -> None:
        self.root = os.path.realpath(root)
        own = [os.path.realpath(folder) + os.sep for folder in free]
        self._free = tuple(own)
        self._memory = tuple(folder for folder in own if folder.startswith(_SHARED_MEMORY))
        self.removed: set[str] = set()  # what the person has there is hidden, even where the script made it again
        self._folders: dict[str, tuple[str, bool]] = {}  # folder as it was written -> what `_walk` says
        # Python's own, from before the overlay is put over them.
        self.stat, self.lstat, self.readlink, self.symlink = os.stat, os.lstat, os.readlink, os.symlink
        self.listdir, self.scandir, self.open, self.mkdir = os.listdir, os.scandir, builtins.open, os.mkdir
        self.getcwd, self.chmod, self.utime = os.getcwd, os.chmod, os.utime
        self.listxattr, self.getxattr, self.setxattr = os.listxattr, os.getxattr, os.setxattr

    # -- one spelling for each file --------------------------------------------------------------------

    def place(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> str | None:
        """The real path of a file as the script sees it, or None where it is none of the overlay's business."""
        return self._place(path, follow, dir_fd)[0]

    def _place(self, path: Any, follow: bool, dir_fd: int | None) -> tuple[str | None, bool]:
        """As `place`; and whether a link was followed on the way."""
        text = self._full(path, dir_fd)
        if text is None:
            return None, False
        folder, _, name = text.rpartition("/")
        if name in ("", ".", ".."):
            absolute, linked = self._walk(text)
        else:
            if (known := self._folders.get(folder)) is None:
                known = self._folders[folder] = self._walk(folder)
            absolute, linked = f"{known[0].rstrip('/')}/{name}", known[1]
            if follow and self._link(absolute) is not None:
                absolute, linked = self._walk(absolute)[0], True
        return (None if self.is_free(absolute) else absolute), linked

    def is_free(self, absolute: str) -> bool:
        """Whether a real path may be written to as it is."""
        if absolute.startswith(_SHARED_MEMORY):
            return (absolute + os.sep).startswith(self._memory)
        return (absolute + os.sep).startswith(self._free)

    def _full(self, path: Any, dir_fd: int | None) -> str | None:
        """The path from the root on, as text; that of an open file, where it still has one."""
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
        """Where an open file is, as the script sees it; None for what has no name."""
        try:
            held = self.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return None
        if not held.startswith("/") or held.endswith(" (deleted)"):
            return None
        return self.outside(held)

    def outside(self, physical: str) -> str:
        """The path that the script knows for one in the scratch folder; others as they are."""
        if (physical + os.sep).startswith(self.root + os.sep):
            return physical[len(self.root) :] or "/"
        return physical

    def cwd(self) -> str:
        """Where the script believes to be."""
        return self.outside(self.getcwd())

    def _walk(self, path: str) -> tuple[str, bool]:
        """Follow all links of a path, in what the script sees; and whether there were any."""
        left, at, links = path.split("/")[::-1], "", 0
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                at = at.rpartition("/")[0]
                continue
            there = f"{at}/{part}"
            link = self._link(there) if links < _LINKS else None
            if link is None:
                at = there
                continue
            links += 1
            at = "" if link.startswith("/") else at
            left += link.split("/")[::-1]
        return at or "/", links > 0

    def _link(self, absolute: str) -> str | None:
        """Return a link's target; None for anything else."""
        try:
            inside = self.lstat(self.root + absolute)
            return self.readlink(self.root + absolute) if stat.S_ISLNK(inside.st_mode) else None
        except OSError:
            if self.removed and self.is_removed(absolute):
                return None
        try:
            return self.readlink(absolute)
        except OSError:
            return None

    def forget_links(self) -> None:
        """Something was moved, removed or linked: folders may lead elsewhere."""
        self._folders.clear()

    # -- where it lies ---------------------------------------------------------------------------------

    def exists(self, physical: str) -> bool:
        """Whether there is anything at a path, as it lies on the disk."""
        try:
            self.lstat(physical)
        except OSError:
            return False
        return True

    def seen(self, absolute: str) -> str:
        """Where a file is read from: the scratch folder, or the person's."""
        inside = self.root + absolute
        try:
            self.lstat(inside)
            return inside
        except NotADirectoryError:  # the script put a file where a folder would have to be
            return inside
        except OSError:
            return inside if self.removed and self.is_removed(absolute) else absolute

    def is_there(self, absolute: str) -> bool:
        """Whether the script sees anything there."""
        return self.exists(self.seen(absolute))

    def reading(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> tuple[Any, int | None]:
        """The path, and folder descriptor, by which Python's own functions read a file."""
        absolute, linked = self._place(path, follow, dir_fd)
        if absolute is None:
            return path, dir_fd
        where = self.seen(absolute)
        # As the script wrote it, where that leads to the same (a relative path in the scratch folder would not): it
        # stands in messages and in `file.name`.
        if where == absolute and not linked and not self.is_inside(dir_fd):
            return path, dir_fd
        return where, None

    def is_inside(self, fd: int | None) -> bool:
        """Whether an open file or folder lies in the scratch folder; None: the working folder."""
        base = self.getcwd() if fd is None else self.readlink(f"/proc/self/fd/{fd}")
        return (base + os.sep).startswith(self.root + os.sep)

    def writing(
        self, path: Any, keep: bool = True, follow: bool = True, dir_fd: int | None = None
    ) -> tuple[Any, int | None]:
        """The path, and folder descriptor, by which they write it; `keep` brings what it holds along."""
        absolute = self.place(path, follow, dir_fd)
        return (path, dir_fd) if absolute is None else (self.written(absolute, keep), None)

    def written(self, absolute: str, keep: bool = True) -> str:
        """Make ready the place in the scratch folder to which a file is written."""
        inside = self.root + absolute
        parent = os.path.dirname(absolute)
        if self.is_there(parent):
            self.make(parent)
        if not self.exists(inside) and not self.is_removed(absolute) and self.exists(absolute):
            mode = self.lstat(absolute).st_mode
            if stat.S_ISDIR(mode):
                self.make(absolute)
            elif keep and stat.S_ISLNK(mode):
                self.symlink(self.readlink(absolute), inside)
            elif keep and stat.S_ISREG(mode):
                self._copy(absolute, inside)
        return inside

    def make(self, absolute: str) -> str:
        """Have a folder in the scratch folder, with the mode that the person's has."""
        inside = self.root + absolute
        if not self.exists(inside):
            if absolute not in ("", "/"):
                self.make(os.path.dirname(absolute))
            self.mkdir(inside)
            if self.is_theirs(absolute):
                self.chmod(inside, stat.S_IMODE(self.stat(absolute).st_mode) | stat.S_IRWXU)
        return inside

    def _copy(self, source: str, target: str) -> None:
        with self.open(source, "rb") as old, self.open(target, "wb") as new:
            shutil.copyfileobj(old, new)
        held = self.stat(source)
        self.chmod(target, stat.S_IMODE(held.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        with contextlib.suppress(OSError):  # a file system without attributes
            for name in self.listxattr(source):
                self.setxattr(target, name, self.getxattr(source, name))
        self.utime(target, ns=(held.st_atime_ns, held.st_mtime_ns))

    def is_removed(self, absolute: str) -> bool:
        """Whether the script removed what the person has there."""
        if not self.removed:
            return False
        while absolute != "/":
            if absolute in self.removed:
                return True
            absolute = os.path.dirname(absolute)
        return False

    def is_theirs(self, absolute: str) -> bool:
        """Whether the person has a folder there, which the script did not remove."""
        try:
            return stat.S_ISDIR(self.lstat(absolute).st_mode) and not self.is_removed(absolute)
        except OSError:
            return False

    def is_folder(self, absolute: str) -> bool:
        """Whether the script sees a folder there."""
        try:
            return stat.S_ISDIR(self.lstat(self.seen(absolute)).st_mode)
        except OSError:
            return False

    # -- removing and moving ---------------------------------------------------------------------------

    def hide(self, absolute: str) -> None:
        """The script no longer sees what the person has there."""
        if self.exists(absolute):
            self.removed.add(absolute)
        self.forget_links()

    def bring(self, absolute: str) -> str:
        """Have a file, or a folder with all that is in it, in the scratch folder; gives its place there."""
        if not self.is_folder(absolute):
            return self.written(absolute) if self.is_there(absolute) else self.root + absolute
        inside = self.make(absolute)
        for name in self.names(absolute):
            self.bring(os.path.join(absolute, name))
        return inside

    def remove(self, absolute: str, really: Callable[[str], None]) -> None:
        """Remove a file or an empty folder."""
        if self.is_folder(absolute):
            # Whether `rmdir` may remove it hangs on whether anything is in it.
            self.make(absolute)
            if (names := self.names(absolute)) and not self.listdir(self.root + absolute):
                self.bring(os.path.join(absolute, names[0]))
        elif self.is_there(absolute):
            self.written(absolute)
        really(self.root + absolute)
        self.hide(absolute)

    def lies_in(self, path: Any, dir_fd: int | None) -> bool:
        """Whether a path is the folder that this overlay keeps its files in, or one around it."""
        full = self._full(path, dir_fd)
        return full is not None and (self.root + os.sep).startswith(os.path.realpath(full).rstrip(os.sep) + os.sep)

    def remove_tree(self, absolute: str, really: Callable[[str], None]) -> None:
        """Remove a folder with all that is in it."""
        if self.is_folder(absolute):
            self.make(absolute)
            self.hide(absolute)  # first: what lies in the scratch folder is all that there is to remove
        elif self.is_there(absolute):
            self.written(absolute)
        really(self.root + absolute)
        self.forget_links()

    # -- folders ---------------------------------------------------------------------------------------

    def layers(self, absolute: str) -> list[str]:
        """The folders that make up a folder: the person's, and the scratch folder's over it."""
        inside = self.root + absolute
        if not self.exists(inside) or self.is_removed(absolute) or not stat.S_ISDIR(self.lstat(inside).st_mode):
            return [self.seen(absolute)]
        return [absolute, inside] if self.is_theirs(absolute) else [inside]

    def shows(self, layer: str, name: str) -> bool:
        """Whether an entry of a layer is seen; one of the person's may have been removed."""
        return layer.startswith(self.root) or os.path.join(layer, name) not in self.removed

    def names(self, absolute: str) -> list[str]:
        """Return the entries of a folder as the script sees them."""
        found = (name for layer in self.layers(absolute) for name in self.listdir(layer) if self.shows(layer, name))
        return list(dict.fromkeys(found))
