"""Make paths readable on another machine: relative to the working folder, or to the folder of installed packages."""

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
    """Return plain data (dataclasses, dicts, sequences) with relative paths in all its strings.

    Files below the working folder are named relative to it, a library's from the package on:
    `torch/nn/modules.py:3`. Other files keep their paths.
    """
    folders = _folders(str(Path.cwd()))
    return with_texts(data, lambda text: folders.sub("", text) if os.sep in text else text)


@cache
def _folders(working_folder: str) -> re.Pattern[str]:
    """Return a pattern of the folders to cut off, which matches only where a path begins."""
    folders = {working_folder, os.path.realpath(working_folder), *folders_of_packages()} - {os.sep}
    longest_first = sorted((re.escape(folder + os.sep) for folder in folders), key=len, reverse=True)
    return re.compile(rf"(?<![\w./~-])(?:{'|'.join(longest_first)})")
