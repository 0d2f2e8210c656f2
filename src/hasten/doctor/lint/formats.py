"""Write findings from source code as text, JSON or SARIF."""

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
    """Return a path with `/` between its parts, relative to the current folder if it is below it."""
    try:
        return Path(path).absolute().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return Path(path).as_posix()


def as_text(checked: LintResult) -> str:
    """Return one line per finding, `file:line:column: severity name: what (fix: ...)`, and a last line with counts."""
    lines = [
        f"{shown(entry.finding.file)}:{entry.finding.line}:{entry.column}: {entry.finding.severity} "
        f"{entry.finding.name}: {entry.finding.what} (fix: {entry.finding.fix})"
        for entry in checked.findings
    ]
    files = f"{checked.files} file{'' if checked.files == 1 else 's'}"
    if not checked.findings:
        lines.append(f"nothing found in {files}")
    else:
        count = len(checked.findings)
        lines.append(f"{count} finding{'' if count == 1 else 's'} in {files}; read from the code, nothing was measured")
    return "\n".join(lines) + "\n"


def as_json(checked: LintResult, version: str) -> dict[str, Any]:
    """Return the findings as plain values for JSON.

    `worth` is always null, as nothing was measured. Lines and columns are counted from 1; the end column is exclusive.
    """
    return {
        "schema": SCHEMA,
        "hasten": version,
        "files": checked.files,
        "findings": [
            {
                "name": entry.finding.name,
                "file": shown(entry.finding.file),
                "line": entry.finding.line,
                "column": entry.column,
                "end_line": entry.end_line,
                "end_column": entry.end_column,
                "severity": str(entry.finding.severity),
                "worth": entry.finding.worth,
                "how_known": str(entry.finding.how_known),
                "what": entry.finding.what,
                "fix": entry.finding.fix,
                "technique": entry.finding.technique,
                "sources": list(entry.finding.sources),
            }
            for entry in checked.findings
        ],
        "errors": [{"file": shown(e.path), "line": e.line, "message": e.message} for e in checked.errors],
    }


def as_sarif(checked: LintResult, version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log, the format that code scanning services and editors read."""
    rules = [_rule(rule) for rule in FINDINGS.values() if "code" in rule.detected_in()]
    rules.append(
        {
            "id": UNUSED,
            "shortDescription": {"text": "An ignore comment that silences nothing."},
            "help": {"text": "Remove the comment."},
            "defaultConfiguration": {"level": "note"},
        }
    )
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    occurrences: Counter[tuple[str, str, str]] = Counter()
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "hasten", "rules": rules, **({"semanticVersion": version} if version else {})}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(entry, index, occurrences) for entry in checked.findings],
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
    """Return a rule's description in SARIF, with its page as help."""
    return {
        "id": rule.name,
        "name": rule.__name__,
        "shortDescription": {"text": rule.summary()},
        "help": {"text": rule.page(), "markdown": rule.page()},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(entry: SourceFinding, index: dict[str, int], occurrences: Counter[tuple[str, str, str]]) -> dict[str, Any]:
    """Return a finding as a result in SARIF.

    Args:
        entry: The finding.
        index: Position of each rule in the log's list of rules, by name.
        occurrences: How often each (rule, file, line of text) occurred so far; updated.
    """
    finding = entry.finding
    # The fingerprint has no line number: a finding is the same after lines were added above. Equal lines of a file are
    # told apart by their number of occurrence.
    key = (finding.name, finding.file, entry.text.strip())
    occurrences[key] += 1
    fingerprint = hashlib.sha256(f"{finding.name}\0{entry.text.strip()}\0{occurrences[key]}".encode()).hexdigest()[:32]
    location = _location(Path(finding.file), finding.line)
    location["physicalLocation"]["region"].update(
        startColumn=entry.column, endLine=entry.end_line, endColumn=entry.end_column, snippet={"text": entry.text}
    )
    return {
        "ruleId": finding.name,
        "ruleIndex": index[finding.name],
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.what}. Fix: {finding.fix}."},
        "locations": [location],
        "partialFingerprints": {"hastenLine/v1": fingerprint},
    }


def _location(path: Path, line: int) -> dict[str, Any]:
    """Return a location in SARIF; a `line` of 0 means the file as a whole."""
    name = shown(path)
    # Relative to the current folder if possible, as scanning services want it; else an absolute file:// URI.
    uri = Path(path).absolute().as_uri() if Path(name).is_absolute() or name.startswith("..") else quote(name)
    physical: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line:
        physical["region"] = {"startLine": line}
    return {"physicalLocation": physical}
