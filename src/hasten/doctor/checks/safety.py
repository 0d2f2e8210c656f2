"""Checks of what a script trusts."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, Severity, split_place


class UnsafeLoad(Check):
    """A checkpoint that may run code when it is loaded."""

    name = "unsafe_load"
    sources = ("torch.load", "TorchFix TOR102")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        for event in evidence.events_of("torch_load"):
            file, line = split_place(event.where)
            yield Finding(
                cls.name,
                "torch.load(weights_only=False) runs whatever code the file holds",
                "load it with weights_only=True, and name the classes it needs with torch.serialization.safe_globals",
                Severity.NOTE,
                file=file,
                line=line,
                details=(event.detail,) if event.detail else (),
                sources=cls.sources,
            )


CHECKS = (UnsafeLoad,)
