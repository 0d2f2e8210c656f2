"""Show a loader benchmark on doctor's screen and page: speed by number of workers, and the stages of a batch."""

from __future__ import annotations

from markupsafe import Markup
from rich.padding import Padding
from rich.table import Table

from hasten.doctor.verdict.loader import STAGE_WORDS, STAGES, speed
from hasten.evidence import LoaderBench, Rate
from hasten.report import words
from hasten.report.drawing import Scale, columns, rect, svg, text
from hasten.report.screen import Screen


def stage_rows(bench: LoaderBench) -> list[tuple[str, str, float, float]]:
    """Return the name, label, seconds per batch and share (0 to 1) of each stage that takes any time."""
    stages = bench.stages
    if stages is None or not stages.seconds > 0:
        return []
    rows = []
    for name in STAGES:
        seconds = stages.by_name[name]
        if seconds > 0:
            label = STAGE_WORDS[name] + (f" ({words.clean(stages.decoder)})" if name == "decode" else "")
            rows.append((name, label, seconds, seconds / stages.seconds))
    return rows


def _workers(rate: Rate) -> str:
    return words.count(rate.workers, "worker")


def mark(bench: LoaderBench, rate: Rate) -> str:
    """Return the marks of a number of workers: "yours" (the script's own), "best", "yours, best" or ""."""
    marks = ["yours"] if rate.workers == bench.loader.num_workers else []
    if bench.best is rate:
        marks.append("best")
    return ", ".join(marks)


def ratio(bench: LoaderBench, rate: Rate) -> str:
    """Return the speed relative to the speed without workers, as text."""
    none = bench.rate_of(0)
    return words.times(rate.samples_per_s / none.samples_per_s) if none and none.samples_per_s > 0 else words.NONE


# -- the screen ---------------------------------------------------------------------------------------------


def show(bench: LoaderBench, screen: Screen, html: bool) -> None:
    """Print the table by workers and the stages, and where the flame graph is.

    Args:
        bench: The benchmark.
        screen: The screen to print on.
        html: Whether an HTML page is written, which draws the flame graph.
    """
    console = screen.console
    if bench.measured:
        console.print()
        console.print(Padding(_table(bench, screen), (0, 0, 0, 2), expand=False))
    if rows := stage_rows(bench):
        screen.heading(
            "Where the time of a batch goes",
            f"in one process; batches sampled: {bench.stages.batches if bench.stages else 0}",
        )
        longest = sum(row[2] for row in rows)
        for _name, label, seconds, share in rows:
            bar = screen.bar(round(share * 30), "cyan")
            line = screen.text(f"  {label:26.26} {words.alike(seconds, longest):>9} {words.percent(share):>6}  ")
            console.print(line + bar)
    console.print()
    flame = f"a flame graph was recorded{'' if html else '; --html FILE draws it'}" if bench.flame else bench.flame_note
    screen.say(screen.text(words.clean(flame), "dim"))


def _table(bench: LoaderBench, screen: Screen) -> Table:
    """Return the speeds as a table, a row per number of workers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("workers", "samples/s", "of 0", "a batch every", "first batch", "epoch start"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("", overflow="fold")
    for rate in bench.rates:
        if rate.error:
            blank = [screen.text(words.NONE)] * 5
            table.add_row(screen.text(str(rate.workers)), *blank, screen.text("failed", "red"))
            continue
        cells = [
            f"{rate.samples_per_s:,.0f}" if rate.samples_per_s >= 10 else f"{rate.samples_per_s:.2g}",
            ratio(bench, rate),
            words.duration(1 / rate.batches_per_s) if rate.batches_per_s > 0 else words.NONE,
            words.duration(rate.first_batch),
            words.duration(rate.epoch_start),
        ]
        style = "bold" if bench.best is rate else ""
        table.add_row(*(screen.text(cell, style) for cell in (str(rate.workers), *cells, mark(bench, rate))))
    return table


# -- the page -----------------------------------------------------------------------------------------------


def speed_chart(bench: LoaderBench) -> Markup:
    """Draw samples per second by number of workers, with a line at the speed at which the training took them."""
    rates = bench.measured
    most = max((rate.high for rate in rates), default=0.0)
    if not most > 0:
        return Markup()
    scale = Scale(0.0, most)
    height = 40 * len(rates)
    parts = columns(scale, height, lambda value: f"{value:,.0f}")
    for row, rate in enumerate(rates):
        top = row * 40
        windows = f"windows {rate.low:,.0f} to {rate.high:,.0f}"
        description = f"{_workers(rate)}: {speed(rate.samples_per_s)}, {windows}"
        marked = mark(bench, rate)
        label = _workers(rate) + (f" ({marked})" if marked else "")
        parts += [text("label halo", 0, top + 15, label), text("value halo", 100, top + 15, speed(rate.samples_per_s))]
        kind = "plan" if bench.best is rate else "old"
        parts.append(rect(kind, (scale(0.0), scale(rate.samples_per_s)), top + 21, 14, description))
    if bench.consumed is not None and bench.consumed.samples_per_s <= most:
        at = scale(bench.consumed.samples_per_s)
        parts.append(rect("loss", (at - 0.15, at + 0.15), 0, height, "what the training took"))
    description = ", ".join(f"{_workers(rate)} {speed(rate.samples_per_s)}" for rate in rates)
    return svg("Samples per second by number of workers", description, height + 22, parts)


def stage_chart(bench: LoaderBench) -> Markup:
    """Draw the stages of a batch as one bar."""
    rows = stage_rows(bench)
    if not rows:
        return Markup()
    parts, start = [], 0.0
    for name, label, _seconds, share in rows:
        ends = (100 * start, 100 * (start + share))
        parts.append(rect(f"st-{name}", ends, 0, 30, f"{label}: {words.percent(share)}"))
        start += share
    return svg("Where the time of a batch goes", ", ".join(f"{r[1]} {words.percent(r[3])}" for r in rows), 30, parts)
