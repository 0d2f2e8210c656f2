"""Mending a file: the changes of its rules, made in its tree, until none is left."""

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

_ROUNDS = 10


@dataclass
class Mended:
    """One file and what was done to it.

    Attributes:
        before: As it is on the disk.
        after: The mended text.
        done: (line, rule) of what was mended.
        left: (line, rule, reason) of what was not.
        changes: What the mends may do to the results, by rule.
    """

    before: Text
    after: str
    done: list[tuple[int, str]] = field(default_factory=list)
    left: list[tuple[int, str, str]] = field(default_factory=list)
    changes: dict[str, str] = field(default_factory=dict)

    def diff(self, name: str) -> str:
        """A unified diff, as `patch -p1` takes it; "" where nothing changes."""
        old, new = self.before.text.splitlines(keepends=True), self.after.splitlines(keepends=True)
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _Changes(cst.CSTTransformer):
    """Puts changed nodes in the place of the old ones, those below first."""

    def __init__(self, changes: dict[cst.CSTNode, list[Callable[[Any], cst.CSTNode]]]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Change a node that is to be changed."""
        for change in self._changes.get(original_node, ()):
            updated_node = change(updated_node)
        return updated_node


def mend(text: Text, select: Collection[str] = ()) -> Mended:
    """Mend one file, in memory.

    Raises:
        UnreadableError: It is not Python.
    """
    mended = Mended(text, text.text)
    for number in range(_ROUNDS):
        again = _one_round(Text(text.path, mended.after, text.encoding), select, mended, first=number == 0)
        if again == mended.after:
            break
        try:
            compile(again, str(text.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # a fault of ours: better nothing than that
            raise UnreadableError(text.path, f"left as it is: a repair would not be valid Python ({error})") from None
        mended.after = again
    return mended


def _one_round(text: Text, select: Collection[str], mended: Mended, first: bool) -> str:
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
        keys = {(one.node, rule.name) for one in problem.mends}
        covered = any(ignores.covers(rule.name, lines_of(script, one.node)) for one in problem.mends)
        if covered or not taken.isdisjoint(keys):
            if covered and first:
                mended.left.append(
                    (script.line(problem.node), rule.name, "an ignore comment covers part of the change")
                )
            continue
        taken |= keys
        for one in problem.mends:
            changes.setdefault(one.node, []).append(one.change)
        mended.done.append((script.line(problem.node), rule.name))
        if rule.may_change:
            mended.changes[rule.name] = rule.may_change
    if not changes:
        return text.text
    changed = script.module.visit(_Changes(changes))
    assert isinstance(changed, cst.Module)
    return changed.code


def write(mended: Mended) -> None:
    """Write a mended file whole or not at all; all that belongs to it stays: mode, owner, attributes, other names.

    Raises:
        HastenError: It cannot be written, or was changed meanwhile.
    """
    path = Path(os.path.realpath(mended.before.path))
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
