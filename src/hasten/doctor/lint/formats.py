"""Findings of source code as text, JSON and SARIF."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hasten.doctor.findings import FINDINGS
from hasten.doctor.lint.check import UNUSED, LintResult, SourceFinding
from hasten.doctor.rule import Rule
from hasten.evidence import Severity

SCHEMA = "hasten-source/1"
_SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.HIGH: "error", Severity.MEDIUM: "warning", Severity.LOW: "warning", Severity.NOTE: "note"}
FORMATS = ("text", "json", "sarif")


def shown(path: Path | str) -> str:
    """A path relative to where the command runs, where it is below; with `/` between its parts."""
    try:
        return Path(path).absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return Path(path).as_posix()


def as_text(checked: LintResult) -> str:
    """`file:line:column: severity name: what (fix: ...)`, a finding a line, and a last line that counts."""
    lines = [
        f"{shown(one.finding.file)}:{one.finding.line}:{one.column}: {one.finding.severity} {one.finding.name}: "
        f"{one.finding.what} (fix: {one.finding.fix})"
        for one in checked.found
    ]
    files = f"{checked.files} file{'' if checked.files == 1 else 's'}"
    if not checked.found:
        lines.append(f"nothing found in {files}")
    else:
        many = len(checked.found)
        lines.append(f"{many} finding{'' if many == 1 else 's'} in {files}; read from the code, nothing was measured")
    return "\n".join(lines) + "\n"


def as_json(checked: LintResult, version: str) -> dict[str, Any]:
    """Plain values. `worth` is null throughout: nothing was run. Lines and columns from 1, the end exclusive."""
    return {
        "schema": SCHEMA,
        "hasten": version,
        "files": checked.files,
        "findings": [
            {
                "name": one.finding.name,
                "file": shown(one.finding.file),
                "line": one.finding.line,
                "column": one.column,
                "end_line": one.end_line,
                "end_column": one.end_column,
                "severity": str(one.finding.severity),
                "worth": one.finding.worth,
                "how_known": str(one.finding.how_known),
                "what": one.finding.what,
                "fix": one.finding.fix,
                "technique": one.finding.technique,
                "sources": list(one.finding.sources),
            }
            for one in checked.found
        ],
        "errors": [{"file": shown(e.path), "line": e.line, "message": e.message} for e in checked.errors],
    }


def as_sarif(checked: LintResult, version: str) -> dict[str, Any]:
    """A SARIF 2.1.0 log: what code scanning services and editors read."""
    rules = [_rule(rule) for rule in FINDINGS.values() if "code" in rule.seen_in()]
    rules.append(
        {
            "id": UNUSED,
            "shortDescription": {"text": "An ignore comment that silences nothing."},
            "help": {"text": "Remove the comment."},
            "defaultConfiguration": {"level": "note"},
        }
    )
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    seen: Counter[tuple[str, str, str]] = Counter()
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "hasten", "rules": rules, **({"semanticVersion": version} if version else {})}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(one, index, seen) for one in checked.found],
        "invocations": [
            {
                "executionSuccessful": not checked.errors,
                "toolExecutionNotifications": [
                    {
                        "level": "error",
                        "message": {"text": error.message},
                        "locations": [_location(error.path, error.line)],
                    }
                    for error in checked.errors
                ],
            }
        ],
    }
    return {"$schema": _SARIF, "version": "2.1.0", "runs": [run]}


def _rule(rule: type[Rule]) -> dict[str, Any]:
    return {
        "id": rule.name,
        "name": rule.__name__,
        "shortDescription": {"text": rule.what()},
        "help": {"text": rule.page(), "markdown": rule.page()},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(one: SourceFinding, index: dict[str, int], seen: Counter[tuple[str, str, str]]) -> dict[str, Any]:
    finding = one.finding
    key = (finding.name, finding.file, one.text.strip())
    seen[key] += 1
    print_of = hashlib.sha256(f"{finding.name}\0{one.text.strip()}\0{seen[key]}".encode()).hexdigest()[:32]
    location = _location(Path(finding.file), finding.line)
    location["physicalLocation"]["region"].update(
        startColumn=one.column, endLine=one.end_line, endColumn=one.end_column, snippet={"text": one.text}
    )
    return {
        "ruleId": finding.name,
        "ruleIndex": index[finding.name],
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.what}. Fix: {finding.fix}."},
        "locations": [location],
        "partialFingerprints": {"hastenLine/v1": print_of},
    }


def _location(path: Path, line: int) -> dict[str, Any]:
    name = shown(path)
    uri = Path(path).absolute().as_uri() if Path(name).is_absolute() or name.startswith("..") else quote(name)
    physical: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line:
        physical["region"] = {"startLine": line}
    return {"physicalLocation": physical}
