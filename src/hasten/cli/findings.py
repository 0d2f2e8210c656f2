"""`hasten findings`: all that doctor can find."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import typer

from hasten.doctor.checks import ALL
from hasten.techniques import CATALOGUE


@dataclass(frozen=True)
class Entry:
    """One finding by name: what it rests on, how it is seen, which technique brings the cure."""

    name: str
    about: str
    seen: tuple[str, ...]
    technique: str
    sources: tuple[str, ...]


def findings(
    markdown: bool = typer.Option(False, "--markdown", help="As the page docs/findings.md."),
) -> None:
    """List all that `hasten doctor` can find, in runs and in code."""
    if markdown:
        typer.echo(findings_page(), nl=False)
        return
    for one in entries():
        typer.echo(f"{one.name:26} {' and '.join(one.seen):12} {one.about.splitlines()[0]}")


def entries() -> list[Entry]:
    """Every finding, by name."""
    from hasten.doctor.source.rules import RULES

    runs: dict[str, tuple[object, str, tuple[str, ...]]] = {check.name: (check, "", check.sources) for check in ALL}
    runs |= {kind.finds: (kind.finding, name, kind.sources) for name, kind in CATALOGUE.items() if kind.finds}
    rules = {rule.name: rule for rule in RULES}
    made = []
    for name in sorted(runs.keys() | rules.keys()):
        where, technique, sources = runs.get(name) or (rules[name], rules[name].technique, rules[name].sources)
        seen = tuple(how for how, there in (("run", name in runs), ("code", name in rules)) if there)
        made.append(Entry(name, inspect.getdoc(where) or "", seen, technique, sources))
    return made


def findings_page() -> str:
    """All findings as Markdown, made from the classes."""
    lines = [
        "# What doctor finds",
        "",
        "Made by `hasten findings --markdown`; edit the classes, not this page.",
        "",
        "`run`: seen in a run, with its worth measured or estimated. `code`: read from source by",
        "`hasten doctor --source`. `# hasten: ignore[name]` on the line it names silences a finding there.",
        "",
        "| finding | seen in | technique |",
        "|---|---|---|",
    ]
    lines += [f"| [`{one.name}`](#{one.name}) | {', '.join(one.seen)} | {_link(one.technique)} |" for one in entries()]
    for one in entries():
        lines += ["", f"## {one.name}", "", one.about, ""]
        cure = f"; technique: [`{one.technique}`](catalogue.md#{one.technique})" if one.technique else ""
        lines.append(f"- seen in: {', '.join(one.seen)}{cure}")
        if one.sources:
            lines.append(f"- from: {'; '.join(one.sources)}")
    return "\n".join(lines) + "\n"


def _link(technique: str) -> str:
    return f"[`{technique}`](catalogue.md#{technique})" if technique else ""
