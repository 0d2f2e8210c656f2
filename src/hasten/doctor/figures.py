"""Arithmetic on evidence that several findings share."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence

from hasten.doctor.rule import Rule
from hasten.evidence import Event, Evidence, Finding, HowKnown, Layer, LoaderFacts, Severity, Stages
from hasten.evidence.waiting import EpochStart, data_share, in_ms, ordinary_seconds, per_step, stages_of, worth_of_waits
from hasten.evidence.weigh import LEAST, share_of

BOUND = 0.10  # share of the step from which a training counts as bound by its data
GRAPHS = 5  # that are alive at once before they count as kept


# -- calls and waits of the loop --------------------------------------------------------------------------


def timed_calls(
    rule: type[Rule], evidence: Evidence, kind: str, what: Callable[[Event, str], str], fix: str
) -> Iterator[Finding | None]:
    """Yield a finding a line on calls whose time was measured.

    Args:
        rule: Whose finding it is.
        evidence: Of the run.
        kind: Of event, such as "gc_collect".
        what: Says what was seen, from the event and "12 times in 200 steps, 3.1 ms a step".
        fix: What to do.
    """
    for event in evidence.events_of(kind):
        spent = per_step(evidence, [event])
        often = f"{event.count} times in {evidence.steps} steps, {in_ms(spent)} a step"
        worth = share_of(evidence, spent)
        yield rule.timed(what(event, often), fix, worth, HowKnown.MEASURED, place=event.where)


def by_line(events: list[Event]) -> list[list[Event]]:
    """Events of the same line together, the costliest line first."""
    lines: dict[str, list[Event]] = {}
    for event in events:
        lines.setdefault(event.where, []).append(event)
    return list(lines.values())


def wait_finding(
    rule: type[Rule], evidence: Evidence, events: list[Event], what: str, fix: str, details: tuple[str, ...] = ()
) -> Iterator[Finding | None]:
    """A finding on events of one line in which the CPU waits for the GPU."""
    worth, spent = worth_of_waits(evidence, events), per_step(evidence, events)
    where = events[0].where
    if worth is not None:
        yield rule.timed(what, fix, worth, HowKnown.ESTIMATED, place=where, details=details)
    elif share_of(evidence, spent) >= LEAST:
        unknown = "what it costs depends on how busy the GPU is meanwhile, which is not known here"
        yield rule.finding(what, fix, Severity.NOTE, place=where, details=(*details, unknown))


# -- workers ---------------------------------------------------------------------------------------------


def opening_share(evidence: Evidence, loader: LoaderFacts, start: EpochStart) -> float:
    """Share of an epoch in which its workers are being started; 0 where they stay."""
    if loader.persistent_workers or not loader.num_workers:
        return 0.0
    seconds = start.opening
    if loader.start_method != "fork":  # these come up after `iter(loader)` has returned
        seconds = max(seconds, start.pause - making_seconds(evidence, loader, start.waiting))
    return min(1.0, seconds / start.epoch)


def making_seconds(evidence: Evidence, loader: LoaderFacts, most: float) -> float:
    """Seconds in which one worker makes a batch, at most `most`: as sampled, else what its pace allows."""
    stages = stages_of(evidence, loader)
    return min(most, stages.seconds if stages is not None else loader.num_workers * ordinary_seconds(evidence))


def sampled_stages(evidence: Evidence) -> tuple[LoaderFacts, Stages] | None:
    """The training loader and its stages, where its batches are waited for and were looked into."""
    loader = evidence.train_loader
    if loader is None or data_share(evidence) < BOUND:
        return None
    stages = stages_of(evidence, loader)
    return (loader, stages) if stages is not None else None


# -- what torch.compile did, and what long steps lost -----------------------------------------------------


def lost_in_outliers(evidence: Evidence, computing: float = 0.0) -> float:
    """Share of the steady steps' time that steps over three times as long as the median took beyond it.

    Args:
        evidence: Of the run.
        computing: What the operators of a step take, where that is known: the median may be an outlier itself.
    """
    lengths = [sum(evidence.step_phases[step]) for step in evidence.steady()]
    if not lengths or sum(lengths) <= 0:
        return 0.0
    middle = min(statistics.median(lengths), computing or math.inf)
    return sum(length - middle for length in lengths if length > 3 * middle) / sum(lengths)


def by_place(reasons: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The reasons that torch gave, by the last line of the script that they name."""
    found: dict[str, tuple[str, ...]] = {}
    for reason in reasons:
        place = place_in(reason)
        if reason not in found.get(place, ()):
            found[place] = (*found.get(place, ()), reason)
    return found


def place_in(reason: str) -> str:
    """`file:line` in a text of torch's, past its own files; "" if there is none.

    >>> place_in('call to print\\n  File "/home/me/train.py", line 12, in forward')
    '/home/me/train.py:12'
    """
    places = [
        f"{file}:{line}"
        for pattern in (r'File "([^"\n]+)", line (\d+)', r"([^\s\"'(]+\.py):(\d+)")
        for file, line in re.findall(pattern, reason)
    ]
    own = [place for place in places if "site-packages" not in place and "/torch/" not in place]
    return (own or places or [""])[-1]


def first_line_of(reason: str, place: str) -> str:
    line = next((line.strip() for line in reason.splitlines() if line.strip()), "").removeprefix(f"{place}: ")
    return line if len(line) <= 160 else f"{line[:157]}..."


# -- layers and graphs ------------------------------------------------------------------------------------


def norm_of(evidence: Evidence, layer: Layer) -> str:
    """Class of the normalisation that takes a layer's output and the mean of each channel from it; "" if none does.

    A LayerNorm takes its mean over the channels, and a GroupNorm over several, so a bias in front of them stays.
    """
    path, _, kind = layer.normed_by.partition(" (")
    kind = kind.rstrip(")") or next((other.kind for other in evidence.layers if path and other.path == path), "")
    return "" if "LayerNorm" in kind or "RMSNorm" in kind else kind


def kept_losses(count: int, detail: str, steps: int) -> bool:
    """Whether so many living graphs are most of those that were watched ("7 of 8", else all steps)."""
    total = re.search(r"of (\d+)", detail)
    watched = int(total[1]) if total else steps
    return count >= GRAPHS and 2 * count >= watched
