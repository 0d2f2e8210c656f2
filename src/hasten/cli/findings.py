"""`hasten findings`: list everything that doctor can find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hasten.doctor.rule import Rule


def findings(markdown: bool = typer.Option(False, "--markdown", help="As the page docs/findings.md.")) -> None:
    """List everything that `hasten doctor` can find, in runs and in code."""
    from hasten.doctor.findings import FINDINGS

    if markdown:
        typer.echo(findings_page(), nl=False)
        return
    for rule in FINDINGS.values():
        typer.echo(f"{rule.name:26} {' and '.join(rule.detected_in()):12} {rule.summary()}")


def findings_page() -> str:
    """Return the Markdown page docs/findings.md, generated from the findings' files."""
    from hasten.doctor.findings import FINDINGS

    lines = [
        "# What doctor finds",
        "",
        "Made by `hasten findings --markdown`; edit the files in src/hasten/doctor/findings, not this page.",
        "",
        "`run`: seen in a run, with its worth measured or estimated. `code`: read from source by",
        "`hasten doctor --source`. `# hasten: ignore[name]` on the line it names silences a finding there.",
        "",
        "| finding | seen in | technique |",
        "|---|---|---|",
    ]
    rules = FINDINGS.values()
    lines += [f"| [`{rule.name}`](#{rule.name}) | {', '.join(rule.detected_in())} | {_cure(rule)} |" for rule in rules]
    for rule in rules:
        cure = f"; technique: {_cure(rule)}" if rule.cure is not None else ""
        what, _, rest = rule.page().partition("\n\n")
        seen = f"Seen in: {', '.join(rule.detected_in())}{cure}."
        lines += ["", f"## {rule.name}", "", what, "", seen, "", rest.replace("## ", "### ")]
    return "\n".join(lines) + "\n"


def _cure(rule: type[Rule]) -> str:
    return f"[`{rule.cure.name}`](catalogue.md#{rule.cure.name})" if rule.cure is not None else ""
