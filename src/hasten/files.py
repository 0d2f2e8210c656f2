"""Files: written whole or not at all, and never in the place of what is not hasten's. No torch."""

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
"""Names of the files that `make_beside` makes."""

_ELSE = "name another file, or move that one away"
_PATIENCE = 5.0  # seconds for the next bytes of a pipe
_MOST = 1 << 31  # bytes of a file that is read into memory


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, durable: bool = True) -> None:
    """Write a file whole or not at all: readers see the old content or the new, also after a crash.

    The new file is made beside the old one under a name that nobody can guess, and no link is followed to it. It
    keeps the old one's mode and, where the system allows, its owner. A link to a file stays a link. A pipe or a device
    is written to as it is.

    Args:
        path: The file.
        content: What it will hold; text as UTF-8.
        durable: Wait until the disk has it.

    Raises:
        OSError: It cannot be written; what was there is still there.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    old = _stat(path)
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
    """Open a new file that takes the place of `path` when the block ends, and is removed if the block raises.

    As `write_whole`, for what is written in parts.

    Raises:
        OSError: It cannot be written; what was there is still there.
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
            os.replace(temporary, real)  # before it is closed, which gives up the lock
        if durable:
            sync_folder(os.path.dirname(real))
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_in_place(path: str | os.PathLike[str], content: bytes) -> None:
    """Change what a file holds and nothing else of it: owner, mode, attributes and its other names stay.

    Where a new file in its place would have all that too, it is written whole. Else (hard links, attributes, another
    owner) the file itself is written, its room on the disk taken beforehand, and put back as it was if that fails.

    Raises:
        OSError: It cannot be written; it is as it was.
    """
    old = os.stat(path)
    if old.st_nlink == 1 and old.st_uid == os.geteuid() and old.st_gid == os.getegid() and not os.listxattr(path):
        write_whole(path, content)
        return
    with open(path, "rb+", buffering=0) as file:
        before = file.readall()
        try:
            os.posix_fallocate(file.fileno(), 0, max(len(content), len(before), 1))
            _overwrite(file.fileno(), content)
        except BaseException:
            _overwrite(file.fileno(), before)
            raise


def _overwrite(fd: int, content: bytes) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], done)
    os.ftruncate(fd, len(content))
    os.fsync(fd)


def check_target(path: Path, what: str, recognise: Recognise | None, fix: str = _ELSE) -> None:
    """Check, before the work, that a file can be written after it, and is not somebody else's.

    Args:
        path: The file; it may be missing, empty, a pipe or a device.
        what: What it will be, for messages: "the evidence".
        recognise: Whether a file's content is a former one of the same kind; None: only look whether it can be written.
        fix: What the person can do.

    Raises:
        HastenError: It cannot be written, or holds something else.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise HastenError(f"cannot write {what} {path}: it is a folder", fix)
    if not folder.is_dir():
        raise HastenError(f"cannot write {what} {path}: no such folder {folder}", fix)
    old = _stat(path)
    if old is not None and not stat.S_ISREG(old.st_mode):
        return
    try:
        temporary, fd = make_beside(os.path.realpath(path))
        os.close(fd)
        Path(temporary).unlink()
    except OSError as error:
        raise HastenError(f"cannot write {what} {path}: {error.strerror}", fix) from None
    if recognise is not None:
        refuse_others(path, what, recognise, fix)


def refuse_others(path: Path, what: str, recognise: Recognise, fix: str = _ELSE) -> None:
    """Refuse to write to a file that holds something other than a former one of the same kind.

    Raises:
        HastenError: It does, or cannot be read.
    """
    old = _stat(path)
    if old is None or not stat.S_ISREG(old.st_mode) or not old.st_size:
        return
    try:
        content = read_bytes(path)
    except OSError as error:
        raise HastenError(f"{path} is there and cannot be read ({error.strerror}): left as it is", fix) from None
    if not recognise(content):
        raise HastenError(f"{path} holds something other than {what} of an earlier run: left as it is", fix)


def write_own(path: Path, content: str | bytes, what: str, recognise: Recognise, fix: str = _ELSE) -> None:
    """Write a file whole, in the place of nothing but a former one of the same kind.

    Raises:
        HastenError: It holds something else, or cannot be written.
    """
    refuse_others(path, what, recognise, fix)
    try:
        write_whole(path, content)
    except OSError as error:
        raise HastenError(f"cannot write {what} {path}: {error.strerror or error}", fix) from None


def json_of(schema: str) -> Recognise:
    """Return what recognises JSON objects whose field `schema` is this one, of any version."""
    kind = schema.partition("/")[0]

    def recognise(content: bytes) -> bool:
        try:
            data = parse_json(content)
        except ValueError:
            return False
        own = data.get("schema") if isinstance(data, dict) else None
        return isinstance(own, str) and own.partition("/")[0] == kind

    return recognise


def is_page(content: bytes) -> bool:
    """Whether this is an HTML page that hasten wrote."""
    return re.search(rb'<meta name="generator" content="hasten\b', content[:4096]) is not None


def is_trace(content: bytes) -> bool:
    """Whether this is a Chrome trace that hasten wrote, packed or not."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = zlib.decompress(content, wbits=31)
        except zlib.error:
            return False
    return b'"traceEvents"' in content and b'"parts of steps"' in content


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a file that a person named; a pipe that nobody writes to is an error after five seconds.

    Raises:
        OSError: It cannot be read, or is no file.
    """
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
    """Parse JSON that may come from anywhere.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or holds numbers beyond what a number here can be.
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
    """All that a pipe gives until its writers are gone."""
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
    """Return what tells this version of a file from a later one; "" where there is none."""
    found = _stat(path)
    return "" if found is None else f"{found.st_ino} {found.st_mtime_ns}"


def _stat(path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def make_beside(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Make an empty file in the folder of `path`, under a name of its own; return its name and descriptor.

    The file is locked for as long as the descriptor is open: one without a lock was left by a writer that was killed,
    and `remove_left_behind` removes it.
    """
    while True:
        temporary = os.path.join(os.path.dirname(path), f".hasten-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Where there are no locks, nobody sweeps this file; where a sweep has it, it is as good as gone.
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                return temporary, fd
        if os.fstat(fd).st_nlink:
            return temporary, fd
        os.close(fd)


def set_aside(path: Path, name: Path) -> None:
    """Keep a file of an earlier run under another name, which nothing has.

    Raises:
        FileNotFoundError: There is no such file (any more).
    """
    path.rename(name)


def remove_left_behind(path: str | os.PathLike[str]) -> bool:
    """Remove a file that `make_beside` made, if its writer was killed; return whether it is gone by that."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or somebody else's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except OSError:  # its writer lives, or it is not ours to remove
        return False
    finally:
        os.close(fd)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Wait until the disk has the names in a folder, so that a rename in it outlives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and need not
            raise
    finally:
        os.close(fd)


def _keep_owner(fd: int, old: os.stat_result) -> None:
    """Give a new file the mode of the old one and, as far as the system lets us, its owner."""
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):  # only root may; the person who writes owns it then
            os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))
