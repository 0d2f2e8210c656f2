"""Plan: technique name -> setting, in a TOML file that a person can read and edit. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.files import read_bytes, write_whole

if TYPE_CHECKING:
    from tomlkit.items import Table

Setting = bool | int | float | str | dict[str, bool | int | float | str]

VERSION = 1
DEFAULT_NAME = "hasten.toml"
_MOST_BYTES = 1 << 16  # of a plan file: tomllib takes minutes to parse a key of 50,000 dotted parts
_TABLES = ("hasten", "machine", "techniques")


@dataclass(frozen=True)
class Plan:
    """Which techniques to install, with their settings.

    Attributes:
        techniques: Technique name -> setting, in installation order.
        comments: Technique name -> why it was chosen and what it measured; written as a comment above the setting.
        made: How the plan was made (command, date, versions); free text by key.
        machine: The machine it was measured on (`device`, `cpu`, `cores`, `gpus`); empty if unknown.
        path: The file the plan was read from, if any.
        lines: Technique name -> line in that file, for messages.

    Example:
        >>> plan = Plan({"precision": "bf16-mixed", "channels_last": True})
        >>> plan.techniques["precision"]
        'bf16-mixed'
    """

    techniques: Mapping[str, Setting] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def without(self, name: str) -> Plan:
        """Return this plan without one technique."""
        remaining = {technique: setting for technique, setting in self.techniques.items() if technique != name}
        return Plan(remaining, self.comments, self.made, self.machine)

    def where(self, name: str = "") -> str:
        """Return the `file:line` of a technique, for messages; "the plan" if it was not read from a file."""
        if self.path is None:
            return "the plan"
        return f"{self.path}:{self.lines[name]}" if name in self.lines else str(self.path)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan file and check its structure; `hasten.techniques.check` checks names and settings.

        Raises:
            HastenError: The file is missing, unreadable, too large or not TOML, or has unknown tables; the message
                gives the line.
        """
        import tomllib

        path = Path(path)
        try:
            content = read_bytes(path)
            if len(content) > _MOST_BYTES:
                raise HastenError(f"{path} is no plan: it has {len(content):,} bytes", "name a plan with --plan FILE")
            text = content.decode("utf-8-sig")
        except FileNotFoundError:
            raise HastenError(
                f"no plan at {path}",
                "`hasten tune SCRIPT` makes one; `hasten run --auto SCRIPT` needs none, and --no-plan uses none",
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise HastenError(f"cannot read the plan {path}: {error}") from None
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # bad TOML; a number of 5000 digits; brackets nested 1000 deep
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise HastenError(f"{path} is not valid TOML: {why}", "correct that line, or tune again") from None
        return cls._checked(data, path, text)

    @classmethod
    def _checked(cls, data: dict[str, Any], path: Path, text: str) -> Plan:
        for key in data:
            if key not in _TABLES:
                hint = did_you_mean(key, _TABLES) or "a plan has [hasten], [machine] and [techniques]"
                raise HastenError(f"{path}:{_line_of(text, key)}: unknown part {key!r}", hint)
        for table in _TABLES:
            if not isinstance(data.get(table, {}), dict):
                raise HastenError(f"{path}:{_line_of(text, table)}: {table!r} must be a table, [{table}]")
        version = data.get("hasten", {}).get("version", VERSION)
        if version != VERSION:
            raise HastenError(
                f"{path}:{_line_of(text, 'version')}: plan of version {version!r}, this hasten reads {VERSION}",
                "tune again, or install the hasten that wrote it",
            )
        techniques = data.get("techniques", {})
        return cls(
            techniques=techniques,
            made={key: str(value) for key, value in data.get("hasten", {}).items() if key != "version"},
            machine=data.get("machine", {}),
            path=path,
            lines={name: _line_of(text, name, after="techniques") for name in techniques},
        )

    def write(self, path: str | Path) -> None:
        """Write the plan with its comments, atomically: a crash leaves the old file or the new one.

        Raises:
            HastenError: The folder cannot be written to.
        """
        path = Path(path)
        try:
            # The command line in `made` may hold bytes that are not UTF-8. Python keeps them as lone surrogates, which
            # `write_whole` writes as "?".
            write_whole(path, self.to_toml())
        except OSError as error:
            raise HastenError(f"cannot write the plan {path}: {error}", "name another file with --out FILE") from None

    def to_toml(self) -> str:
        """Return the text of the plan file."""
        import tomlkit

        document = tomlkit.document()
        document.add(
            tomlkit.comment("A hasten plan: technique -> setting. Edit freely; a line less is a technique less.")
        )
        document.add(tomlkit.comment("Run the training under it with: hasten run SCRIPT ARGS"))
        made = tomlkit.table()
        made.update({"version": VERSION, **self.made})
        document.add("hasten", made)
        if self.machine:
            machine = tomlkit.table()
            machine.update({key: list(v) if isinstance(v, tuple) else v for key, v in self.machine.items()})
            document.add("machine", machine)
        document.add("techniques", self._techniques_table())
        return tomlkit.dumps(document)

    def _techniques_table(self) -> Table:
        import tomlkit

        table = tomlkit.table()
        for name, setting in self.techniques.items():
            if comment := self.comments.get(name):
                for line in comment.splitlines():
                    # TOML allows no control characters in comments; a reason may quote a coloured message.
                    table.add(tomlkit.comment("".join(sign if sign.isprintable() else " " for sign in line)))
            if isinstance(setting, dict):
                inline = tomlkit.inline_table()
                inline.update(setting)
                table.add(name, inline)
            else:
                table.add(name, setting)
        return table


def did_you_mean(word: str, known: Mapping[str, Any] | tuple[str, ...] | list[str]) -> str:
    """Return "did you mean 'x'?" for the closest known word; "" if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else ""


def _line_of(text: str, key: str, after: str = "") -> int:
    """Return the 1-based line of a key or table header, or 1. It is searched for, since tomllib keeps no positions."""
    key_pattern = re.compile(rf"""^\s*\[?\s*(?:{after}\.)?["']?{re.escape(key)}["']?\s*[\].=]""")
    table_pattern = re.compile(rf"^\s*\[\s*{re.escape(after)}\b")
    inside = not after
    for number, line in enumerate(text.splitlines(), 1):
        inside = inside or bool(table_pattern.match(line))
        if inside and key_pattern.match(line):
            return number
    return 1
