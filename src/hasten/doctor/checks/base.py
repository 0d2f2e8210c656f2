"""What a check is: a finding that no technique of the catalogue cures by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from hasten.evidence import Evidence, Finding


class Check:
    """One thing that may be wrong with a training: one small class.

    Attributes:
        name: Of its findings, as in `# hasten: ignore[name]`.
        sources: The guide or paper it comes from.
    """

    name: ClassVar[str]
    sources: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterable[Finding]:
        """What this evidence shows, with its figures; nothing where it shows nothing."""
        raise NotImplementedError
