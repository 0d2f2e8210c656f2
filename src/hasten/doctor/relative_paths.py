"""Paths as a reader of another machine can use them: relative to the working folder, or to where packages lie."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import TypeVar

from hasten.evidence.libraries import folders_of_packages
from hasten.evidence.plain import with_texts

Plain = TypeVar("Plain")


def with_relative_paths(data: Plain) -> Plain:
    """Return plain data (dataclasses, dicts, sequences) in which texts name files relative to the working folder.

    A file that is not below it keeps its path; one of a library is named from the package on: `torch/nn/modules.py:3`.
    """
    folders = _folders(str(Path.cwd()))
    return with_texts(data, lambda text: folders.sub("", text) if os.sep in text else text)


@cache
def _folders(here: str) -> re.Pattern[str]:
    """Return what is cut off: these folders where a path begins with them, and not in the middle of another."""
    folders = {here, os.path.realpath(here), *folders_of_packages()} - {os.sep}
    longest_first = sorted((re.escape(folder + os.sep) for folder in folders), key=len, reverse=True)
    return re.compile(rf"(?<![\w./~-])(?:{'|'.join(longest_first)})")
