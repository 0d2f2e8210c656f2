"""The order of measurements: the script as it is, all on, the search, compiling, the claim. No torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Protocol

from hasten.online.blocks import Wish
from hasten.online.course import AS_GOOD, Course
from hasten.online.options import OnlineOptions
from hasten.online.record import Event, Measured
from hasten.techniques import Liveness

_WARM_UP = 3  # steps of a new process that do not count: kernels are chosen, memory is first touched
_COMPILE_BLOCKS = 5
_COMPILE_SECONDS = 30.0  # left of the search on a quiet machine, or compiling is not tried
_MOST_TAKEN = 0.9  # of the CPU: what others take beyond that makes compiling no longer in what it is expected to take
_COMPILE_SAVES = 0.3  # of a step at the most, as a rule
_COMPILE_WORTH = 2.0  # compiling may be tried where that, over the full training, is so many times what it takes
# Compiled kernels are kept for the run to come: of a small ResNet's 31 s it pays 8 again (tracing, loading). Where this
# search found them there, it took those 8 itself.
_AGAIN, _AGAIN_SECONDS = 0.3, 8.0
_PLAIN_EVERY = 12  # blocks of the search, of which one is of the script as it is
_ROUNDS = 3  # in which the best sets are measured in turn
_SETTLING = (0.15, 0.4)  # of the search's time that is kept for these, at the least and at the most
_FEW_ROUNDS = 6  # blocks: two rounds of three sets, which it is kept for in between
_LEAST_PAIRS, _MOST_PAIRS = 3, 8
_MOST_TURNS = 3 * _MOST_PAIRS  # with the pairs that others disturbed

TOO_SHORT_TO_COMPILE = (
    f"compiling takes {_COMPILE_SECONDS:.0f} s or so, more than it could save in a training this short"
)


class Host(Protocol):
    """The driver as the schedule sees it."""

    @property
    def compiling(self) -> float:
        """Seconds of the last block's steps that did not count."""

    @property
    def by_pass(self) -> set[int]:
        """The candidates that are switched with a pass."""

    def note(self, event: Event) -> None:
        """Write an event into the record."""


Wishes = Generator[Wish, Measured, None]


def schedule(course: Course, options: OnlineOptions, host: Host) -> Wishes:
    """Ask for one block after the other."""
    plan = frozenset(options.plan) if options.plan is not None else None
    if plan is None:
        if options.settled is not None:  # the script came to its end behind that: what it had settled stands
            course.settle(frozenset(options.settled))
            yield from ask(course, Wish(frozenset(), "baseline", skip=_WARM_UP))  # how fast this process is
        else:
            yield from search(course, options)
            yield from play_off(course, options, host)
        yield from _compile(course, options, host)
        plan = course.chosen()
    host.note(Event("chosen", tuple(sorted(plan))))
    if plan:
        yield from _claim(plan, course, options, host)


def search(course: Course, options: OnlineOptions) -> Wishes:
    """Ask for the script as it is, all on, and then what draws from the posterior take to help."""
    began = time.monotonic()
    plain: frozenset[int] = frozenset()
    yield from ask(course, Wish(plain, "baseline", skip=_WARM_UP))
    if not options.former:  # a process before this one has asked this
        # Where a budget bears few blocks, the first with all on is worth more than those around it.
        if _bears(3, course, options):
            yield from ask(course, Wish(plain, "baseline", skip=0))
        yield from ask(course, Wish(course.all_on(), "all on"))
        if _bears(1, course, options):
            yield from ask(course, Wish(course.all_on(), "all on"))
    asked = 0
    while time.monotonic() + course.block_seconds < _settling_from(began, course, options) and course.doubtful():
        asked += 1
        # The script as it is now and then, so that drift is not taken for the effect of what was on meanwhile.
        on = course.wants() if asked % _PLAIN_EVERY else plain
        yield from ask(course, Wish(on, "search" if on else "baseline"))


def play_off(course: Course, options: OnlineOptions, host: Host) -> Wishes:
    """Measure the sets that may be the best in turn, and settle on one: what the posterior adds up may not be so."""
    finalists = course.finalists()
    if not finalists:
        return
    blocks: dict[frozenset[int], list[Measured]] = {on: [] for on in finalists}
    rounds = next((n for n in range(_ROUNDS, 1, -1) if _bears(n * len(finalists), course, options)), 0)
    for turn in range(rounds):
        for on in finalists[:: -1 if turn % 2 else 1]:
            if len(finalists) < 2 or not _bears(1, course, options):
                break
            measured = yield from _block(course, Wish(on, "play-off", exact=bool(on & host.by_pass)))
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
    _saw(course, (yield from _block(course, wish)))


def _block(course: Course, wish: Wish) -> Generator[Wish, Measured, Measured]:
    """Ask for a block; what it takes, with the steps in front of it that do not count, tells what the next will."""
    began = time.monotonic()
    measured = yield wish
    course.took(time.monotonic() - began, measured.taken)
    return measured


def _search_end(course: Course, options: OnlineOptions) -> float:
    """When the search must be over: three pairs of the claim fit behind it, as long as blocks take here."""
    return min(options.search_until, options.claim_until - 2 * _LEAST_PAIRS * course.block_seconds)


def _bears(blocks: int, course: Course, options: OnlineOptions) -> bool:
    """Whether the search has time for so many more blocks."""
    return time.monotonic() + blocks * course.block_seconds <= _search_end(course, options)


def _settling_from(began: float, course: Course, options: OnlineOptions) -> float:
    """When the best sets begin to be measured in turn."""
    aside = _compile_seconds(course, options) if _may_pay(course, options) else 0.0
    whole = max(0.0, _search_end(course, options) - began - aside)
    least, most = (share * whole for share in _SETTLING)
    return began + whole - min(most, max(least, _FEW_ROUNDS * course.block_seconds))


def _saw(course: Course, measured: Measured) -> bool:
    """Take a block in; whether it counts."""
    if not measured.trouble:
        course.saw(measured.on, measured.step_seconds, disturbed=measured.disturbed)
    return not measured.trouble


def _may_pay(course: Course, options: OnlineOptions) -> bool:
    """Whether compiling could be won back in the full training."""
    if not course.of(Liveness.LAST) - set(course.out):
        return False
    return compiling_may_pay(math.exp(course.posterior.level), options.total_steps)


def compiling_may_pay(step: float, steps: int) -> bool:
    """Whether compiling could be won back in so many steps of so many seconds."""
    return _COMPILE_SAVES * step * steps > _COMPILE_WORTH * _COMPILE_SECONDS


def _compile_seconds(course: Course, options: OnlineOptions) -> float:
    """What compiling may take: beside others it has less of the CPU; what was compiled before is kept on disk."""
    if options.compiling is not None:
        return _again(options.compiling) + 2 * _COMPILE_BLOCKS * course.block_seconds
    return _COMPILE_SECONDS / (1 - min(_MOST_TAKEN, course.taken))


def _again(cost: float) -> float:
    """Return the seconds of compiling another time, by those that it took once."""
    return max(_AGAIN * cost, min(cost, _AGAIN_SECONDS))


def _compile(course: Course, options: OnlineOptions, host: Host) -> Wishes:
    """Compile once, on what won, where it may be won back in the full training."""
    for index in sorted(course.of(Liveness.LAST) - set(course.out) - course.chosen()):
        if not _may_pay(course, options):
            course.drop([index], TOO_SHORT_TO_COMPILE)
            host.note(Event("not worth it", (index,), text=TOO_SHORT_TO_COMPILE))
            continue
        if _search_end(course, options) - time.monotonic() < _compile_seconds(course, options):
            host.note(Event("not asked", (index,), text="compiling takes longer than the time that was left"))
            continue
        chosen = course.chosen()
        expected = math.exp(course.posterior.level + course.posterior.gain(chosen)[0])
        blocks: dict[frozenset[int], list[Measured]] = {chosen: [], chosen | {index}: []}
        for turn in range(_COMPILE_BLOCKS):
            measured = yield from _block(course, Wish(chosen | {index}, "compile", skip=3, expected=expected))
            if not turn:
                cost = max(0.0, host.compiling - 3 * expected)
                host.note(Event("compiled", (index,), cost))
            _note(measured, course, blocks)
            _note((yield from _block(course, Wish(chosen, "compile"))), course, blocks)
            # It may have taken longer than expected: three pairs of the claim are worth more than one more of these.
            last = time.monotonic() + (2 + 2 * _LEAST_PAIRS) * course.block_seconds > options.claim_until
            faster, saved = _compiled(blocks, options.total_steps)
            if turn or last:  # the script may come to its end behind any block: what was measured until then stands
                _settle(chosen | {index} if faster and saved >= _again(cost) else chosen, course, host)
            if last:
                break
        if all(blocks.values()) and saved < _again(cost):
            why = f"a run pays {_again(cost):.0f} s for compiling, which saves {saved:.0f} s of the full training"
            course.drop([index], why)
            host.note(Event("not worth it", (index,), text=why))


def _compiled(blocks: Mapping[frozenset[int], Sequence[Measured]], steps: int) -> tuple[bool, float]:
    """Whether steps are faster compiled, and the seconds that so many save, by blocks without and with it in turn."""
    if not all(blocks.values()):  # one of the two never ran well: nothing is known of what compiling brings
        return False, 0.0
    plain, compiled = (statistics.median(seen) for seen in _comparable(blocks).values())
    return compiled < plain - AS_GOOD, max(0.0, math.exp(plain) - math.exp(compiled)) * steps


def _note(measured: Measured, course: Course, blocks: dict[frozenset[int], list[Measured]]) -> None:
    """A block of compiling counts for the set that was asked for, unless that did not act."""
    if _saw(course, measured):
        blocks.get(frozenset(measured.on), []).append(measured)


def _claim(plan: frozenset[int], course: Course, options: OnlineOptions, host: Host) -> Wishes:
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
