"""Read ignore comments: `# hasten: ignore`, `# hasten: ignore[name, name]` and `# hasten: ignore-file`."""

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
        by_line: Line of each comment -> the rules that it silences; an empty set means all rules.
        whole_file: The file has an `ignore-file` comment.
        used: Lines whose comment has silenced a finding.
    """

    by_line: dict[int, frozenset[str]] = field(default_factory=dict)
    whole_file: bool = False
    used: set[int] = field(default_factory=set)

    def covers(self, name: str, lines: tuple[int, ...]) -> bool:
        """Return whether a comment on one of these lines silences a rule, and mark such comments as used."""
        if self.whole_file:
            return True
        matching = [line for line in lines if line in self.by_line and name in (self.by_line[line] or {name})]
        self.used.update(matching)
        return bool(matching)

    @property
    def unused(self) -> list[int]:
        """Lines whose comment has silenced nothing so far."""
        return sorted(self.by_line.keys() - self.used)


def ignores_in(text: str) -> Ignores:
    """Return the ignore comments of a file. Text in strings does not count."""
    ignores = Ignores()
    if "hasten:" not in text:
        return ignores
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (match := _COMMENT.search(token.string)):
                if match[1] == "ignore-file":
                    ignores.whole_file = True
                else:
                    names = frozenset(name.strip() for name in (match[2] or "").split(",") if name.strip())
                    ignores.by_line[token.start[0]] = names
    except (tokenize.TokenError, SyntaxError):
        return ignores  # keep those read so far: libcst parses some files that this version of Python does not
    return ignores
