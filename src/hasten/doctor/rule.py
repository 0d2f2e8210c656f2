"""The base class of findings: one class in one file of `doctor/findings`."""

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
"""Of a finding's page, in this order; "How it is known" may be missing where the code alone shows it."""


class Rule:
    """One thing that may be wrong with a training.

    A subclass has `run`, `code` or both, in a file named after the finding. The file's docstring is its page: one
    sentence that says what it is, then the sections of `SECTIONS`. docs/findings.md and SARIF's help come from it.

    Attributes:
        name: Of its findings, as in `# hasten: ignore[name]`: the name of its file.
        cure: The technique that cures it without a change of code; None: only a change of code does.
        tried: The setting of `cure` that doctor switches on and off in a running training, to measure the worth;
            None: none.
        severity: Of what is read from code, where nothing is measured: LOW for what costs time, NOTE for what does not.
        may_change: What a mend may do to the results, said by `hasten fix`; "" where they stay the same.
        gpu_only: It is true of a training on a GPU only: seen in a run, and read from code.
        of_optimizer: Read from code, it is about an optimizer: not true of a run in which that one was not built.
        placed_by_code: The run knows where it showed, the code where it was made.
        gives_way: It says only that a line takes time: left out where another finding says why.
        sources: Guides and papers, from the file's docstring.
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
        cls.name = vars(cls).get("name", cls.__module__.rpartition(".")[2])
        cls.__doc__ = cls.__doc__ or cls.what()
        cls.sources = tuple(re.findall(r"^- (.+)$", cls.section("Source"), re.MULTILINE))

    # -- what it finds ---------------------------------------------------------------------------------

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | Iterable[Finding | None] | None:
        """Return what a run's evidence shows, with its figures; None is nothing."""
        return None

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Return what a file of source code shows."""
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
            what, fix, severity, worth, how_known, where, details: As of `Finding`.
            place: `file:line`, or "".
            setting: The cure's, as it would stand in a plan; "" where the cure does not help.
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
        """Return a finding about time, as `finding` does; None where it is worth less than 1 % of the step."""
        if not worth >= LEAST:
            return None
        worth = min(1.0, worth)
        more = {"place": place, "where": where, "setting": setting}
        return cls.finding(what, fix, severity_of(worth), worth, how_known, details=details, **more)

    @classmethod
    def switched(
        cls, evidence: Evidence, what: str, fix: str, worth: float, how_known: HowKnown, *, setting: str
    ) -> Finding | None:
        """Return a finding as `timed` does, by what switching the cure in the run, or trying it on layers, showed."""
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
        """Return what `run` finds, as a list; nothing where the run had the cure installed, or it needs a GPU.

        Evidence tells what the script asks for: with a plan that has `set_to_none`, the script's own
        `zero_grad(set_to_none=False)` is still seen.
        """
        if cls.is_cured(evidence) or (cls.gpu_only and not on_gpu(evidence)):
            return []
        found = cls.run(evidence)
        several = [found] if isinstance(found, Finding) else list(found or ())
        return [one for one in several if one is not None]

    @classmethod
    def is_cured(cls, evidence: Evidence) -> bool:
        """Whether the cure acted in this run, by a plan, and left nothing alone."""
        did = evidence.installed.get(cls.cure.name, "") if cls.cure is not None else ""
        return bool(did) and "left alone" not in did

    @classmethod
    def seen_in(cls) -> tuple[str, ...]:
        """Return how it is seen: "run", "code" or both."""
        ways = {"run": cls.run.__func__ is not Rule.run.__func__, "code": cls.code.__func__ is not Rule.code.__func__}  # type: ignore[attr-defined]
        return tuple(way for way, there in ways.items() if there)

    # -- what was read from code, beside a run ---------------------------------------------------------

    @classmethod
    def holds(cls, finding: Finding, evidence: Evidence) -> bool:
        """Whether what was read from the code may be true of this run: what the run disproves is not shown."""
        if cls.gpu_only and (evidence.step_phases or evidence.unfinished) and not on_gpu(evidence):
            return False
        if not cls.of_optimizer or not evidence.step_phases or evidence.listened != "doctor":
            return True
        # An optimizer that is gone when the script ends may not be known. Where the run was cut, all were still there;
        # and where none is known, none was there when the first step was over.
        if evidence.ended != "complete" and evidence.optimizers:
            return True
        return any(same_place(finding, *split_place(optimizer.where)) for optimizer in evidence.optimizers)

    # -- trying its cure in a running training ---------------------------------------------------------

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Whether the finding may be given once its cure was tried; as a rule: whether it is, untried."""
        return any(finding.worth is not None for finding in cls.findings(evidence))

    @classmethod
    def to_try(cls, evidence: Evidence) -> dict[str, Setting]:
        """Return what is to be switched on and off, all at once, to measure the worth: techniques with settings.

        Empty where the finding cannot be given, or its cure cannot be tried.
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
    def what(cls) -> str:
        """Return the page's first paragraph: what the finding is."""
        return " ".join(cls.page().partition("\n\n")[0].split())

    @classmethod
    def section(cls, title: str) -> str:
        """Return the text of one of its page's sections, "" where it has none."""
        _, _, rest = f"\n{cls.page()}\n".partition(f"\n## {title}\n")
        return rest.partition("\n## ")[0].strip()


def same_place(finding: Finding, file: str, line: int) -> bool:
    """Whether a finding stands at a place, or a few lines from it: a call may go over several."""
    return abs(finding.line - line) <= 3 and finding.file.rpartition("/")[2] == file.rpartition("/")[2]
