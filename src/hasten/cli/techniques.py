"""`hasten techniques`: list the catalogue of techniques."""

from __future__ import annotations

import inspect

import typer

from hasten.techniques import CATALOGUE, Liveness, Technique, toml_value


def techniques(markdown: bool = typer.Option(False, "--markdown", help="As the page docs/catalogue.md.")) -> None:
    """List the techniques, what each may do to the result, and its settings."""
    if markdown:
        typer.echo(catalogue_page(), nl=False)
        return
    for name, technique in CATALOGUE.items():
        typer.echo(f"{name:20} {technique.effect:11} {(inspect.getdoc(technique) or '').splitlines()[0]}")


def catalogue_page() -> str:
    """Return the Markdown page docs/catalogue.md, generated from the techniques' classes."""
    lines = [
        "# The catalogue of techniques",
        "",
        "Made by `hasten techniques --markdown`; edit the classes, not this page.",
        "",
        "*switched* says when a technique can be switched on or off in a training that runs: between any two steps,",
        "for passes through a loader that begin later, once and behind all others (compiling is dear), or only as a",
        "process starts. Behind a switch the training is what it would be without, as far as its effect allows.",
        "",
        "| technique | effect | relieves | switched | in a plan |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| [`{name}`](#{name}) | {kind.effect} | {kind.relieves} | {_switched(kind)} | `{name} = {_example(kind)}` |"
        for name, kind in CATALOGUE.items()
    ]
    for name, kind in CATALOGUE.items():
        lines += ["", f"## {name}", "", inspect.cleandoc(kind.__doc__ or ""), ""]
        lines += [f"- effect: {kind.effect}; relieves: {kind.relieves}", f"- settings: {_settings(kind)}"]
        if kind.sources:
            lines.append(f"- from: {'; '.join(kind.sources)}")
    return "\n".join(lines) + "\n"


def _switched(kind: type[Technique]) -> str:
    """Say when a technique can be switched in a running training; if its settings differ, in their order."""
    settings = kind.values if isinstance(kind.values, tuple) else (1,)
    moments = {
        Liveness.STEP: "at any step",
        Liveness.PASS: "with a pass",
        Liveness.LAST: "once, last",
        Liveness.PROCESS: "at the start",
    }
    return " or ".join(dict.fromkeys(moments[kind.liveness_of(setting)] for setting in settings))


def _example(kind: type[Technique]) -> str:
    if isinstance(kind.values, tuple):
        return toml_value(kind.values[0])
    return kind.example or {int: "2", float: "3.0"}[kind.values]


def _settings(kind: type[Technique]) -> str:
    if isinstance(kind.values, tuple):
        return ", ".join(f"`{toml_value(value)}`" for value in kind.values)
    words = {int: "a whole number of at least 1", float: "a number above 0"}
    return words.get(kind.values, "a number, or a table; see above")
