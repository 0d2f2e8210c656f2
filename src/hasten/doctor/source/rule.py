"""What a rule is, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import libcst as cst

from hasten.evidence import Severity

if TYPE_CHECKING:
    from hasten.doctor.source.code import Code

Change = Callable[[Any], cst.CSTNode]


@dataclass(frozen=True)
class Mend:
    """A change of one node: `change` takes the node, changes below it made, and gives what stands there then."""

    node: cst.CSTNode
    change: Change


@dataclass(frozen=True)
class Problem:
    """What a rule found.

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


class Rule:
    """One thing that code may show to be wrong with a training: one small class. Its docstring is its help.

    Attributes:
        name: Of its findings; the same as that of the finding in a run.
        severity: Nothing was measured: LOW for what costs time, NOTE for what does not.
        technique: That brings the cure without a change of code, "" if none.
        may_change: What a mend may do to the results, said by `hasten fix`; "" where they stay the same.
    """

    name: ClassVar[str]
    severity: ClassVar[Severity] = Severity.LOW
    technique: ClassVar[str] = ""
    sources: ClassVar[tuple[str, ...]] = ()
    may_change: ClassVar[str] = ""

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """What this file shows; nothing where it shows nothing."""
        raise NotImplementedError
