"""A proof as one HTML page that opens offline: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from pathlib import Path

from hasten.check import words as check
from hasten.report import charts, verdict, words
from hasten.report.page import environment, write_whole
from hasten.tuner.proof import Proof


def render(proof: Proof) -> str:
    """The whole page as text."""
    rows = verdict.phases(proof)
    template = environment().get_template("report.html.j2")
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
        check=check,
        verdict=verdict,
        words=words,
    )


def write(proof: Proof, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        HastenError: The folder cannot be written to.
    """
    write_whole(render(proof), path)
