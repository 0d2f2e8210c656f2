"""`# hasten: ignore[name]`: where findings are not wanted."""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass, field

_COMMENT = re.compile(r"#\s*hasten:\s*(ignore-file|ignore)\s*(?:\[([^\]]*)\])?")


@dataclass
class Ignores:
    """The ignore comments of one file.

    Attributes:
        by_line: Line -> names; an empty set: all.
        whole: An `ignore-file` was seen.
        used: Lines whose comment silenced something.
    """

    by_line: dict[int, frozenset[str]] = field(default_factory=dict)
    whole: bool = False
    used: set[int] = field(default_factory=set)

    def covers(self, name: str, lines: tuple[int, ...]) -> bool:
        """Whether a finding that stands on one of these lines is not wanted."""
        if self.whole:
            return True
        hit = [line for line in lines if line in self.by_line and name in (self.by_line[line] or {name})]
        self.used.update(hit)
        return bool(hit)

    @property
    def unused(self) -> list[int]:
        """Lines whose comment silenced nothing."""
        return sorted(self.by_line.keys() - self.used)


def ignores_in(text: str) -> Ignores:
    """Read the comments of a file: only real ones, not those in strings."""
    found = Ignores()
    if "hasten:" not in text:
        return found
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (match := _COMMENT.search(token.string)):
                if match[1] == "ignore-file":
                    found.whole = True
                else:
                    names = frozenset(name.strip() for name in (match[2] or "").split(",") if name.strip())
                    found.by_line[token.start[0]] = names
    except (tokenize.TokenError, SyntaxError):
        return found  # libcst reads a little more than this Python does
    return found
