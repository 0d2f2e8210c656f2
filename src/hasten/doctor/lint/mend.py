"""Repair a file: apply the changes that its rules propose, until they propose none.

Each round parses the text, applies the changes of all problems to the tree, and writes the text again. A repair may
reveal another problem, so that rounds are repeated. Whitespace and comments outside the changed nodes stay.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst

from hasten.doctor.lint.check import lines_of, problems_in
from hasten.doctor.lint.ignores import ignores_in
from hasten.doctor.source.read import Text, UnreadableError, parse
from hasten.errors import HastenError
from hasten.files import write_in_place

_ROUNDS = 10  # at most


@dataclass
class Mended:
    """A file before and after its repair.

    Attributes:
        before: The file as it is on the disk.
        after: The repaired text.
        done: (line, rule) of each repaired problem; the line is that of the round in which it was repaired.
        left: (line, rule, reason) of each problem that was left alone.
        changes: How the repairs may change the training's results, by rule.
    """

    before: Text
    after: str
    done: list[tuple[int, str]] = field(default_factory=list)
    left: list[tuple[int, str, str]] = field(default_factory=list)
    changes: dict[str, str] = field(default_factory=dict)

    def diff(self, name: str) -> str:
        """Return a unified diff for `patch -p1`; "" if nothing changed."""
        old, new = self.before.text.splitlines(keepends=True), self.after.splitlines(keepends=True)
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _Changes(cst.CSTTransformer):
    """Replaces nodes of a tree by changed ones, inner nodes first."""

    def __init__(self, changes: dict[cst.CSTNode, list[Callable[[Any], cst.CSTNode]]]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Apply the node's changes, if it has any; `updated_node` has the changes inside it."""
        for change in self._changes.get(original_node, ()):
            updated_node = change(updated_node)
        return updated_node


def mend(text: Text, select: Collection[str] = ()) -> Mended:
    """Repair one file in memory.

    Args:
        text: The file.
        select: Names of the rules to apply; empty: all.

    Raises:
        UnreadableError: The file is not valid Python, or would not be after the repair.
    """
    mended = Mended(text, text.text)
    for round_number in range(_ROUNDS):
        repaired = _one_round(Text(text.path, mended.after, text.encoding), select, mended, first=round_number == 0)
        if repaired == mended.after:
            break
        try:
            compile(repaired, str(text.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # a bug in a rule's change: never write a broken file
            raise UnreadableError(text.path, f"left as it is: a repair would not be valid Python ({error})") from None
        mended.after = repaired
    return mended


def _one_round(text: Text, select: Collection[str], mended: Mended, first: bool) -> str:
    """Apply the changes of all problems in a text, and return the new text.

    What was done is added to `mended`; what was left alone only in the first round, as later rounds find it again.
    """
    script = parse(text)
    ignores = ignores_in(text.text)
    if script is None or ignores.whole:
        return text.text
    changes: dict[cst.CSTNode, list[Callable[[Any], cst.CSTNode]]] = {}
    taken: set[tuple[cst.CSTNode, str]] = set()
    for rule, problem in problems_in(script, ignores, select):
        if not problem.mends:
            if first and problem.left:
                mended.left.append((script.line(problem.node), rule.name, problem.left))
            continue
        keys = {(edit.node, rule.name) for edit in problem.mends}
        covered = any(ignores.covers(rule.name, lines_of(script, edit.node)) for edit in problem.mends)
        if covered or not taken.isdisjoint(keys):
            if covered and first:
                mended.left.append(
                    (script.line(problem.node), rule.name, "an ignore comment covers part of the change")
                )
            continue  # also if another problem of the rule changes the same node, as the next round sees the result
        taken |= keys
        for edit in problem.mends:
            changes.setdefault(edit.node, []).append(edit.change)
        mended.done.append((script.line(problem.node), rule.name))
        if rule.may_change:
            mended.changes[rule.name] = rule.may_change
    if not changes:
        return text.text
    changed = script.module.visit(_Changes(changes))
    assert isinstance(changed, cst.Module)
    return changed.code


def write(mended: Mended) -> None:
    """Write a repaired file to the disk, completely or not at all.

    The file keeps its mode, owner, extended attributes and hard links.
    Raises:
        HastenError: It cannot be written, or was changed since it was read.
    """
    path = Path(os.path.realpath(mended.before.path))  # write to the file that a symbolic link points to
    try:
        if not os.access(path, os.W_OK):
            raise HastenError(f"cannot write {path}: it is read-only", "make it writable first")
        if path.read_bytes() != mended.before.bytes_of(mended.before.text):
            raise HastenError(f"{path} was changed in the meantime: left as it is", "run `hasten fix` again")
        write_in_place(path, mended.before.bytes_of(mended.after))
    except UnicodeEncodeError as error:
        raise HastenError(f"cannot write {path}: {error}") from None
    except OSError as error:
        raise HastenError(f"cannot write {path}: {error.strerror}") from None
