"""Compute figures from evidence that several findings share."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence

from hasten.doctor.rule import Rule
from hasten.evidence import Event, Evidence, Finding, HowKnown, Layer, LoaderFacts, Severity, Stages
from hasten.evidence.waiting import EpochStart, data_share, in_ms, ordinary_seconds, per_step, stages_of, worth_of_waits
from hasten.evidence.weigh import LEAST, share_of

BOUND = 0.10  # share of the step spent waiting for data from which a training counts as bound by its data
GRAPHS = 5  # graphs alive at once from which they count as kept


# -- calls and waits of the loop --------------------------------------------------------------------------


def timed_calls(
    rule: type[Rule], evidence: Evidence, kind: str, describe: Callable[[Event, str], str], fix: str
) -> Iterator[Finding | None]:
    """Yield a finding per line for calls whose time was measured.

    Args:
        rule: The rule to make the findings with.
        evidence: The run's evidence.
        kind: The kind of event, such as "gc_collect".
        describe: Returns the finding's text from the event and a text like "12 times in 200 steps, 3.1 ms a step".
        fix: What to do.
    """
    for event in evidence.events_of(kind):
        seconds = per_step(evidence, [event])
        frequency = f"{event.count} times in {evidence.steps} steps, {in_ms(seconds)} a step"
        worth = share_of(evidence, seconds)
        yield rule.timed(describe(event, frequency), fix, worth, HowKnown.MEASURED, place=event.where)


def group_by_line(events: list[Event]) -> list[list[Event]]:
    """Group events by line, in order of first occurrence: the costliest first, as `Evidence.events_of` sorts them."""
    lines: dict[str, list[Event]] = {}
    for event in events:
        lines.setdefault(event.where, []).append(event)
    return list(lines.values())


def wait_finding(
    rule: type[Rule], evidence: Evidence, events: list[Event], what: str, fix: str, details: tuple[str, ...] = ()
) -> Iterator[Finding | None]:
    """Yield a finding on events of one line in which the CPU waits for the GPU.

    If its worth cannot be estimated, the finding is a note, given that the waits take a share of the step that counts.
    """
    worth, seconds = worth_of_waits(evidence, events), per_step(evidence, events)
    place = events[0].where
    if worth is not None:
        yield rule.timed(what, fix, worth, HowKnown.ESTIMATED, place=place, details=details)
    elif share_of(evidence, seconds) >= LEAST:
        unknown = "its cost depends on how busy the GPU is at that time, which is not known here"
        yield rule.finding(what, fix, Severity.NOTE, place=place, details=(*details, unknown))


# -- workers ---------------------------------------------------------------------------------------------


def worker_startup_share(evidence: Evidence, loader: LoaderFacts, start: EpochStart) -> float:
    """Return the share of an epoch (0 to 1) that starting its workers takes; 0 for persistent workers or none."""
    if loader.persistent_workers or not loader.num_workers:
        return 0.0
    seconds = start.opening
    if loader.start_method != "fork":  # spawned workers start up after `iter(loader)` has returned
        seconds = max(seconds, start.pause - making_seconds(evidence, loader, start.waiting))
    return min(1.0, seconds / start.epoch)


def making_seconds(evidence: Evidence, loader: LoaderFacts, most: float) -> float:
    """Return the seconds in which one worker makes a batch, at most `most`.

    If the loader was not sampled, assume that its workers just keep pace with the steps.
    """
    stages = stages_of(evidence, loader)
    return min(most, stages.seconds if stages is not None else loader.num_workers * ordinary_seconds(evidence))


def sampled_stages(evidence: Evidence) -> tuple[LoaderFacts, Stages] | None:
    """Return the training loader and its stages; None if training is not bound by data, or no batch was sampled."""
    loader = evidence.train_loader
    if loader is None or data_share(evidence) < BOUND:
        return None
    stages = stages_of(evidence, loader)
    return (loader, stages) if stages is not None else None


# -- what torch.compile did, and what long steps lost -----------------------------------------------------


def lost_in_outliers(evidence: Evidence, computing: float = 0.0) -> float:
    """Return the share of the steady steps' time that outliers took beyond an ordinary step.

    An outlier is over three times as long as an ordinary step, whose length is the median.

    Args:
        evidence: The run's evidence.
        computing: Seconds that the operators of a step take, if known, else 0. If this is less than the median, it is
            used instead: with many outliers, the median may be one itself.
    """
    lengths = [sum(evidence.step_phases[step]) for step in evidence.steady()]
    if not lengths or sum(lengths) <= 0:
        return 0.0
    typical = min(statistics.median(lengths), computing or math.inf)
    return sum(length - typical for length in lengths if length > 3 * typical) / sum(lengths)


def by_place(reasons: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group torch's reasons by the last line of the script that they name, each reason once."""
    grouped: dict[str, tuple[str, ...]] = {}
    for reason in reasons:
        place = place_in(reason)
        if reason not in grouped.get(place, ()):
            grouped[place] = (*grouped.get(place, ()), reason)
    return grouped


def place_in(reason: str) -> str:
    """Return the last `file:line` in a text of torch's, preferring files that are not torch's; "" without any.

    >>> place_in('call to print\\n  File "/home/me/train.py", line 12, in forward')
    '/home/me/train.py:12'
    """
    places = [
        f"{file}:{line}"
        for pattern in (r'File "([^"\n]+)", line (\d+)', r"([^\s\"'(]+\.py):(\d+)")
        for file, line in re.findall(pattern, reason)
    ]
    script_places = [place for place in places if "site-packages" not in place and "/torch/" not in place]
    return (script_places or places or [""])[-1]


def first_line_of(reason: str, place: str) -> str:
    """Return the first line of a reason without its place, cut to 160 characters."""
    line = next((line.strip() for line in reason.splitlines() if line.strip()), "").removeprefix(f"{place}: ")
    return line if len(line) <= 160 else f"{line[:157]}..."


# -- layers and graphs ------------------------------------------------------------------------------------


def norm_of(evidence: Evidence, layer: Layer) -> str:
    """Return the class of the norm that subtracts the mean of each channel from a layer's output; "" if none does.

    LayerNorm takes the mean over all channels, and GroupNorm over several, so they do not cancel a bias before them.
    """
    path, _, kind = layer.normed_by.partition(" (")
    kind = kind.rstrip(")") or next((other.kind for other in evidence.layers if path and other.path == path), "")
    return "" if "LayerNorm" in kind or "RMSNorm" in kind else kind


def kept_losses(count: int, detail: str, steps: int) -> bool:
    """Return whether enough graphs are alive to call the losses kept: at least `GRAPHS`, and half of those watched.

    Args:
        count: Graphs alive at once.
        detail: The event's detail, "7 of 8" watched.
        steps: Assumed number of watched graphs if `detail` tells none.
    """
    total = re.search(r"of (\d+)", detail)
    watched = int(total[1]) if total else steps
    return count >= GRAPHS and 2 * count >= watched
