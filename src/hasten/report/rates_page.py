"""Write the learning-rate finder's page: the loss over the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from hasten.report import drawing
from hasten.report.page import environment, write_whole

_HEIGHT = 260.0
_SHOWN_ABOVE = 2.0  # times the smoothed loss's range: losses above it are drawn at the top edge


def write(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    bracket: tuple[float | None, float | None],
    sentence: str,
    path: Path,
) -> None:
    """Write the page atomically.

    Args:
        rates: Learning rates, ascending.
        losses: Training loss at each rate.
        smoothed: Moving average of the losses.
        bracket: Rates at which the loss begins to fall and at which it is lowest; None if it never fell.
        sentence: The result in a sentence.
        path: The file to write.

    Raises:
        HastenError: The folder cannot be written to, or the file exists and is not a page of hasten's.
    """
    chart = curve(rates, losses, smoothed, bracket)
    write_whole(environment().get_template("rates.html.j2").render(sentence=sentence, chart=chart), path)


def curve(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    bracket: tuple[float | None, float | None],
) -> Markup:
    """Draw the loss over the learning rate (logarithmic), with the bracket as vertical lines."""
    # The top comes from the first half of the rates: a loss that diverges at high rates does not flatten the rest.
    low, high = min(smoothed), max(smoothed[: max(2, len(smoothed) // 2)])
    top = low + _SHOWN_ABOVE * max(high - low, 1e-12)
    y_scale = drawing.Scale(low, top, near=96, far=6)
    x_scale = drawing.Scale(rates[0], rates[-1], log=True)

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(x_scale(rate), y_scale(min(top, max(low, value)))) for rate, value in zip(rates, values, strict=True)]

    lines = [
        drawing.line("line-baseline", points(losses), "loss"),
        drawing.line("line-plan", points(smoothed), "smoothed"),
    ]
    lines += [
        drawing.line("line-baseline", [(x_scale(rate), 0), (x_scale(rate), 100)], f"{label} {rate:.1e}")
        for rate, label in zip(bracket, ("begins to fall at", "lowest at"), strict=True)
        if rate is not None
    ]
    shapes = [drawing.stretched(_HEIGHT, lines), *drawing.rows(y_scale, _HEIGHT, lambda loss: f"{loss:.3g}")]
    shapes += drawing.columns(x_scale, _HEIGHT, lambda rate: f"{rate:.0e}")
    return drawing.svg("Training loss by learning rate", "Grey: each step; blue: smoothed", _HEIGHT + 22, shapes)
