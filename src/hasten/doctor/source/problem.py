"""Problems that a rule finds in source code, and the changes that mend them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import libcst as cst

Change = Callable[[Any], cst.CSTNode]


@dataclass(frozen=True)
class Mend:
    """A change of one node: `change` takes the node, changes below it made, and gives what stands there then."""

    node: cst.CSTNode
    change: Change


@dataclass(frozen=True)
class Problem:
    """A problem that a rule found.

    Attributes:
        node: Where; its first character is the place of the finding.
        what: One sentence, no full stop.
        fix: An instruction.
        mends: The changes that mend it, all or none; empty where no change is surely safe.
        left: Why there are none, where a person might expect them; "" where the fix was never for a machine.
    """

    node: cst.CSTNode
    what: str
    fix: str
    mends: tuple[Mend, ...] = ()
    left: str = ""
