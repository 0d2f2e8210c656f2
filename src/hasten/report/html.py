"""A proof as one HTML page that opens offline: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hasten.errors import HastenError
from hasten.report import charts, verdict, words
from hasten.tuner.proof import Proof


def render(proof: Proof) -> str:
    """The whole page as text."""
    rows = verdict.phases(proof)
    template = _environment().get_template("report.html.j2")
    return template.render(
        proof=proof,
        found=verdict.verdict(proof),
        speed=verdict.speed(proof),
        memory=verdict.memory(proof),
        parity=verdict.parity(proof),
        blind_spots=verdict.blind_spots(proof),
        phases=rows,
        longest_step=max(sum(row.before for row in rows), sum(row.after for row in rows)),
        lost=verdict.lost(proof),
        seeds=words.count(len({pair.seed for pair in proof.pairs}), "seed"),
        charts=charts,
        verdict=verdict,
        words=words,
    )


def write(proof: Proof, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        HastenError: The folder cannot be written to.
    """
    text = render(proof)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        if path.parent.is_dir():
            temporary.unlink(missing_ok=True)
        raise HastenError(f"cannot write the report {path}: {error}", "name a folder you can write to") from None


def _environment() -> Environment:
    """Jinja with every value escaped, and cleaned of what could break the page."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


def _shown(value: Any) -> Any:
    return words.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
