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
class FixResult:
    """A file before and after its repair.

    Attributes:
        before: The file as it is on the disk.
        after: The repaired text.
        applied: (line, rule) of each repaired problem; the line is that of the round in which it was repaired.
        skipped: (line, rule, reason) of each problem that was left alone.
        effects: How the repairs may change the training's results, by rule.
    """

    before: Text
    after: str
    applied: list[tuple[int, str]] = field(default_factory=list)
    skipped: list[tuple[int, str, str]] = field(default_factory=list)
    effects: dict[str, str] = field(default_factory=dict)

    def diff(self, name: str) -> str:
        """Return a unified diff for `patch -p1`; "" if nothing changed."""
        old, new = self.before.text.splitlines(keepends=True), self.after.splitlines(keepends=True)
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _Editor(cst.CSTTransformer):
    """Replaces nodes of a tree by changed ones, inner nodes first."""

    def __init__(self, edits: dict[cst.CSTNode, list[Callable[[Any], cst.CSTNode]]]) -> None:
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Apply the node's changes, if it has any; `updated_node` has the changes inside it."""
        for edit in self._edits.get(original_node, ()):
            updated_node = edit(updated_node)
        return updated_node


def apply_fixes(text: Text, select: Collection[str] = ()) -> FixResult:
    """Repair one file in memory.

    Args:
        text: The file.
        select: Names of the rules to apply; empty: all.

    Raises:
        UnreadableError: The file is not valid Python, or would not be after the repair.
    """
    result = FixResult(text, text.text)
    for round_number in range(_ROUNDS):
        repaired = _apply_round(
            Text(text.path, result.after, text.encoding), select, result, first_round=round_number == 0
        )
        if repaired == result.after:
            break
        try:
            compile(repaired, str(text.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # a bug in a rule's change: never write a broken file
            raise UnreadableError(text.path, f"left as it is: a repair would not be valid Python ({error})") from None
        result.after = repaired
    return result


def _apply_round(text: Text, select: Collection[str], result: FixResult, first_round: bool) -> str:
    """Apply the changes of all problems in a text, and return the new text.

    Applied fixes are added to `result`; skipped ones only in the first round, since later rounds find them again.
    """
    script = parse(text)
    ignores = ignores_in(text.text)
    if script is None or ignores.whole_file:
        return text.text
    edits: dict[cst.CSTNode, list[Callable[[Any], cst.CSTNode]]] = {}
    edited: set[tuple[cst.CSTNode, str]] = set()
    for rule, problem in problems_in(script, ignores, select):
        if not problem.edits:
            if first_round and problem.unfixed_reason:
                result.skipped.append((script.line(problem.node), rule.name, problem.unfixed_reason))
            continue
        keys = {(edit.node, rule.name) for edit in problem.edits}
        covered = any(ignores.covers(rule.name, lines_of(script, edit.node)) for edit in problem.edits)
        if covered or not edited.isdisjoint(keys):
            if covered and first_round:
                result.skipped.append(
                    (script.line(problem.node), rule.name, "an ignore comment covers part of the change")
                )
            continue  # also if another problem of the rule changes the same node, as the next round sees the result
        edited |= keys
        for edit in problem.edits:
            edits.setdefault(edit.node, []).append(edit.change)
        result.applied.append((script.line(problem.node), rule.name))
        if rule.may_change:
            result.effects[rule.name] = rule.may_change
    if not edits:
        return text.text
    changed = script.module.visit(_Editor(edits))
    assert isinstance(changed, cst.Module)
    return changed.code


def write(result: FixResult) -> None:
    """Write a repaired file to the disk, completely or not at all.

    The file keeps its mode, owner, extended attributes and hard links.
    Raises:
        HastenError: It cannot be written, or was changed since it was read.
    """
    path = Path(os.path.realpath(result.before.path))  # write to the file that a symbolic link points to
    try:
        if not os.access(path, os.W_OK):
            raise HastenError(f"cannot write {path}: it is read-only", "make it writable first")
        if path.read_bytes() != result.before.bytes_of(result.before.text):
            raise HastenError(f"{path} was changed in the meantime: left as it is", "run `hasten fix` again")
        write_in_place(path, result.before.bytes_of(result.after))
    except UnicodeEncodeError as error:
        raise HastenError(f"cannot write {path}: {error}") from None
    except OSError as error:
        raise HastenError(f"cannot write {path}: {error.strerror}") from None
