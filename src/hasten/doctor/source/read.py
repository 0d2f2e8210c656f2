"""Find, read and parse Python files, and report why a file cannot be read."""

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
# Imports without which a file is not parsed: no rule has anything to report in it.
_IMPORTS = re.compile(
    r"^\s*(from|import)\s[^#\n]*\b(torch|lightning|pytorch_lightning|hasten|accelerate|transformers|timm)\b",
    re.MULTILINE,
)


class UnreadableError(Exception):
    """A file cannot be read or parsed. `line` is the line of the error, 0 if the error has none."""

    def __init__(self, path: Path, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.message = message
        self.line = line


@dataclass(frozen=True)
class Text:
    """A file's text.

    Attributes:
        path: The file.
        text: The decoded text, with the file's own newlines.
        encoding: The encoding that its coding cookie or byte order mark names; UTF-8 without either.
    """

    path: Path
    text: str
    encoding: str

    def bytes_of(self, text: str) -> bytes:
        """Return another text encoded like this file, with a byte order mark if the file has one.

        Raises:
            UnicodeEncodeError: The encoding lacks a character.
        """
        return text.encode(self.encoding)


def python_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that paths name and the Python files in folders that they name, in order of name.

    Each file is yielded once, also if several paths or links lead to it. A path that does not exist is yielded too, so
    that reading it reports the error.
    """
    real_paths: set[str] = set()
    for path in paths:
        for file in _python_files_in(path) if path.is_dir() else [path]:
            real_path = os.path.realpath(file)
            if real_path not in real_paths:
                real_paths.add(real_path)
                yield file


def _python_files_in(folder: Path) -> Iterator[Path]:
    """Yield the `.py` files below a folder, except in virtual environments, build folders and linked folders."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # reading it fails and reports why
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):  # a link to a folder above would never end
            if entry.name not in SKIPPED and not (path / "pyvenv.cfg").exists():
                yield from _python_files_in(path)
        elif entry.name.endswith(".py") and entry.is_file():
            yield path


def read_text(path: Path) -> Text:
    """Read and decode a Python file.

    Raises:
        UnreadableError: It is a notebook, not a regular file, too large, not readable, or cannot be decoded.
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
    """Return the parsed file; None if it imports neither torch nor a library that trains with it.

    Raises:
        UnreadableError: It is not valid Python.
    """
    _check_syntax(text)  # before libcst: Python has the better error messages, and refuses code that is nested too deep
    if not _IMPORTS.search(text.text):
        return None
    try:
        module = cst.parse_module(text.text)
    except cst.ParserSyntaxError as error:
        raise UnreadableError(text.path, f"syntax error: {error.message}", error.raw_line) from None
    except (RecursionError, ValueError) as error:
        raise UnreadableError(text.path, f"cannot be parsed: {error}") from None
    if module.code != text.text:  # a fix writes the whole tree back, and would change unrelated code
        raise UnreadableError(text.path, "cannot be parsed without loss: not looked at")
    return Script(module)


def _check_syntax(text: Text) -> None:
    """Raise `UnreadableError` if Python cannot parse the text."""
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as "invalid escape sequence" in the user's strings
            ast.parse(text.text)
    except SyntaxError as error:
        raise UnreadableError(text.path, f"syntax error: {error.msg}", error.lineno or 0) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(text.path, f"cannot be parsed: {error}") from None
