"""Paths as a report names them: relative to the working folder, so that it says nothing of whose machine it was."""

from __future__ import annotations

import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import TypeVar

from hasten.evidence.plain import with_texts

Plain = TypeVar("Plain")

_BEFORE = r"(?:(?<![\w.~/-])|(?<=://))"  # not in the middle of another path, but behind "file://"
_SCRATCH = r"hasten-(?:[a-z]+-)?[a-z0-9_]{8}(?![\w-])"  # what `tempfile` makes of the prefixes that hasten gives


def shorten(text: str) -> str:
    """Return text without the machine's own paths.

    The working folder goes ("/home/ann/job/train.py" -> "train.py"), the home becomes "~", and hasten's temporary
    folder "<scratch>". Other paths stay.
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
    """Return replacements in order; the working folder first, unless the temporary one lies inside it."""
    working = [pair for folder in folders for pair in _folder(folder, "", ".")]
    scratch = [(re.compile(_BEFORE + re.escape(temporary) + "/" + _SCRATCH), "<scratch>")]
    inside = any(temporary.startswith(f"{folder}/") for folder in folders)
    return [*(scratch + working if inside else working + scratch), *(_folder(home, "~/", "~") if home else [])]


def _folder(folder: str, inside: str, itself: str) -> list[tuple[re.Pattern[str], str]]:
    """How paths inside a folder are replaced, and how the folder itself is."""
    start = _BEFORE + re.escape(folder)
    return [
        (re.compile(start + r"/+(?=[^\s/'\")\],:;])"), inside),
        (re.compile(start + r"/?(?![\w/-])(?!\.\w)"), itself),
    ]


def _working_folders() -> tuple[str, ...]:
    """The working folder, also by the links that led there."""
    try:
        folder = str(Path.cwd())
    except OSError:  # it was deleted meanwhile
        return ()
    named = os.environ.get("PWD", "")
    linked = [named] if named != folder and Path(named).is_absolute() and _same(named, folder) else []
    return tuple(each.rstrip("/") for each in (*linked, folder) if each.rstrip("/"))


def _home() -> str:
    try:
        home = str(Path.home())
    except RuntimeError:  # a user without one
        return ""
    return home.rstrip("/") if Path(home).is_absolute() else ""


def _same(one: str, other: str) -> bool:
    try:
        return Path(one).samefile(other)
    except OSError:
        return False
