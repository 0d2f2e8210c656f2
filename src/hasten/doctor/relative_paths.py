"""Paths as a reader of another machine can use them: relative to the working folder, or to where packages lie."""

from __future__ import annotations

import dataclasses
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hasten.evidence.libraries import folders_of_packages

Plain = TypeVar("Plain")


def with_relative_paths(data: Plain) -> Plain:
    """Return plain data (dataclasses, dicts, sequences) in which texts name files relative to the working folder.

    A file that is not below it keeps its path; one of a library is named from the package on: `torch/nn/modules.py:3`.
    """
    return _changed(data, _folders(str(Path.cwd())))  # type: ignore[no-any-return]


@cache
def _folders(here: str) -> re.Pattern[str]:
    """Return what is cut off: these folders where a path begins with them, and not in the middle of another."""
    folders = {here, os.path.realpath(here), *folders_of_packages()} - {os.sep}
    longest_first = sorted((re.escape(folder + os.sep) for folder in folders), key=len, reverse=True)
    return re.compile(rf"(?<![\w./~-])(?:{'|'.join(longest_first)})")


def _changed(data: Any, folders: re.Pattern[str]) -> Any:
    if isinstance(data, str):
        return folders.sub("", data) if os.sep in data else data
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        values = {field.name: getattr(data, field.name) for field in dataclasses.fields(data) if field.init}
        changed = {name: _changed(value, folders) for name, value in values.items()}
        return dataclasses.replace(data, **{name: new for name, new in changed.items() if new is not values[name]})
    if isinstance(data, dict):
        return {_changed(key, folders): _changed(value, folders) for key, value in data.items()}
    if isinstance(data, list | tuple) and not (data and isinstance(data[0], int | float)):
        return type(data)(_changed(item, folders) for item in data)
    return data
