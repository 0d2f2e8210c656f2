"""Problems that a rule finds in source code, and the changes of the tree that repair them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libcst as cst

Change = Callable[[Any], cst.CSTNode]


@dataclass(frozen=True)
class Edit:
    """A change of one node.

    Attributes:
        node: The node to replace.
        change: Returns the replacement. Its argument is the node with the changes inside it already made.
    """

    node: cst.CSTNode
    change: Change


@dataclass(frozen=True)
class Problem:
    """A problem that a rule found.

    Attributes:
        node: The code with the problem; its first character is the place of the finding.
        what: One sentence that describes the problem, without a full stop.
        fix: An instruction to the user.
        edits: The changes that repair it, made all together or not at all; empty if no change is surely safe.
        unfixed_reason: Why there are no edits, for the user; "" if such problems are never repaired automatically.
    """

    node: cst.CSTNode
    what: str
    fix: str
    edits: tuple[Edit, ...] = ()
    unfixed_reason: str = ""
