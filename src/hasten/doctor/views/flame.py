"""A flame graph from elsewhere goes into a page only if it does nothing but draw."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from markupsafe import Markup

_DRAWS = frozenset(
    ("svg", "g", "rect", "text", "tspan", "title", "desc", "path", "polygon", "polyline", "line", "circle", "defs")
)
_POINTS_ELSEWHERE = re.compile(r"url\s*\(|javascript:|&", re.IGNORECASE)


def checked(flame: str) -> tuple[Markup, str]:
    """The SVG as it goes into a page, or why it does not; both empty where there is none."""
    flame = flame.strip()
    if not flame:
        return Markup(), ""
    found = _Drawing(flame).found
    if not flame.startswith("<svg") or not flame.endswith("</svg>"):
        found.add("what is not one <svg>")
    if found:
        return Markup(), f"it holds more than a drawing: {', '.join(sorted(found))}"
    return Markup(flame), ""


class _Drawing(HTMLParser):
    """Says what in an SVG could do more than draw."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Only elements that draw, without links, handlers and addresses."""
        if tag not in _DRAWS:
            self.found.add(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on") or "href" in name or _POINTS_ELSEWHERE.search(value or ""):
                self.found.add(name)

    def handle_comment(self, data: str) -> None:
        """Browsers may end comments elsewhere than this parser does."""
        self.found.add("a comment")

    def handle_decl(self, decl: str) -> None:
        """A document type."""
        self.found.add(f"<!{decl[:20]}>")

    def unknown_decl(self, data: str) -> None:
        """CDATA and the like."""
        self.found.add(f"<![{data[:20]}]>")

    def handle_pi(self, data: str) -> None:
        """A processing instruction."""
        self.found.add(f"<?{data[:20]}>")
