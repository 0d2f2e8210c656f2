"""The lines of a script around the place of a finding."""

from __future__ import annotations

import tokenize
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hasten.evidence.libraries import folders_of_packages
from hasten.report import words

_AROUND = 3
_LARGEST = 2 << 20
_WIDEST = 160


@dataclass(frozen=True)
class Excerpt:
    """Numbered lines; `marked` is the number of the one that matters.

    `changed`: the file was written after the run, so the line may be another one.
    """

    lines: tuple[tuple[int, str], ...]
    marked: int
    changed: bool = False


def excerpt(file: str, line: int, created: str = "") -> Excerpt | None:
    """The lines around `file:line`, if that is a Python file that can be read and has such a line.

    Args:
        file: As a finding names it; nothing but `.py` files is opened, since evidence may come from elsewhere.
        line: From 1.
        created: ISO 8601 time of the diagnosis.
    """
    if not file or line < 1 or "\0" in file:
        return None
    path = Path(file)
    if not path.is_absolute() and not path.is_file():  # a library's, which is named from its package on
        among = (Path(folder, file) for folder in folders_of_packages())
        path = next((one for one in among if one.is_file()), path)
    try:
        if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        with tokenize.open(path) as opened:  # in the encoding that the file itself names
            lines = opened.read().split("\n")
        changed = bool(created) and path.stat().st_mtime > datetime.fromisoformat(created).timestamp()
    except (OSError, SyntaxError, ValueError):  # not readable, another encoding than it says, or no such time
        return None
    if line > len(lines):
        return None
    first = max(1, line - _AROUND)
    shown = [(number, _cut(words.code(text))) for number, text in enumerate(lines[first - 1 : line + _AROUND], first)]
    while shown and not shown[-1][1] and shown[-1][0] != line:
        shown.pop()
    return Excerpt(tuple(shown), line, changed)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
