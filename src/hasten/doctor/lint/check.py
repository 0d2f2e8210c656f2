"""Findings of one file, of many, and of a script that was run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from hasten.doctor.findings import FINDINGS
from hasten.doctor.lint.ignores import Ignores, ignores_in
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.read import Text, UnreadableError, parse, python_files, read_text
from hasten.doctor.source.script import Script
from hasten.evidence import Finding, HowKnown, Severity

UNUSED = "unused_ignore"


@dataclass(frozen=True)
class SourceFinding:
    """One finding with its whole place. Lines and columns from 1, as editors count; the end column is exclusive."""

    finding: Finding
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True)
class LintResult:
    """Findings of some files.

    Attributes:
        found: By file, line and column.
        errors: Files that could not be looked at.
        files: How many were.
    """

    found: tuple[SourceFinding, ...]
    errors: tuple[UnreadableError, ...]
    files: int


def problems_in(script: Script, ignores: Ignores, select: Collection[str] = ()) -> Iterator[tuple[type[Rule], Problem]]:
    """The problems of a file that no comment silences, rule by rule."""
    code = Code(script)
    for rule in FINDINGS.values():
        if select and rule.name not in select:
            continue
        for problem in rule.code(code):
            if not ignores.covers(rule.name, lines_of(script, problem.node)):
                yield rule, problem


def lines_of(script: Script, node: cst.CSTNode) -> tuple[int, ...]:
    """The lines on which an ignore comment speaks of a node: its own, first and last of its statement's head."""
    statement = script.statement(node)
    place = script.positions[node]
    whole = script.positions[statement]
    compound = isinstance(statement, cst.BaseCompoundStatement)
    if compound and isinstance(body := getattr(statement, "body", None), cst.BaseSuite):
        head = script.positions[body].start.line
        end = min(head, whole.end.line) if isinstance(body, cst.SimpleStatementSuite) else whole.start.line
    else:
        end = whole.end.line
    return (place.start.line, whole.start.line, end)


def check_text(
    text: Text, select: Collection[str] = (), strict_ignores: bool = False, heed: bool = True
) -> list[SourceFinding]:
    """The findings of one file, by line; with `heed=False` also those that a comment silences.

    Raises:
        UnreadableError: It is not Python.
    """
    script = parse(text)
    if script is None:
        return []
    ignores = ignores_in(text.text) if heed else Ignores()
    if ignores.whole:
        return []
    lines = text.text.splitlines()
    found = []
    for rule, problem in problems_in(script, ignores, select):
        place = script.positions[problem.node]
        finding = Finding(
            name=rule.name,
            what=problem.what,
            fix=problem.fix,
            severity=rule.severity,
            how_known=HowKnown.READ,
            file=str(text.path),
            line=place.start.line,
            details=("read from the code; what it costs was not measured",)
            if rule.severity is not Severity.NOTE
            else (),
            technique=rule.cure.name if rule.cure is not None else "",
            sources=rule.sources,
        )
        compound = isinstance(problem.node, cst.BaseCompoundStatement)
        end = place.start if compound else place.end
        end_column = len(lines[end.line - 1]) + 1 if compound and end.line <= len(lines) else end.column + 1
        source = lines[place.start.line - 1] if place.start.line <= len(lines) else ""
        found.append(SourceFinding(finding, place.start.column + 1, end.line, end_column, source))
    for line in ignores.unused if strict_ignores and not select else ():
        what = "this ignore comment silences nothing"
        finding = Finding(UNUSED, what, "remove it", Severity.NOTE, None, HowKnown.READ, str(text.path), line)
        found.append(SourceFinding(finding, 1, line, len(lines[line - 1]) + 1, lines[line - 1]))
    return sorted(found, key=lambda one: (one.finding.line, one.column, one.finding.name))


def check(paths: Sequence[Path], select: Collection[str] = (), strict_ignores: bool = False) -> LintResult:
    """Look at files and folders; a file that cannot be read is named, and the rest goes on."""
    found: list[SourceFinding] = []
    errors: list[UnreadableError] = []
    files = 0
    for path in python_files(paths):
        files += 1
        try:
            found += check_text(read_text(path), select, strict_ignores)
        except UnreadableError as error:
            errors.append(error)
        except RecursionError:
            errors.append(UnreadableError(path, "nested too deep to be looked at"))
    return LintResult(tuple(found), tuple(errors), files)


def findings_in(path: Path) -> list[Finding]:
    """The findings of one script, for the diagnosis of its run; none where it cannot be read as Python.

    Comments are not heeded yet: they also silence what the run shows at the same place (`silenced`).
    """
    try:
        return [one.finding for one in check_text(read_text(path), heed=False)]
    except (UnreadableError, RecursionError):
        return []


def silenced(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a run that no ignore comment in the script silences."""
    comments: dict[str, tuple[Script | None, Ignores]] = {}
    kept = []
    for finding in findings:
        if finding.file and finding.file not in comments:
            comments[finding.file] = _comments(Path(finding.file))
        if finding.file:
            script, ignores = comments[finding.file]
            lines = _lines_at(script, finding.line) if script and ignores.by_line else (finding.line,)
            if ignores.covers(finding.name, lines):
                continue
        kept.append(finding)
    return kept


def _comments(path: Path) -> tuple[Script | None, Ignores]:
    try:
        text = read_text(path)
        ignores = ignores_in(text.text)
        return (parse(text) if ignores.by_line else None), ignores
    except UnreadableError:
        return None, Ignores()


def _lines_at(script: Script, line: int) -> tuple[int, ...]:
    """The lines that speak of a line: those of the statement it is in."""
    lines = {line}
    for node in script.nodes:
        if isinstance(node, cst.SimpleStatementLine):
            place = script.positions[node]
            if place.start.line <= line <= place.end.line:
                lines |= {place.start.line, place.end.line}
    return tuple(lines)
