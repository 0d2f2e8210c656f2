"""Write files atomically, never over a file that hasten did not write, and read files of unknown origin. No torch.

A new file is made under a temporary name in the target's folder and renamed over the target, so readers and crashes see
the old content or the new. `check_target` and `write_own` refuse to replace a file whose content is not recognised as
an earlier output of the same kind. The reading functions bound time, size and nesting.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import select
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hasten.errors import HastenError

Recognise = Callable[[bytes], bool]

TEMPORARY = re.compile(r"\.hasten-\d+-[0-9a-f]{16}\.tmp")
"""Pattern of the names of temporary files that `make_beside` makes."""

_FIX = "name another file, or move that one away"
_PATIENCE = 5.0  # seconds to wait for a pipe's next bytes
_MOST = 1 << 31  # bytes of the largest file that is read into memory


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, durable: bool = True) -> None:
    """Write a file atomically: readers see the old content or the new, also after a crash.

    The temporary file's name is random, and it is created without following links. The new file keeps the old file's
    mode and, if the system allows, its owner. A symbolic link is kept, and its target is replaced. A pipe or a device
    is written to directly.

    Args:
        path: The file.
        content: The new content; text is encoded as UTF-8.
        durable: Whether to wait until the file is on the disk (fsync).

    Raises:
        OSError: The file cannot be written; its old content is unchanged.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    old = _stat(path)
    # `/dev/stdout` may be redirected to a regular file, which must be appended to, not replaced: `--out /dev/stdout`.
    if (old is not None and not stat.S_ISREG(old.st_mode)) or os.fspath(path).startswith(("/dev/fd/", "/dev/std")):
        # Opening a pipe that nobody reads would wait for a reader, and a training with it.
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(fd, True)
        with open(fd, "wb") as stream:
            stream.write(data)
        return
    with replacing(path, durable=durable) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends, and is removed if the block raises.

    Like `write_whole`, for content that is written in parts.

    Raises:
        OSError: The file cannot be written; its old content is unchanged.
    """
    real = os.path.realpath(path)
    old = _stat(real)
    temporary, fd = make_beside(real)
    try:
        with open(fd, "wb") as file:
            if old is not None:
                _keep_owner(fd, old)
            yield file
            file.flush()
            if durable:
                os.fsync(fd)
            # Rename before the file is closed: closing drops the lock, and `remove_left_behind` in another process
            # would take the temporary file for an abandoned one.
            os.replace(temporary, real)
        if durable:
            sync_folder(os.path.dirname(real))
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_in_place(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file's content and keep everything else: owner, mode, extended attributes and hard links.

    The file is written atomically by `write_whole` if that keeps all of these. Otherwise (hard links, extended
    attributes, another owner) it is overwritten in place, with disk space allocated first, and its old content is
    restored if writing fails.

    Raises:
        OSError: The file cannot be written; its old content is unchanged.
    """
    old = os.stat(path)
    if old.st_nlink == 1 and old.st_uid == os.geteuid() and old.st_gid == os.getegid() and not os.listxattr(path):
        write_whole(path, content)
        return
    with open(path, "rb+", buffering=0) as file:
        old_content = file.readall()
        try:
            os.posix_fallocate(file.fileno(), 0, max(len(content), len(old_content), 1))
            _overwrite(file.fileno(), content)
        except BaseException:
            _overwrite(file.fileno(), old_content)
            raise


def _overwrite(fd: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(fd, content[written:], written)
    os.ftruncate(fd, len(content))
    os.fsync(fd)


def check_target(path: Path, name: str, recognise: Recognise | None, fix: str = _FIX) -> None:
    """Check, before a long run, that its output file can be written afterwards and replaces nobody else's file.

    Args:
        path: The file; it may be missing, empty, a pipe or a device.
        name: The output's name in messages, such as "the evidence".
        recognise: Returns whether some content is an earlier output of the same kind; None to check only whether the
            file can be written.
        fix: What the user can do about it.

    Raises:
        HastenError: The file cannot be written, or holds other content.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise HastenError(f"cannot write {name} {path}: it is a folder", fix)
    if not folder.is_dir():
        raise HastenError(f"cannot write {name} {path}: no such folder {folder}", fix)
    old = _stat(path)
    if old is not None and not stat.S_ISREG(old.st_mode):
        return
    try:
        temporary, fd = make_beside(os.path.realpath(path))
        os.close(fd)
        Path(temporary).unlink()
    except OSError as error:
        raise HastenError(f"cannot write {name} {path}: {error.strerror}", fix) from None
    if recognise is not None:
        refuse_others(path, name, recognise, fix)


def refuse_others(path: Path, name: str, recognise: Recognise, fix: str = _FIX) -> None:
    """Refuse to replace a file unless it is missing, empty, no regular file, or an earlier output of the same kind.

    Raises:
        HastenError: The file holds other content, or cannot be read.
    """
    old = _stat(path)
    if old is None or not stat.S_ISREG(old.st_mode) or not old.st_size:
        return
    try:
        content = read_bytes(path)
    except OSError as error:
        raise HastenError(f"{path} is there and cannot be read ({error.strerror}): left as it is", fix) from None
    if not recognise(content):
        raise HastenError(f"{path} holds something other than {name} of an earlier run: left as it is", fix)


def write_own(path: Path, content: str | bytes, name: str, recognise: Recognise, fix: str = _FIX) -> None:
    """Write a file atomically, replacing nothing but an earlier output of the same kind.

    Raises:
        HastenError: The file holds other content, or cannot be written.
    """
    refuse_others(path, name, recognise, fix)
    try:
        write_whole(path, content)
    except OSError as error:
        raise HastenError(f"cannot write {name} {path}: {error.strerror or error}", fix) from None


def json_of(schema: str) -> Recognise:
    """Return a function that recognises JSON objects with this `schema` field, in any version ("name/version")."""
    kind = schema.partition("/")[0]

    def recognise(content: bytes) -> bool:
        try:
            data = parse_json(content)
        except ValueError:
            return False
        schema_field = data.get("schema") if isinstance(data, dict) else None
        return isinstance(schema_field, str) and schema_field.partition("/")[0] == kind

    return recognise


def is_page(content: bytes) -> bool:
    """Return whether the content is an HTML page that hasten wrote."""
    return re.search(rb'<meta name="generator" content="hasten\b', content[:4096]) is not None


def is_trace(content: bytes) -> bool:
    """Return whether the content is a Chrome trace that hasten wrote, compressed by gzip or not."""
    if content[:2] == b"\x1f\x8b":  # gzip's magic number
        try:
            content = zlib.decompress(content, wbits=31)
        except zlib.error:
            return False
    return b'"traceEvents"' in content and b'"parts of steps"' in content


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a file that the user named; a pipe that stays silent for five seconds is an error.

    Raises:
        OSError: The file cannot be read, is too large, or is a folder, a device or a socket.
    """
    # Non-blocking: `open` of a named pipe without a writer would hang.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as stream:
        mode, size = os.fstat(fd).st_mode, os.fstat(fd).st_size
        if stat.S_ISFIFO(mode):
            return _from_pipe(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, "it is a folder")
        if not stat.S_ISREG(mode) and not os.path.samefile(path, os.devnull):
            raise OSError(22, "it is a device or a socket, not a file")
        if size > _MOST:
            raise OSError(27, f"it has {size:,} bytes, more than hasten reads")
        return stream.readall()


def parse_json(content: str | bytes) -> Any:
    """Parse JSON of unknown origin.

    Raises:
        ValueError: The text is not JSON (NaN and Infinity are not), is nested too deeply, or holds a number that is too
            large: a float that overflows, or an integer of more than 25 characters.
    """
    try:
        return json.loads(content, parse_float=_float, parse_int=_int, parse_constant=_not_a_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > 25:
        raise ValueError(f"the number {text[:20]}... is too large")
    return int(text)


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _from_pipe(fd: int) -> bytes:
    """Read a pipe until all of its writers have closed it."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    size, until = 0, time.monotonic() + _PATIENCE
    while size <= _MOST:
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError(110, f"it is a pipe from which nothing came for {_PATIENCE:.0f} s")
        part = os.read(fd, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size, until = size + len(part), time.monotonic() + _PATIENCE
    raise OSError(27, "it gives more bytes than hasten reads")


def mark_of(path: Path) -> str:
    """Return a mark (inode and modification time) that differs once the file is rewritten; "" if there is no file."""
    status = _stat(path)
    return "" if status is None else f"{status.st_ino} {status.st_mtime_ns}"


def _stat(path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def make_beside(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Create an empty temporary file in the folder of `path`; return its name and descriptor.

    The file is locked while the descriptor is open. A temporary file without a lock was abandoned by a killed writer,
    and `remove_left_behind` removes it.
    """
    while True:
        temporary = os.path.join(os.path.dirname(path), f".hasten-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A file system without locks: `remove_left_behind` cannot lock the file either, so it leaves it alone.
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                return temporary, fd
        # Between `open` and `flock` another process may have taken the new file for an abandoned one and removed it.
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)


def set_aside(path: Path, name: Path) -> None:
    """Rename a file of an earlier run to a name that is not in use.

    Raises:
        FileNotFoundError: The file does not exist (any more).
    """
    path.rename(name)


def remove_left_behind(path: str | os.PathLike[str]) -> bool:
    """Remove a temporary file of `make_beside` if its writer was killed; return whether this call removed it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # already removed, or another user's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except OSError:  # its writer is alive and holds the lock, or we may not remove it
        return False
    finally:
        os.close(fd)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Wait until a folder's entries are on the disk, so that a rename in it survives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder, and need not
            raise
    finally:
        os.close(fd)


def _keep_owner(fd: int, old: os.stat_result) -> None:
    """Give a new file the old file's mode and, if the system allows, its owner."""
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):  # only root may change owners; otherwise the writing user owns the file
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))
