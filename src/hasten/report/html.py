"""Render a proof as one self-contained HTML page: no external scripts, fonts or images."""

from __future__ import annotations

from pathlib import Path

from hasten.check import words as check
from hasten.report import charts, course, parity_words, technique_words, verdict, words
from hasten.report.page import environment, write_whole
from hasten.tuner.proof import Answer, Proof


def render(proof: Proof) -> str:
    """Return the page's HTML. Paths are shown relative to the working directory."""
    proof = proof.without_paths()
    rows = verdict.phases(proof)
    template = environment().get_template("report.html.j2")
    return template.render(
        proof=proof,
        headline=verdict.verdict(proof),
        phases=rows,
        longest_step=max(sum(row.before for row in rows), sum(row.after for row in rows)),
        parity=parity_words.parity(proof),
        kept=technique_words.kept(proof),
        lost=technique_words.lost(proof),
        plain=course.plain_step(proof.blocks),
        answers={Answer.HOLDS: "good", Answer.DOES_NOT: "bad", Answer.NOT_KNOWN: "warn"},
        seeds=words.count(len({pair.seed for pair in proof.pairs}), "seed"),
        charts=charts,
        check=check,
        course=course,
        parity_words=parity_words,
        technique_words=technique_words,
        verdict=verdict,
        words=words,
    )


def write(proof: Proof, path: Path) -> None:
    """Write the page atomically.

    Raises:
        HastenError: The folder cannot be written to.
    """
    write_whole(render(proof), path)
