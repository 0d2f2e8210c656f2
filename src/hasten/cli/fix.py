"""`hasten fix`: repair in source code what can be repaired safely."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hasten.cli.source import known_rules, named, put
from hasten.errors import HastenError

if TYPE_CHECKING:
    from hasten.doctor.lint.fix import FixResult


def fix(
    paths: list[Path] = typer.Argument(..., help="Python files, and folders of them.", metavar="PATHS"),
    write: bool = typer.Option(False, "--write", help="Write the files instead of showing the diff."),
    select: list[str] = typer.Option([], help="Fix only what this rule finds (may be repeated).", metavar="NAME"),
) -> None:
    """Show a diff of safe repairs in a training's source code; with --write, make the change.

    Formatting and comments are kept. Findings that cannot be repaired for certain are named and left alone; code under
    a `# hasten: ignore` comment is left alone, too. `patch -p1` accepts the diff.

    Exit code: 0 nothing to repair, or written; 1 there is a diff; 2 a file could not be read or written.

    Examples: hasten fix train.py; hasten fix src/ --select blocking_copy --write
    """
    from hasten.doctor.lint.fix import apply_fixes
    from hasten.doctor.lint.fix import write as write_file
    from hasten.doctor.lint.formats import shown
    from hasten.doctor.source.read import UnreadableError, python_files, read_text

    files = named(paths, "hasten fix PATHS")
    chosen = known_rules(select)
    failed, changed = False, 0
    for path in python_files(files):
        try:
            result = apply_fixes(read_text(path), chosen)
            if result.after != result.before.text:
                if write:
                    write_file(result)
                    print(f"hasten: fixed {shown(path)}", file=sys.stderr)
                else:
                    put(result.diff(shown(path)), None)
                changed += 1
            _print_effects(shown(path), result)
        except UnreadableError as error:
            failed = True
            print(f"hasten: {shown(path)}{f':{error.line}' if error.line else ''}: {error.message}", file=sys.stderr)
        except (HastenError, RecursionError) as error:
            failed = True
            print(f"hasten: {shown(path)}: {error}", file=sys.stderr)
    if not changed and not failed:
        print("hasten: nothing to repair", file=sys.stderr)
    elif changed and not write:
        print("hasten: nothing was written; --write makes these changes", file=sys.stderr)
    raise typer.Exit(2 if failed else int(bool(changed) and not write))


def _print_effects(name: str, result: FixResult) -> None:
    """Print the effect that each repair may have on results, and the findings that were left alone, with the reason."""
    for rule, effect in result.effects.items():
        print(f"hasten: {name}: {rule}: {effect}", file=sys.stderr)
    for line, rule, reason in result.skipped:
        print(f"hasten: {name}:{line}: {rule} left alone: {reason}", file=sys.stderr)
