"""Check source code with the rules: one file, files and folders, or the script of a run.

An ignore comment (`# hasten: ignore[name]`) silences a finding from the code, and also a run's finding on the same
statement.
"""

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
    """A finding with its range in the source.

    Lines and columns are counted from 1, as editors do; the end column is exclusive.

    Attributes:
        finding: The finding; it has the file and the first line.
        column: First column.
        end_line: Last line.
        end_column: Column after the last character.
        text: The complete first line of the source.
    """

    finding: Finding
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True)
class LintResult:
    """The findings of some files.

    Attributes:
        findings: The findings, sorted by line and column within each file.
        errors: Files that could not be checked.
        files: Number of files, those that could not be checked included.
    """

    findings: tuple[SourceFinding, ...]
    errors: tuple[UnreadableError, ...]
    files: int


def problems_in(script: Script, ignores: Ignores, select: Collection[str] = ()) -> Iterator[tuple[type[Rule], Problem]]:
    """Yield the problems in a file that no ignore comment silences, with their rules, rule by rule."""
    code = Code(script)
    for rule in FINDINGS.values():
        if select and rule.name not in select:
            continue
        for problem in rule.code(code):
            if not ignores.covers(rule.name, lines_of(script, problem.node)):
                yield rule, problem


def lines_of(script: Script, node: cst.CSTNode) -> tuple[int, ...]:
    """Return the lines on which an ignore comment applies to a node.

    They are the node's first line, and the first and last line of its statement. Of a compound statement (`for`,
    `with`, `def`), the last line does not count, but its first does, and that on which a one-line body begins.
    """
    statement = script.statement(node)
    node_range = script.positions[node]
    statement_range = script.positions[statement]
    compound = isinstance(statement, cst.BaseCompoundStatement)
    if compound and isinstance(body := getattr(statement, "body", None), cst.BaseSuite):
        head = script.positions[body].start.line
        end = (
            min(head, statement_range.end.line)
            if isinstance(body, cst.SimpleStatementSuite)
            else statement_range.start.line
        )
    else:
        end = statement_range.end.line
    return (node_range.start.line, statement_range.start.line, end)


def check_text(
    text: Text, select: Collection[str] = (), strict_ignores: bool = False, apply_ignores: bool = True
) -> list[SourceFinding]:
    """Return the findings of one file, sorted by line.

    Args:
        text: The file.
        select: Names of the rules to apply; empty: all.
        strict_ignores: Also report ignore comments that silence nothing, if all rules are applied.
        apply_ignores: Leave out findings that an ignore comment silences.

    Raises:
        UnreadableError: The file is not valid Python.
    """
    script = parse(text)
    if script is None:
        return []
    ignores = ignores_in(text.text) if apply_ignores else Ignores()
    if ignores.whole_file:
        return []
    lines = text.text.splitlines()
    findings = []
    for rule, problem in problems_in(script, ignores, select):
        code_range = script.positions[problem.node]
        finding = Finding(
            name=rule.name,
            what=problem.what,
            fix=problem.fix,
            severity=rule.severity,
            how_known=HowKnown.READ,
            file=str(text.path),
            line=code_range.start.line,
            details=("read from the code; what it costs was not measured",)
            if rule.severity is not Severity.NOTE
            else (),
            technique=rule.cure.name if rule.cure is not None else "",
            sources=rule.sources,
        )
        # Mark only the first line of a loop or function: editors would underline its body otherwise.
        compound = isinstance(problem.node, cst.BaseCompoundStatement)
        end = code_range.start if compound else code_range.end
        end_column = len(lines[end.line - 1]) + 1 if compound and end.line <= len(lines) else end.column + 1
        source = lines[code_range.start.line - 1] if code_range.start.line <= len(lines) else ""
        findings.append(SourceFinding(finding, code_range.start.column + 1, end.line, end_column, source))
    # With `select`, a comment may be meant for a rule that was not applied.
    for line in ignores.unused if strict_ignores and not select else ():
        message = "this ignore comment silences nothing"
        finding = Finding(UNUSED, message, "remove it", Severity.NOTE, None, HowKnown.READ, str(text.path), line)
        findings.append(SourceFinding(finding, 1, line, len(lines[line - 1]) + 1, lines[line - 1]))
    return sorted(findings, key=lambda entry: (entry.finding.line, entry.column, entry.finding.name))


def check(paths: Sequence[Path], select: Collection[str] = (), strict_ignores: bool = False) -> LintResult:
    """Check files and folders. Files that cannot be read are returned as errors, and the others are still checked."""
    findings: list[SourceFinding] = []
    errors: list[UnreadableError] = []
    files = 0
    for path in python_files(paths):
        files += 1
        try:
            findings += check_text(read_text(path), select, strict_ignores)
        except UnreadableError as error:
            errors.append(error)
        except RecursionError:
            errors.append(UnreadableError(path, "nested too deep to be looked at"))
    return LintResult(tuple(findings), tuple(errors), files)


def findings_in(path: Path) -> list[Finding]:
    """Return the findings of a script for the diagnosis of its run; none if it cannot be read as Python.

    Ignore comments are not applied here: `silenced` applies them to the findings from the code and from the run
    together.
    """
    try:
        return [entry.finding for entry in check_text(read_text(path), apply_ignores=False)]
    except (UnreadableError, RecursionError):
        return []


def silenced(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of a run that no ignore comment in the script silences."""
    comments: dict[str, tuple[Script | None, Ignores]] = {}
    remaining = []
    for finding in findings:
        if finding.file and finding.file not in comments:
            comments[finding.file] = _comments(Path(finding.file))
        if finding.file:
            script, ignores = comments[finding.file]
            lines = _lines_at(script, finding.line) if script and ignores.by_line else (finding.line,)
            if ignores.covers(finding.name, lines):
                continue
        remaining.append(finding)
    return remaining


def _comments(path: Path) -> tuple[Script | None, Ignores]:
    """Return a script's ignore comments, and its tree if it has any that apply to single lines."""
    try:
        text = read_text(path)
        ignores = ignores_in(text.text)
        return (parse(text) if ignores.by_line else None), ignores
    except UnreadableError:
        return None, Ignores()


def _lines_at(script: Script, line: int) -> tuple[int, ...]:
    """Return the lines on which an ignore comment applies to a line: also the first and last of its statement."""
    lines = {line}
    for node in script.nodes:
        if isinstance(node, cst.SimpleStatementLine):
            code_range = script.positions[node]
            if code_range.start.line <= line <= code_range.end.line:
                lines |= {code_range.start.line, code_range.end.line}
    return tuple(lines)
