"""Files of Python: finding them, reading them, and saying what is wrong with those that cannot be read."""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from hasten.doctor.source.script import Script

SKIPPED = frozenset([
    ".git", ".hg", ".svn", ".venv", "venv", "env", ".env", "build", "dist", "node_modules", "__pycache__",
    "site-packages", ".tox", ".nox", ".eggs", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints",
])  # fmt: skip
TOO_LARGE = 4_000_000
# What a file must import for any rule to have something to say.
_IMPORTS = re.compile(
    r"^\s*(from|import)\s[^#\n]*\b(torch|lightning|pytorch_lightning|hasten|accelerate|transformers|timm)\b",
    re.MULTILINE,
)


class UnreadableError(Exception):
    """A file that could not be read or parsed. `line` is 0 where there is none."""

    def __init__(self, path: Path, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.message = message
        self.line = line


@dataclass(frozen=True)
class Text:
    """A file's text.

    Attributes:
        path: Where it is.
        text: Decoded; newlines as they are in the file.
        encoding: By its coding cookie or byte order mark.
    """

    path: Path
    text: str
    encoding: str

    def bytes_of(self, text: str) -> bytes:
        """Another text, encoded as this file is.

        Raises:
            UnicodeEncodeError: The encoding lacks a character.
        """
        return text.encode(self.encoding)


def python_files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files that these paths name, folders walked in order, each once; what does not exist is given as it is."""
    seen: set[str] = set()
    for path in paths:
        for found in _below(path) if path.is_dir() else [path]:
            real = os.path.realpath(found)
            if real not in seen:
                seen.add(real)
                yield found


def _below(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # said when it is read
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in SKIPPED and not (path / "pyvenv.cfg").exists():
                yield from _below(path)
        elif entry.name.endswith(".py") and entry.is_file():
            yield path


def read_text(path: Path) -> Text:
    """Read a file of Python.

    Raises:
        UnreadableError: It cannot be read as one.
    """
    if path.suffix == ".ipynb":
        raise UnreadableError(
            path, "notebooks are not supported: export it as a script (jupyter nbconvert --to script)"
        )
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UnreadableError(path, "not a regular file")
        raw = path.read_bytes()
    except OSError as error:
        raise UnreadableError(path, f"cannot be read: {error.strerror}") from None
    if len(raw) > TOO_LARGE:
        raise UnreadableError(path, f"larger than {TOO_LARGE // 1_000_000} MB: not looked at")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise UnreadableError(path, f"cannot be decoded: {error}") from None
    if "\0" in text:
        raise UnreadableError(path, "holds null bytes: not Python")
    return Text(path, text, encoding)


def parse(text: Text) -> Script | None:
    """The file as the rules see it; None where it has nothing to do with training in torch.

    Raises:
        UnreadableError: It is not Python.
    """
    _compiles(text)  # Python says best what is wrong, and knows how deep is too deep
    if not _IMPORTS.search(text.text):
        return None
    try:
        module = cst.parse_module(text.text)
    except cst.ParserSyntaxError as error:
        raise UnreadableError(text.path, f"syntax error: {error.message}", error.raw_line) from None
    except (RecursionError, ValueError) as error:
        raise UnreadableError(text.path, f"cannot be parsed: {error}") from None
    if module.code != text.text:
        raise UnreadableError(text.path, "cannot be parsed without loss: not looked at")
    return Script(module)


def _compiles(text: Text) -> None:
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text.text)
    except SyntaxError as error:
        raise UnreadableError(text.path, f"syntax error: {error.msg}", error.lineno or 0) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(text.path, f"cannot be parsed: {error}") from None
