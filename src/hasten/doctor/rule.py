"""Base class of the rules that make findings: each file of `doctor/findings` holds one subclass.

A rule looks at the evidence of a run (`run`), at the source code of a script (`code`), or at both. `findings` calls
`run` unless the run had the cure installed already; `holds` drops findings from the source that the run disproves.
The docstring of the rule's file is the page of its finding, which the docs, SARIF and `hasten findings` show.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from hasten.evidence import Evidence, Finding, HowKnown, Severity, severity_of, split_place
from hasten.evidence.weigh import LEAST, in_words, on_gpu, place_of, switched
from hasten.techniques.base import Refusal, Technique

if TYPE_CHECKING:
    from hasten.doctor.source.code import Code
    from hasten.doctor.source.problem import Problem
    from hasten.plan import Setting

SECTIONS = ("Why it is slow", "How it is known", "Example", "Use instead", "When the repair is safe", "Source")
"""Sections of a finding's page, in this order; "How it is known" may be missing if the code alone shows it."""


class Rule:
    """A rule: it detects one kind of problem in a training and returns it as findings.

    A subclass overrides `run`, `code` or both, in a file named after the finding. The file's docstring is its page: one
    sentence that describes the problem, then the sections of `SECTIONS`. It becomes part of docs/findings.md and the
    rule's help in SARIF.

    Attributes:
        name: Name of its findings, as in `# hasten: ignore[name]`; by default the name of its file.
        cure: The technique that removes the problem without a change of code; None if only a change of code does.
        tried: The setting of `cure` that doctor switches on and off in a running training to measure the worth; None
            if the cure is not switched.
        severity: Severity of findings from code, where nothing is measured: LOW if they cost time, NOTE if not.
        may_change: How a repair may change results, as `hasten fix` reports it; "" if results stay the same.
        gpu_only: The problem exists only in a training on a GPU; findings from runs and from code depend on it.
        of_optimizer: Findings from code are about an optimizer and do not hold if the run never built it.
        placed_by_code: Report the line found in the code, which causes the problem; the run has the line that shows it.
        gives_way: The finding only says that a line takes time, so it is dropped if another finding says why.
        sources: Guides and papers, taken from the page's section "Source".
    """

    name: ClassVar[str]
    cure: ClassVar[type[Technique] | None] = None
    tried: ClassVar[Setting | None] = None
    severity: ClassVar[Severity] = Severity.LOW
    may_change: ClassVar[str] = ""
    gpu_only: ClassVar[bool] = False
    of_optimizer: ClassVar[bool] = False
    placed_by_code: ClassVar[bool] = False
    gives_way: ClassVar[bool] = False
    sources: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Take name, docstring and sources from the file, so that a rule states each of them only once."""
        cls.name = vars(cls).get("name", cls.__module__.rpartition(".")[2])
        cls.__doc__ = cls.__doc__ or cls.summary()
        cls.sources = tuple(re.findall(r"^- (.+)$", cls.section("Source"), re.MULTILINE))

    # -- detecting the problem -------------------------------------------------------------------------

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | Iterable[Finding | None] | None:
        """Return the findings that the evidence of a run shows, with their figures; None if there are none."""
        return None

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Return the problems that a file of source code shows."""
        return ()

    @classmethod
    def finding(
        cls,
        what: str,
        fix: str,
        severity: Severity,
        worth: float | None = None,
        how_known: HowKnown = HowKnown.ESTIMATED,
        *,
        place: str = "",
        where: str = "",
        details: tuple[str, ...] = (),
        setting: str = "",
    ) -> Finding:
        """Return a finding of this rule.

        Args:
            what, fix, severity, worth, how_known, where, details: As in `Finding`.
            place: `file:line`, or "" if unknown.
            setting: The setting of the cure, as written in a plan; "" if the cure does not help.
        """
        file, line = split_place(place)
        cure = cls.cure.name if setting and cls.cure is not None else ""
        return Finding(
            cls.name, what, fix, severity, worth, how_known, file, line, where, details, cure, setting, cls.sources
        )

    @classmethod
    def timed(
        cls,
        what: str,
        fix: str,
        worth: float,
        how_known: HowKnown,
        *,
        place: str = "",
        where: str = "",
        details: tuple[str, ...] = (),
        setting: str = "",
    ) -> Finding | None:
        """Return a finding about time, as `finding` does; None if it is worth less than 1 % of the step."""
        if not worth >= LEAST:  # NaN is not worth a finding either
            return None
        worth = min(1.0, worth)
        placement = {"place": place, "where": where, "setting": setting}
        return cls.finding(what, fix, severity_of(worth), worth, how_known, details=details, **placement)

    @classmethod
    def switched(
        cls, evidence: Evidence, what: str, fix: str, worth: float, how_known: HowKnown, *, setting: str
    ) -> Finding | None:
        """Return a finding as `timed` does, corrected by the gain that was measured for the cure.

        The gain comes from switching the cure on and off during the run. Trials on single layers after the run give
        the place and the details.
        """
        tried = evidence.measured_for(cls.name)
        worth, how_known, live = switched(evidence, cls.name, worth, how_known)
        return cls.timed(
            what,
            fix,
            worth,
            how_known,
            place=place_of(evidence, tried[0]) if tried else "",
            where=tried[0].where if tried else "",
            details=(*live, *map(in_words, tried)),
            setting=setting,
        )

    @classmethod
    def findings(cls, evidence: Evidence) -> list[Finding]:
        """Return the findings of `run` as a list; empty if the cure was installed, or for lack of the GPU it needs.

        Evidence records what the script asks for, even if a technique overrides it: with a plan that has
        `set_to_none`, the script's own `zero_grad(set_to_none=False)` is still there.
        """
        if cls.is_cured(evidence) or (cls.gpu_only and not on_gpu(evidence)):
            return []
        result = cls.run(evidence)
        findings = [result] if isinstance(result, Finding) else list(result or ())
        return [finding for finding in findings if finding is not None]

    @classmethod
    def is_cured(cls, evidence: Evidence) -> bool:
        """Return whether a plan applied the cure in this run, and to everything."""
        # "2 loaders" if it acted on everything, "process, left alone: Net: a reason" if it skipped something.
        did = evidence.installed.get(cls.cure.name, "") if cls.cure is not None else ""
        return bool(did) and "left alone" not in did

    @classmethod
    def detected_in(cls) -> tuple[str, ...]:
        """Return what the rule detects its problem in: "run", "code" or both."""
        runs = cls.run.__func__ is not Rule.run.__func__  # type: ignore[attr-defined]
        reads = cls.code.__func__ is not Rule.code.__func__  # type: ignore[attr-defined]
        return tuple(name for name, overridden in (("run", runs), ("code", reads)) if overridden)

    # -- findings from code, checked against a run -----------------------------------------------------

    @classmethod
    def holds(cls, finding: Finding, evidence: Evidence) -> bool:
        """Return whether a finding from code may be true of this run; False if the run disproves it."""
        if cls.gpu_only and (evidence.step_phases or evidence.unfinished) and not on_gpu(evidence):
            return False
        if not cls.of_optimizer or not evidence.step_phases or evidence.listened != "doctor":
            return True
        # An optimizer deleted before the script ended may be missing from the evidence. That cannot be if doctor ended
        # the run, with all optimizers alive. If the evidence has no optimizer, none was alive after the first step.
        if evidence.ended != "complete" and evidence.optimizers:
            return True
        return any(same_place(finding, *split_place(optimizer.where)) for optimizer in evidence.optimizers)

    # -- trying its cure in a running training ---------------------------------------------------------

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Return whether trying the cure may lead to a finding. By default: whether there is one without trying."""
        return any(finding.worth is not None for finding in cls.findings(evidence))

    @classmethod
    def to_try(cls, evidence: Evidence) -> dict[str, Setting]:
        """Return the techniques to switch on and off together to measure the worth, with their settings.

        Empty if there can be no finding, or if its cure cannot be tried.
        """
        if cls.cure is None or cls.tried is None or not cls.may_help(evidence):
            return {}
        choices = cls.cure.settings(evidence)
        if isinstance(choices, Refusal) or cls.tried not in choices.settings:
            return {}
        return {cls.cure.name: cls.tried}

    # -- its page --------------------------------------------------------------------------------------

    @classmethod
    def page(cls) -> str:
        """Return the file's docstring, as Markdown; "" under `python -OO`."""
        return (sys.modules[cls.__module__].__doc__ or "").strip()

    @classmethod
    def summary(cls) -> str:
        """Return the page's first paragraph, which describes the problem, in one line."""
        return " ".join(cls.page().partition("\n\n")[0].split())

    @classmethod
    def section(cls, title: str) -> str:
        """Return the text of a section of the page; "" if the page has no such section."""
        _, _, body = f"\n{cls.page()}\n".partition(f"\n## {title}\n")
        return body.partition("\n## ")[0].strip()


def same_place(finding: Finding, file: str, line: int) -> bool:
    """Return whether a finding is at a place, or within three lines of it: a call may span several lines."""
    # Only file names are compared: one path may be relative, the other absolute.
    return abs(finding.line - line) <= 3 and finding.file.rpartition("/")[2] == file.rpartition("/")[2]
