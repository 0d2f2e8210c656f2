"""Makes HTML pages: templates in which all text is escaped, and a file written whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hasten import files
from hasten.report import words


def environment(*folders: Path) -> Environment:
    """Return a Jinja environment in which every value is escaped, and cleaned of what could break the page.

    Args:
        folders: Where templates lie beside those of every page.
    """
    return Environment(
        loader=FileSystemLoader([Path(__file__).with_name("templates"), *folders]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


def _shown(value: Any) -> Any:
    return words.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def write_whole(text: str, path: Path) -> None:
    """Write a page, whole or not at all.

    Raises:
        HastenError: The folder cannot be written to, or the file holds something else.
    """
    files.write_own(path, text, "the report", files.is_page)
