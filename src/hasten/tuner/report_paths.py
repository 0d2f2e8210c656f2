"""Shorten paths for reports: relative to the working folder, so that a report reveals nothing about the machine."""

from __future__ import annotations

import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import TypeVar

from hasten.evidence.plain import with_texts

Plain = TypeVar("Plain")

_BOUNDARY = r"(?:(?<![\w.~/-])|(?<=://))"  # not in the middle of another path, but after "file://"
_SCRATCH = r"hasten-(?:[a-z]+-)?[a-z0-9_]{8}(?![\w-])"  # names that `tempfile` makes from hasten's prefixes


def shorten(text: str) -> str:
    """Return text without the machine's own paths.

    The working folder is removed ("/home/ann/job/train.py" -> "train.py"), the home folder becomes "~", and hasten's
    temporary folder "<scratch>". Other paths stay.
    """
    if "/" not in text:
        return text
    for pattern, short in _patterns(_working_folders(), _home(), tempfile.gettempdir()):
        text = pattern.sub(short, text)
    return text


def without_paths(value: Plain) -> Plain:
    """Return plain data (dataclasses, dicts, lists, tuples) with every text in it shortened."""
    return with_texts(value, shorten)


@cache
def _patterns(folders: tuple[str, ...], home: str, temporary: str) -> list[tuple[re.Pattern[str], str]]:
    """Return (pattern, replacement) pairs in order: working folder first, unless the scratch folder is inside it."""
    working = [pair for folder in folders for pair in _folder(folder, "", ".")]
    scratch = [(re.compile(_BOUNDARY + re.escape(temporary) + "/" + _SCRATCH), "<scratch>")]
    inside = any(temporary.startswith(f"{folder}/") for folder in folders)
    return [*(scratch + working if inside else working + scratch), *(_folder(home, "~/", "~") if home else [])]


def _folder(folder: str, inside: str, itself: str) -> list[tuple[re.Pattern[str], str]]:
    """Return the replacements for paths inside a folder, and for the folder itself."""
    pattern = _BOUNDARY + re.escape(folder)
    return [
        (re.compile(pattern + r"/+(?=[^\s/'\")\],:;])"), inside),
        (re.compile(pattern + r"/?(?![\w/-])(?!\.\w)"), itself),
    ]


def _working_folders() -> tuple[str, ...]:
    """Return the working folder, also under the name by which symbolic links led there (`PWD`)."""
    try:
        folder = str(Path.cwd())
    except OSError:  # the folder was deleted
        return ()
    named = os.environ.get("PWD", "")
    linked = [named] if named != folder and Path(named).is_absolute() and _same_folder(named, folder) else []
    return tuple(path.rstrip("/") for path in (*linked, folder) if path.rstrip("/"))


def _home() -> str:
    try:
        home = str(Path.home())
    except RuntimeError:  # a user without a home folder
        return ""
    return home.rstrip("/") if Path(home).is_absolute() else ""


def _same_folder(first: str, second: str) -> bool:
    try:
        return Path(first).samefile(second)
    except OSError:
        return False
