"""`hasten doctor --source`: report findings read from source code, for people, editors and CI."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import hasten
from hasten import files
from hasten.errors import HastenError
from hasten.evidence.finding import or_worse
from hasten.plan import did_you_mean


def check_source(
    paths: Sequence[str | Path],
    format: str = "text",
    fail_on: str = "",
    out: Path | None = None,
    select: Collection[str] = (),
    strict_ignores: bool = False,
) -> int:
    """Print the findings in the code of files and folders.

    Args:
        paths: Python files, and folders of them.
        format: "text", "json" or "sarif".
        fail_on: Severity from which a finding makes the exit code 1; "": any finding does.
        out: File to write instead of printing.
        select: Names of the rules to check; empty: all.
        strict_ignores: Also report ignore comments that silence nothing.

    Returns:
        Exit code: 0 nothing found, 1 findings, 2 a file could not be read.

    Raises:
        HastenError: No path was given, a format or rule is unknown, or `out` cannot be written.
    """
    from hasten.doctor.lint.check import check
    from hasten.doctor.lint.formats import FORMATS, as_json, as_sarif, as_text, shown

    if format not in FORMATS:
        raise HastenError(
            f"--format {format}: unknown", did_you_mean(format, FORMATS) or f"it takes: {', '.join(FORMATS)}"
        )
    if out is not None:
        files.check_target(out, "the findings", is_former)
    checked = check(named(paths, "hasten doctor --source PATHS"), known_rules(select), strict_ignores)
    if format == "text":
        text = as_text(checked)
    else:
        plain = as_json(checked, hasten.__version__) if format == "json" else as_sarif(checked, hasten.__version__)
        text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
    put(text, out)
    for error in checked.errors:
        print(f"hasten: {shown(error.path)}{f':{error.line}' if error.line else ''}: {error.message}", file=sys.stderr)
    if checked.errors:
        return 2
    return int(any(placed.finding.severity in or_worse(fail_on or "note") for placed in checked.findings))


def named(paths: Sequence[str | Path], usage: str) -> list[Path]:
    """Return the paths of a command line.

    Raises:
        HastenError: There are none.
    """
    if not paths:
        raise HastenError("no path was named", usage)
    return [Path(path) for path in paths]


def known_rules(names: Collection[str]) -> frozenset[str]:
    """Return the rules named by `--select`, each of which may hold several names separated by commas.

    Raises:
        HastenError: There is no such rule.
    """
    from hasten.doctor.findings import IN_CODE

    chosen = [name.strip() for word in names for name in word.split(",") if name.strip()]
    for name in chosen:
        if name not in IN_CODE:
            raise HastenError(
                f"--select {name}: no such rule", did_you_mean(name, IN_CODE) or f"rules: {', '.join(IN_CODE)}"
            )
    return frozenset(chosen)


def is_former(content: bytes) -> bool:
    """Return whether the content was written by `--out`, in any of its formats."""
    from hasten.doctor.lint.formats import SCHEMA

    if files.json_of(SCHEMA)(content):
        return True
    text = content.decode("utf-8", "replace").rstrip("\n")
    if text.startswith("{"):
        return re.search(r'"tool": \{\s*"driver": \{\s*"name": "hasten"', text) is not None
    last = text.rpartition("\n")[2]
    return re.fullmatch(r"nothing found in \d+ files?|\d+ findings? in .*nothing was measured", last) is not None


def put(text: str, out: Path | None) -> None:
    """Print a text, or write it to a file atomically.

    Raises:
        HastenError: The file holds other content, or cannot be written.
    """
    if out is None:
        stream = sys.stdout
        # A terminal without UTF-8 must not end the command on a letter in somebody's source.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        stream.write(text)
        stream.flush()
        return
    files.write_own(out, text, "the findings", is_former)
