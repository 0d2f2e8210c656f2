"""Render HTML pages from templates that escape all text, and write them atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hasten import files
from hasten.report import words


def environment(*folders: Path) -> Environment:
    """Return a Jinja environment that escapes every value and replaces its control characters.

    Args:
        folders: Folders with further templates, beside those shared by every page.
    """
    return Environment(
        loader=FileSystemLoader([Path(__file__).with_name("templates"), *folders]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
    )


def _cleaned(value: Any) -> Any:
    """Clean a text on its way into a page. Markup passes unchanged."""
    return words.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def write_whole(text: str, path: Path) -> None:
    """Write a page atomically.

    Raises:
        HastenError: The folder cannot be written to, or the file exists and is not a page of hasten's.
    """
    files.write_own(path, text, "the report", files.is_page)
