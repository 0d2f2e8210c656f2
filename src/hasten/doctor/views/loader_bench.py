"""A loader bench as a screen and as a page."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from hasten.doctor.loader_bench import LoaderBench, Rate
from hasten.doctor.views import TEMPLATES, flame_graph
from hasten.report import words
from hasten.report.drawing import Scale, columns, rect, svg, text
from hasten.report.page import environment, write_whole
from hasten.report.screen import Screen

STAGES = ("read", "decode", "transform", "collate", "other")
STAGE_WORDS = {
    "read": "reading files",
    "decode": "decoding",
    "transform": "transforms",
    "collate": "collating",
    "other": "the dataset's own code",
}
_AS_GOOD = 1.1  # as fast, within the noise of a bench
_MUCH = 0.1  # share of a step, of a batch: worth a word


def verdict(bench: LoaderBench) -> str:
    """What was found, in one line."""
    best, none = bench.best, bench.rate_of(0)
    if best is None:
        told = next((f"{rate.error}{_place(rate.where)}" for rate in bench.rates), "nothing was measured")
        return f"the loader gives no batches: {told}"
    parts = []
    if none is None or best is none:
        parts.append("no number of workers does better than none" if none and len(bench.measured) > 1 else "")
    elif none.samples_per_s > 0:
        ratio = words.times(best.samples_per_s / none.samples_per_s)
        parts.append(f"{_workers(best.workers)} {_give(best.workers)} {ratio} of what 0 give")
    parts.append(f"the loader alone can feed {speed(best.samples_per_s)}")
    if bench.stages is not None and bench.stages.seconds > 0:
        most = max(STAGES, key=lambda name: getattr(bench.stages, name))
        share = words.percent(getattr(bench.stages, most) / bench.stages.seconds)
        parts.append(f"{STAGE_WORDS[most]} {'is' if most != 'transform' else 'are'} {share} of it")
    return "; ".join(filter(None, parts))


def remarks(bench: LoaderBench) -> list[str]:
    """What else the figures say, most important first."""
    return [*_failures(bench), *_own(bench), *_training(bench), *_starts(bench), *_python(bench), *bench.notes]


def _failures(bench: LoaderBench) -> list[str]:
    """Numbers of workers that could not be measured, by reason; nothing where the verdict says it."""
    if bench.best is None:
        return []
    reasons: dict[tuple[str, str], list[str]] = {}
    for rate in bench.rates:
        if rate.error:
            reasons.setdefault((rate.error, rate.where), []).append(str(rate.workers))
    return [
        f"with {' and '.join(numbers)} workers it fails: {error}{_place(where)}"
        for (error, where), numbers in reasons.items()
    ]


def _own(bench: LoaderBench) -> list[str]:
    """The script's own number of workers beside the best."""
    best, own = bench.best, bench.rate_of(bench.loader.num_workers)
    if best is None or own is None or len(bench.measured) == 1:
        return []
    yours = f"the script's own {_workers(own.workers)} {_give(own.workers)} {speed(own.samples_per_s)}"
    if best is own or own.samples_per_s * _AS_GOOD >= best.samples_per_s:
        fewer = best.workers < own.workers
        return [f"{yours}: {f'{_workers(best.workers)} would do' if fewer else 'as good as any'}"]
    return [f"{yours}: num_workers={best.workers} gives {words.times(best.samples_per_s / own.samples_per_s)} of that"]


def _training(bench: LoaderBench) -> list[str]:
    """What a training took, beside what the loader can give."""
    took = bench.consumed
    if took is None:
        return []
    told = (
        f"the training took {speed(took.samples_per_s)} with {_workers(took.workers)} and waited "
        f"{words.percent(took.waited)} of its step for data"
    )
    alone = bench.rate_of(took.workers)
    if took.waited < _MUCH / 2:
        return [f"{told}: the loader does not hold it up"]
    if alone is None:
        return [told]
    if alone.samples_per_s > 1.5 * took.samples_per_s and took.workers:
        ratio = words.times(alone.samples_per_s / took.samples_per_s)
        return [f"{told}, although these workers alone give {ratio} of that: beside the training they lack CPU"]
    return [f"{told}; the loader alone gives {speed(alone.samples_per_s)} with as many: it holds the training up"]


def _starts(bench: LoaderBench) -> list[str]:
    """The wait at the begin of each epoch."""
    loader, own = bench.loader, bench.rate_of(bench.loader.num_workers)
    if own is None or not loader.num_workers:
        return []
    stays = words.duration(own.epoch_start)
    if loader.persistent_workers or own.epoch_start is None:
        return [f"an epoch's first batch comes after {stays if own.epoch_start else words.duration(own.first_batch)}"]
    wait, cure = words.duration(own.first_batch), "persistent_workers=True"
    return [f"each epoch restarts its workers and waits {wait} for the first batch; with {cure}, {stays}"]


def _python(bench: LoaderBench) -> list[str]:
    stages = bench.stages
    found = []
    if stages is not None and stages.python >= _MUCH:
        place = f", most of it in {words.clean(stages.hottest)}" if stages.hottest else ""
        found.append(f"{words.percent(stages.python)} of a sample's time is the dataset's own pure Python{place}")
    if stages is not None and stages.copies >= _MUCH:
        found.append(f"{words.percent(stages.copies)} of a worker's time goes into passing batches on")
    return found


def stage_rows(bench: LoaderBench) -> list[tuple[str, str, float, float]]:
    """Name, words, seconds a batch and share of each stage that takes any time."""
    stages = bench.stages
    if stages is None or not stages.seconds > 0:
        return []
    rows = []
    for name in STAGES:
        seconds = getattr(stages, name)
        if seconds > 0:
            told = STAGE_WORDS[name] + (f" ({words.clean(stages.decoder)})" if name == "decode" else "")
            rows.append((name, told, seconds, seconds / stages.seconds))
    return rows


def speed(samples_per_s: float) -> str:
    """`5,200 samples/s`; below ten, with what tells."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


def _workers(number: int) -> str:
    return words.count(number, "worker")


def _give(number: int) -> str:
    return "gives" if number == 1 else "give"


def _place(where: str) -> str:
    return f" ({words.clean(where)})" if where else ""


def mark(bench: LoaderBench, rate: Rate) -> str:
    """What is said of a number of workers: `yours, best`."""
    marks = ["yours"] if rate.workers == bench.loader.num_workers else []
    if bench.best is rate:
        marks.append("best")
    return ", ".join(marks)


def ratio(bench: LoaderBench, rate: Rate) -> str:
    """What it gives of what no workers give."""
    none = bench.rate_of(0)
    return words.times(rate.samples_per_s / none.samples_per_s) if none and none.samples_per_s > 0 else words.NONE


# -- the screen ---------------------------------------------------------------------------------------------


def show(bench: LoaderBench, console: Console, html: Path | None = None) -> None:
    """Print the verdict, the table by workers, the stages and what else is to be said.

    Args:
        bench: What was measured.
        console: Where to print; its width, colours and encoding are respected.
        html: Where the page goes, if there is one.
    """
    screen = Screen(console)
    console.print()
    screen.say(screen.text(_sentence(verdict(bench)), "bold" if bench.best else "bold red"), 0)
    loader = bench.loader
    size = f", batches of {loader.batch_size}" if loader.batch_size else ""
    samples = f", {loader.samples:,} samples" if loader.samples else ""
    screen.say(screen.text(f"The loader of {words.clean(loader.where)}: {words.clean(loader.dataset)}{samples}{size}."))
    if bench.ended == "stopped":
        screen.say(screen.text("Stopped by Ctrl-C: this is what was measured so far.", "yellow"))
    if bench.measured:
        console.print()
        console.print(Padding(_table(bench, screen), (0, 0, 0, 2), expand=False))
    if rows := stage_rows(bench):
        screen.heading(
            "Where the time of a batch goes",
            f"in one process; batches sampled: {bench.stages.batches if bench.stages else 0}",
        )
        longest = sum(row[2] for row in rows)
        for _name, told, seconds, share in rows:
            bar = screen.bar(round(share * 30), "cyan")
            line = screen.text(f"  {told:26.26} {words.alike(seconds, longest):>9} {words.percent(share):>6}  ")
            console.print(line + bar)
    if said := remarks(bench):
        console.print()
        for remark in said:
            screen.say(screen.text(_sentence(remark)), 4, screen.text("  -"))
    console.print()
    page = "" if html is not None else "; --html FILE draws it"
    flame = f"A flame graph was recorded{page}" if bench.flame else words.clean(bench.flame_note)
    screen.say(screen.text(_sentence(flame), "dim"))
    if html is not None:
        screen.say(screen.text(f"Page: {html}", "dim"))


def _table(bench: LoaderBench, screen: Screen) -> Table:
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


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}" + ("" if line.endswith((".", "!", "?")) else ".")


# -- the page -----------------------------------------------------------------------------------------------


def render(bench: LoaderBench) -> str:
    """The whole page as text: no script, no font, no picture from elsewhere."""
    template = environment(TEMPLATES).get_template("loader_bench.html.j2")
    return template.render(
        bench=bench,
        title=_sentence(verdict(bench)),
        remarks=[_sentence(line) for line in remarks(bench)],
        stages=stage_rows(bench),
        speeds=speed_chart(bench),
        stage_bar=stage_chart(bench),
        flame=flame_graph.draw(bench.flame),
        mark=mark,
        ratio=ratio,
        words=words,
    )


def write(bench: LoaderBench, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        HastenError: The folder cannot be written to.
    """
    write_whole(render(bench), path)


def speed_chart(bench: LoaderBench) -> Markup:
    """Samples per second by number of workers, and what training took of them."""
    rates = bench.measured
    most = max((rate.high for rate in rates), default=0.0)
    if not most > 0:
        return Markup()
    scale = Scale(0.0, most)
    height = 40 * len(rates)
    parts = columns(scale, height, lambda value: f"{value:,.0f}")
    for row, rate in enumerate(rates):
        top = row * 40
        told = f"{_workers(rate.workers)}: {speed(rate.samples_per_s)}, windows {rate.low:,.0f} to {rate.high:,.0f}"
        marked = mark(bench, rate)
        label = _workers(rate.workers) + (f" ({marked})" if marked else "")
        parts += [text("label halo", 0, top + 15, label), text("value halo", 100, top + 15, speed(rate.samples_per_s))]
        kind = "plan" if bench.best is rate else "old"
        parts.append(rect(kind, (scale(0.0), scale(rate.samples_per_s)), top + 21, 14, told))
    if bench.consumed is not None and bench.consumed.samples_per_s <= most:
        at = scale(bench.consumed.samples_per_s)
        parts.append(rect("loss", (at - 0.15, at + 0.15), 0, height, "what the training took"))
    told = ", ".join(f"{_workers(rate.workers)} {speed(rate.samples_per_s)}" for rate in rates)
    return svg("Samples per second by number of workers", told, height + 22, parts)


def stage_chart(bench: LoaderBench) -> Markup:
    """The stages of a batch as one bar."""
    rows = stage_rows(bench)
    if not rows:
        return Markup()
    parts, start = [], 0.0
    for name, told, _seconds, share in rows:
        ends = (100 * start, 100 * (start + share))
        parts.append(rect(f"st-{name}", ends, 0, 30, f"{told}: {words.percent(share)}"))
        start += share
    return svg("Where the time of a batch goes", ", ".join(f"{r[1]} {words.percent(r[3])}" for r in rows), 30, parts)
