"""What is asked, in which order: the script as it is, all on, the search, compiling, the claim. No torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

from hasten.techniques import Liveness
from hasten.warm.blocks import Wish
from hasten.warm.course import AS_GOOD, Course
from hasten.warm.options import WarmOptions
from hasten.warm.record import Event, Measured

_WARM_UP = 3  # steps of a new process that do not count: kernels are chosen, memory is first touched
_COMPILE_BLOCKS = 5
_COMPILE_SECONDS = 30.0  # left of the search, or compiling is not tried
_COMPILE_SAVES = 0.3  # of a step at the most, as a rule
_COMPILE_WORTH = 2.0  # compiling may be tried where that, over the full training, is so many times what it takes
# Compiled kernels are kept for the run to come: of a small ResNet's 31 s it pays 8 again (tracing, loading). Where this
# search found them there, it took those 8 itself.
_AGAIN, _AGAIN_SECONDS = 0.3, 8.0
_SEARCHING = 0.85  # of the search's time; then the best sets are measured in turn
_PLAIN_EVERY = 12  # blocks of the search, of which one is of the script as it is
_ROUNDS = 3
_STEPS = 6  # that a block takes at the least, with those behind the switch that do not count
_LATE = 5.0  # seconds that the last round may take longer
_LEAST_PAIRS, _MOST_PAIRS = 3, 8
_MOST_TURNS = 3 * _MOST_PAIRS  # with the pairs that others disturbed


class Host(Protocol):
    """What the schedule asks of the driver."""

    @property
    def compiling(self) -> float:
        """Seconds of the last block's steps that did not count."""

    @property
    def by_pass(self) -> set[int]:
        """The candidates that are switched with a pass."""

    def note(self, event: Event) -> None:
        """Write an event into the record."""


Wishes = Generator[Wish, Measured, None]


def schedule(course: Course, options: WarmOptions, host: Host) -> Wishes:
    """Ask for one block after the other."""
    plan = frozenset(options.plan) if options.plan is not None else None
    if plan is None:
        yield from search(course, options)
        yield from play_off(course, options, host)
        yield from _compile(course, options, host)
        plan = course.chosen()
    host.note(Event("chosen", tuple(sorted(plan))))
    if plan:
        yield from _claim(plan, course, options, host)


def search(course: Course, options: WarmOptions) -> Wishes:
    """Ask for the script as it is, all on, and then what draws from the posterior take to help."""
    began = time.monotonic()
    plain: frozenset[int] = frozenset()
    yield from ask(course, Wish(plain, "baseline", skip=_WARM_UP))
    if not options.former:  # a process before this one has asked this
        yield from ask(course, Wish(plain, "baseline", skip=0))
        for _ in range(2):
            yield from ask(course, Wish(course.all_on(), "all on"))
    aside = _COMPILE_SECONDS if _may_pay(course, options) else 0.0
    until = began + _SEARCHING * max(0.0, options.search_until - began - aside)
    asked = 0
    while time.monotonic() < until and course.doubtful():
        asked += 1
        # The script as it is now and then, so that drift is not taken for the effect of what was on meanwhile.
        on = course.wants() if asked % _PLAIN_EVERY else plain
        yield from ask(course, Wish(on, "search" if on else "baseline"))


def play_off(course: Course, options: WarmOptions, host: Host) -> Wishes:
    """Measure the sets that may be the best in turn, and settle on one: what the posterior adds up may not be so."""
    finalists = course.finalists()
    if not finalists:
        return
    blocks: dict[frozenset[int], list[Measured]] = {on: [] for on in finalists}
    each = (_STEPS * math.exp(course.posterior.level) + options.block_seconds) * len(finalists)
    rounds = min(_ROUNDS, int((options.search_until + _LATE - time.monotonic()) / each))
    for turn in range(rounds if rounds > 1 else 0):
        for on in finalists[:: -1 if turn % 2 else 1]:
            if len(finalists) < 2 or time.monotonic() > options.search_until + _LATE:
                break
            measured = yield Wish(on, "play-off", exact=bool(on & host.by_pass))
            if _saw(course, measured):
                blocks[on].append(measured)
    paces = _comparable(blocks)
    # Time may end within a round: as many of each are compared as all have that were measured.
    rounds = min((len(seen) for seen in paces.values() if seen), default=0)
    known = {on: statistics.fmean(seen[:rounds]) for on, seen in paces.items() if seen}
    if len(known) > 1:
        fastest = min(known.values())
        # The first is the one whose parts are all sure: others must be clearly faster.
        settled = next(on for on in finalists if on in known and known[on] <= fastest + AS_GOOD)
    elif len(finalists) > 1:  # no time for it: what the posterior adds up, and never ran, may be far off
        settled = course.best_measured()
    else:
        return
    _settle(settled, course, host)


def _settle(on: frozenset[int], course: Course, host: Host) -> None:
    course.settle(on)
    host.note(Event("settled", tuple(sorted(on))))


def _comparable(blocks: Mapping[frozenset[int], Sequence[Measured]]) -> dict[frozenset[int], list[float]]:
    """log(seconds per step) of the blocks that nobody disturbed, where each set has such; else of all."""
    quiet = all(any(not one.disturbed for one in seen) for seen in blocks.values() if seen)
    return {
        on: [math.log(one.step_seconds) for one in seen if not (quiet and one.disturbed)] for on, seen in blocks.items()
    }


def ask(course: Course, wish: Wish) -> Wishes:
    """Ask for a block, and take it in."""
    _saw(course, (yield wish))


def _saw(course: Course, measured: Measured) -> bool:
    """Take a block in; whether it counts."""
    if not measured.trouble:
        course.saw(measured.on, measured.step_seconds, disturbed=measured.disturbed)
    return not measured.trouble


def _may_pay(course: Course, options: WarmOptions) -> bool:
    """Whether compiling could be won back in the full training."""
    if not course.of(Liveness.LAST) - set(course.out):
        return False
    most = _COMPILE_SAVES * math.exp(course.posterior.level) * options.total_steps
    return most > _COMPILE_WORTH * _COMPILE_SECONDS


def _compile(course: Course, options: WarmOptions, host: Host) -> Wishes:
    """Compile once, on what won, where it may be won back in the full training."""
    for index in sorted(course.of(Liveness.LAST) - set(course.out)):
        if not _may_pay(course, options):
            why = f"compiling takes {_COMPILE_SECONDS:.0f} s or so, more than it could save in a training this short"
            course.drop([index], why)
            host.note(Event("not worth it", (index,), text=why))
            continue
        if options.search_until - time.monotonic() < _COMPILE_SECONDS:
            host.note(Event("not asked", (index,), text="compiling takes longer than the time that was left"))
            continue
        chosen = course.chosen()
        expected = math.exp(course.posterior.level + course.posterior.gain(chosen)[0])
        blocks: dict[frozenset[int], list[Measured]] = {chosen: [], chosen | {index}: []}
        for turn in range(_COMPILE_BLOCKS):
            measured = yield Wish(chosen | {index}, "compile", skip=3, expected=expected)
            if not turn:
                cost = max(0.0, host.compiling - 3 * expected)
            _note(measured, course, blocks)
            _note((yield Wish(chosen, "compile")), course, blocks)
            if time.monotonic() > options.search_until + _COMPILE_SECONDS:
                break
        host.note(Event("compiled", (index,), cost))
        if not all(blocks.values()):  # one of the two never ran well: nothing is known of what compiling brings
            continue
        plain, compiled = (statistics.median(seen) for seen in _comparable(blocks).values())
        saved = max(0.0, math.exp(plain) - math.exp(compiled)) * options.total_steps
        again = max(_AGAIN * cost, min(cost, _AGAIN_SECONDS))
        if saved < again:
            why = f"a run pays {again:.0f} s for compiling, which saves {saved:.0f} s of the full training"
            course.drop([index], why)
            host.note(Event("not worth it", (index,), text=why))
        elif compiled < plain - AS_GOOD:
            _settle(chosen | {index}, course, host)  # measured in turn just now


def _note(measured: Measured, course: Course, blocks: dict[frozenset[int], list[Measured]]) -> None:
    """A block of compiling counts for the set that was asked for, unless that did not act."""
    if _saw(course, measured):
        blocks.get(frozenset(measured.on), []).append(measured)


def _claim(plan: frozenset[int], course: Course, options: WarmOptions, host: Host) -> Wishes:
    """Baseline and plan in turn, A B B A; how many pairs is settled by the time there is, behind the first.

    A pair that others disturbed is measured again, as long as there is time.
    """
    exact = bool(plan & host.by_pass)
    plain: frozenset[int] = frozenset()
    pairs, turn, quiet, each = _MOST_PAIRS, 0, 0, 0.0
    while turn < pairs or (quiet < pairs and turn < _MOST_TURNS and time.monotonic() + each < options.claim_until):
        began, disturbed = time.monotonic(), False
        for on, part in ((plain, "plain"), (plan, "plan"))[:: -1 if turn % 2 else 1]:
            expected = math.exp(course.posterior.level + course.posterior.gain(on)[0]) if course.posterior.seen else 0.0
            measured = yield Wish(on, part, exact=exact, expected=expected)
            disturbed = disturbed or measured.disturbed
        if not turn:
            each = max(1e-3, time.monotonic() - began)
            pairs = max(_LEAST_PAIRS, min(_MOST_PAIRS, 1 + int((options.claim_until - time.monotonic()) / each)))
        turn += 1
        quiet += not disturbed
