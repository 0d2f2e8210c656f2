"""Draw the course of a search: its blocks over time, the pace of each, and which techniques were on.

A block's pace is how many times faster it ran than the plain blocks, those in which no technique was on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from hasten.report import words
from hasten.report.drawing import Scale, columns, rect, svg, text
from hasten.tuner.proof import Block, Proof, beside_others

PARTS = ("all on", "search", "compile", "claim")
_PLOT = 220.0
_STRIP = 30


def plain_step(blocks: Iterable[Block]) -> float | None:
    """Return the unchanged script's seconds per step: the median of the blocks in which no technique was on.

    Undisturbed blocks are used if there are any. None if no such block gave a usable time.
    """
    plain = [block for block in blocks if not block.on and _counts(block)]
    quiet = [block for block in plain if not block.disturbed]
    return statistics.median(block.step_seconds for block in quiet or plain) if plain else None


def pace(block: Block, plain: float | None) -> float | None:
    """Return roughly how many times faster a block ran than the unchanged script; None if unknown.

    The claim compares blocks that ran one right after the other, so it may be lower than the best pace.
    """
    return plain / block.step_seconds if plain and _counts(block) else None


def part_class(part: str) -> str:
    """Return the CSS class of a part of the search, which sets its colour."""
    return f"part-{part.replace(' ', '-')}" if part in PARTS else "part-other"


def parts_of(blocks: Iterable[Block]) -> list[str]:
    """Return the parts of the search that occur in `blocks`, in order; unknown parts come last."""
    occurring = {block.part for block in blocks}
    return [part for part in PARTS if part in occurring] + sorted(occurring - set(PARTS))


def course_chart(proof: Proof) -> Markup:
    """Draw the blocks over the tune's seconds: their pace above, the techniques that were on below.

    Returns empty markup if no block has a pace.
    """
    blocks = [block for block in proof.blocks if words.known(block.at) and words.known(block.seconds)]
    plain = plain_step(blocks)
    paces = [block_pace for block in blocks if (block_pace := pace(block, plain)) is not None]
    if not paces:
        return Markup()
    x_scale = Scale(0.0, max(proof.used_seconds, *(block.at + block.seconds for block in blocks)))
    claim = _claimed(proof)
    y_scale = Scale(min(0.9, *paces, *claim), max(1.1, *paces, *claim), log=True, near=93, far=7)
    shapes = [*_grid(y_scale), *_claim(claim, y_scale), *_blocks(blocks, plain, x_scale, y_scale)]
    height = _PLOT
    for name, spans in _spans(proof, blocks).items():
        shapes += _strip(name, spans, x_scale, height)
        height += _STRIP
    shapes = [*columns(x_scale, height, words.duration), *shapes]
    return svg("The course of the search", _description(blocks, paces), height + 22, shapes)


def _counts(block: Block) -> bool:
    return not block.trouble and words.known(block.step_seconds) and block.step_seconds > 0


def _grid(y_scale: Scale) -> list[Markup]:
    """Return horizontal grid lines at round paces, with 1x (the unchanged script) emphasized."""
    lines: list[Markup] = []
    # 1x gets a line of its own, so ticks at or next to it are left out.
    for tick in [*(tick for tick in y_scale.ticks() if abs(tick - 1) > 0.04), 1.0]:
        y, unchanged = y_scale(tick) * _PLOT / 100, tick == 1
        lines.append(rect("as-it-was" if unchanged else "grid", (0, 100), y - 0.5, 1.5 if unchanged else 1))
        lines.append(text("tick halo", 0, y - 4, "1x, the script as it was" if unchanged else f"{tick:g}x"))
    return lines


def _claimed(proof: Proof) -> tuple[float, ...]:
    """Return the claim as (low, ratio, high); empty if no technique was kept or an end is not known."""
    ratio = proof.speedup
    is_known = all(words.known(end) and end > 0 for end in (ratio.low, ratio.ratio, ratio.high))
    return (ratio.low, ratio.ratio, ratio.high) if proof.techniques and is_known else ()


def _claim(claim: Sequence[float], y_scale: Scale) -> list[Markup]:
    """Return the claim's interval as a band over the whole width, to compare the blocks' paces with."""
    if not claim:
        return []
    low, middle, high = (y_scale(end) * _PLOT / 100 for end in claim)
    description = f"claimed: {words.times(claim[1])}, {words.interval(claim[0], claim[2])}"
    band = rect("claimed", (0, 100), min(low, high), max(2.0, abs(low - high)), description)
    return [band, text("tick halo", 100, middle - 4, f"claimed {words.times(claim[1])}", "end")]


def _blocks(blocks: Sequence[Block], plain: float | None, x_scale: Scale, y_scale: Scale) -> list[Markup]:
    shapes = []
    for block in blocks:
        # A very short block keeps a visible width.
        ends = (x_scale(block.at), max(x_scale(block.at + block.seconds), x_scale(block.at) + 0.35))
        ratio = pace(block, plain)
        if ratio is None:
            description = f"{_when(block)}: not counted: {words.clean(block.trouble)}"
            shapes += [
                rect("trouble", ends, _PLOT - 12, 12, description),
                text("cross halo", sum(ends) / 2, _PLOT - 16, "\u00d7", "middle"),
            ]
            continue
        description = f"{_when(block)}, {words.clean(block.part)}: {words.times(ratio)} ({_names_on(block)})"
        kind = part_class(block.part)
        if block.disturbed:
            description, kind = f"{description}, disturbed:{beside_others(block.taken)}", f"{kind} disturbed"
        shapes.append(rect(kind, ends, y_scale(ratio) * _PLOT / 100 - 4, 8, description))
    return shapes


def _strip(name: str, spans: Sequence[tuple[float, float, str]], x_scale: Scale, top: float) -> list[Markup]:
    """Return the strip of one technique: the spans of time in which it was on."""
    shapes = [text("label halo", 0, top + 18, name), rect("off", (0, 100), top + 23, 5)]
    for start, end, switched in spans:
        description = f"{switched} on from {words.duration(start)} to {words.duration(end)}"
        shapes.append(rect("on", (x_scale(start), max(x_scale(end), x_scale(start) + 0.35)), top + 23, 5, description))
    return shapes


def _spans(proof: Proof, blocks: Sequence[Block]) -> dict[str, list[tuple[float, float, str]]]:
    """Return when each technique was on, the plan's techniques first. Consecutive blocks merge into one span."""
    names = [technique.name for technique in proof.techniques] + [
        entry.partition("=")[0] for block in blocks for entry in block.on
    ]
    on_somewhere = {entry.partition("=")[0] for block in blocks for entry in block.on}
    return {words.clean(name): _on_from(name, blocks) for name in dict.fromkeys(names) if name in on_somewhere}


def _on_from(name: str, blocks: Sequence[Block]) -> list[tuple[float, float, str]]:
    """Return (start, end, entry) of each span in which a technique was on with one setting."""
    spans: list[tuple[float, float, str]] = []
    previous = ""
    for block in blocks:
        entry = next((candidate for candidate in block.on if candidate.partition("=")[0] == name), "")
        end = block.at + block.seconds
        if entry and entry == previous:
            spans[-1] = (spans[-1][0], end, spans[-1][2])
        elif entry:
            spans.append((block.at, end, words.clean(entry)))
        previous = entry
    return spans


def _when(block: Block) -> str:
    return f"from {words.duration(block.at)} for {words.duration(block.seconds)}"


def _names_on(block: Block) -> str:
    return words.clean(", ".join(block.on)) or "the script as it was"


def _description(blocks: Sequence[Block], paces: Sequence[float]) -> str:
    counts = [f"{words.clean(part)} {sum(block.part == part for block in blocks)}" for part in parts_of(blocks)]
    failed = sum(not _counts(block) for block in blocks)
    disturbed = sum(block.disturbed for block in blocks)
    disturbed_text = f", {disturbed} disturbed by others" if disturbed else ""
    return (
        f"{words.count(len(blocks), 'block')} ({', '.join(counts)}), {failed} of them not counted{disturbed_text}; "
        f"the script as it was is 1x, the slowest block ran at {words.times(min(paces))}, "
        f"the fastest at {words.times(max(paces))}"
    )
