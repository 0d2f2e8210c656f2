"""The order of measurements: the script as it is, all on, the search, compiling, the claim. No torch.

Each stage is a generator that yields a `BlockRequest` and receives the `MeasuredBlock`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

from hasten.online.blocks import BlockRequest
from hasten.online.course import AS_GOOD, Course
from hasten.online.options import OnlineOptions
from hasten.online.record import Event, MeasuredBlock
from hasten.techniques import Liveness

_WARM_UP = 3  # first steps of a new process, which do not count: kernels are chosen, memory is first touched
_COMPILE_BLOCKS = 5
_COMPILE_SECONDS = 30.0  # that must be left of the search, on a quiet machine, or compiling is not tried
_MOST_FOR_COMPILE = 0.75  # of the search's time: if compiling needs more, the other techniques get all of it
_MOST_TAKEN = 0.9  # of the CPU: upper bound of others' share in the estimate of how long compiling takes
_COMPILE_SAVES = 0.3  # of a step: what compiling usually saves at most
_COMPILE_WORTH = 2.0  # compiling is tried if it may save this multiple of its own time in the full training
# Compiled kernels stay in Inductor's cache for the later run: it pays again for tracing and loading only, 8 of a small
# ResNet's 31 s. If this search already found them there, it paid those 8 itself.
_WARM_CACHE, _WARM_CACHE_SECONDS = 0.3, 8.0
# Within a user's own run, compiling is tried if a usual saving over the steps left is this multiple of its time: more
# careful than in a tune, since the run loses those seconds if compiling saves nothing.
_USUAL_SAVING, _WORTH_IN_RUN = 0.15, 1.5
_PLAIN_EVERY = 12  # of so many blocks of the search, one measures the script as it is
_ROUNDS = 3  # of the play-off, in which the best sets are measured in turn
_SETTLING = (0.15, 0.4)  # least and most share of the search's time that is kept for the play-off
_FEW_ROUNDS = 6  # blocks: between those bounds, time for two rounds of three sets is kept
_LEAST_PAIRS, _MOST_PAIRS = 3, 8
_MOST_TURNS = 3 * _MOST_PAIRS  # including the pairs that other processes disturbed

TOO_SHORT_TO_COMPILE = (
    f"compiling takes {_COMPILE_SECONDS:.0f} s or so, more than it could save in a training this short"
)


class Host(Protocol):
    """What a schedule needs of the driver."""

    @property
    def compiling(self) -> float:
        """Seconds of the last block's uncounted steps."""

    @property
    def by_pass(self) -> set[int]:
        """The candidates that are switched only when a pass begins."""

    def note(self, event: Event) -> None:
        """Write an event to the record."""


BlockRequests = Generator[BlockRequest, MeasuredBlock, None]


def schedule(course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
    """Request all blocks of a tune, one after the other."""
    plan = frozenset(options.plan) if options.plan is not None else None
    if plan is None:
        if options.settled is not None:  # an earlier process settled it before its script ended
            course.settle(frozenset(options.settled))
            yield from request_block(
                course, BlockRequest(frozenset(), "baseline", skip=_WARM_UP)
            )  # the level of this process
        else:
            yield from search(course, options)
            yield from play_off(course, options, host)
        yield from _compile(course, options, host)
        plan = course.chosen()
    host.note(Event("chosen", tuple(sorted(plan))))
    if plan:
        yield from _claim(plan, course, options, host)


def search(course: Course, options: OnlineOptions) -> BlockRequests:
    """Measure the script as it is, then all on, then whatever helps according to draws from the posterior."""
    started_at = time.monotonic()
    plain: frozenset[int] = frozenset()
    yield from request_block(course, BlockRequest(plain, "baseline", skip=_WARM_UP))
    if not options.earlier_blocks:  # else an earlier process has measured these
        # If there is time for few blocks only, the first with all on tells more than repetitions.
        if _has_time_for(3, course, options):
            yield from request_block(course, BlockRequest(plain, "baseline", skip=0))
        yield from request_block(course, BlockRequest(course.all_on(), "all on"))
        if _has_time_for(1, course, options):
            yield from request_block(course, BlockRequest(course.all_on(), "all on"))
    block_count = 0
    while time.monotonic() + course.block_seconds < _settling_from(started_at, course, options) and course.doubtful():
        block_count += 1
        # Measure the script as it is now and then, so that drift is not mistaken for the effect of techniques.
        on = course.draw_set() if block_count % _PLAIN_EVERY else plain
        yield from request_block(course, BlockRequest(on, "search" if on else "baseline"))


def play_off(course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
    """Measure the finalists in turn, and settle on the fastest: real sets need not be the sums the posterior makes."""
    finalists = course.finalists()
    if not finalists:
        return
    blocks: dict[frozenset[int], list[MeasuredBlock]] = {on: [] for on in finalists}
    rounds = next((n for n in range(_ROUNDS, 1, -1) if _has_time_for(n * len(finalists), course, options)), 0)
    for turn in range(rounds):
        for on in finalists[:: -1 if turn % 2 else 1]:
            if len(finalists) < 2 or not _has_time_for(1, course, options):
                break
            measured = yield from _block(course, BlockRequest(on, "play-off", exact=bool(on & host.by_pass)))
            if _add(course, measured):
                blocks[on].append(measured)
    paces = _comparable(blocks)
    # Time may have ended within a round: compare as many blocks of each set as every set has.
    rounds = min((len(set_paces) for set_paces in paces.values() if set_paces), default=0)
    means = {on: statistics.fmean(set_paces[:rounds]) for on, set_paces in paces.items() if set_paces}
    if len(means) > 1:
        fastest = min(means.values())
        # The first finalist consists of sure candidates only: another one must be clearly faster to win.
        settled = next(on for on in finalists if on in means and means[on] <= fastest + AS_GOOD)
    elif len(finalists) > 1:  # no time for a play-off: a set that never ran may be far from its predicted speed
        settled = course.best_measured()
    else:
        return
    _settle(settled, course, host)


def _settle(on: frozenset[int], course: Course, host: Host) -> None:
    course.settle(on)
    host.note(Event("settled", tuple(sorted(on))))


def _comparable(blocks: Mapping[frozenset[int], Sequence[MeasuredBlock]]) -> dict[frozenset[int], list[float]]:
    """Return log(seconds per step) of each set's blocks: of the undisturbed ones, if every set has some."""
    quiet = all(any(not block.disturbed for block in set_blocks) for set_blocks in blocks.values() if set_blocks)
    return {
        on: [math.log(block.step_seconds) for block in set_blocks if not (quiet and block.disturbed)]
        for on, set_blocks in blocks.items()
    }


def request_block(course: Course, request: BlockRequest) -> BlockRequests:
    """Request a block, and add it to the course."""
    _add(course, (yield from _block(course, request)))


def _block(course: Course, request: BlockRequest) -> Generator[BlockRequest, MeasuredBlock, MeasuredBlock]:
    """Request a block and return it. Note how long it took in all, as an estimate for the next."""
    started_at = time.monotonic()
    measured = yield request
    course.note_duration(time.monotonic() - started_at, measured.taken)
    return measured


def _search_end(course: Course, options: OnlineOptions) -> float:
    """Return the moment by which the search must end, so that three pairs of the claim fit after it."""
    return min(options.search_until, options.claim_until - 2 * _LEAST_PAIRS * course.block_seconds)


def _has_time_for(blocks: int, course: Course, options: OnlineOptions) -> bool:
    """Return whether the search has time for so many more blocks."""
    return time.monotonic() + blocks * course.block_seconds <= _search_end(course, options)


def _settling_from(started_at: float, course: Course, options: OnlineOptions) -> float:
    """Return the moment at which the play-off begins."""
    available = max(0.0, _search_end(course, options) - started_at)
    reserved = _compile_seconds(course, options) if _may_pay(course, options) else 0.0
    # Compiling that would take most of the time (150 s, if others have the CPU) is not tried: then keep nothing for it.
    available -= reserved if reserved <= _MOST_FOR_COMPILE * available else 0.0
    least, most = (share * available for share in _SETTLING)
    return started_at + available - min(most, max(least, _FEW_ROUNDS * course.block_seconds))


def _add(course: Course, measured: MeasuredBlock) -> bool:
    """Add a block to the course. Return whether it counts."""
    if not measured.trouble:
        course.add_block(measured.on, measured.step_seconds, disturbed=measured.disturbed)
    return not measured.trouble


def _may_pay(course: Course, options: OnlineOptions) -> bool:
    """Return whether compiling could pay for itself within the full training."""
    if not course.with_liveness(Liveness.LAST) - set(course.dropped):
        return False
    return compiling_may_pay(math.exp(course.posterior.level), options.total_steps)


def compiling_may_pay(step: float, steps: int) -> bool:
    """Return whether compiling could pay for itself within `steps` steps of `step` seconds."""
    return _COMPILE_SAVES * step * steps > _COMPILE_WORTH * _COMPILE_SECONDS


def _compile_seconds(course: Course, options: OnlineOptions) -> float:
    """Return an estimate of the seconds that compiling takes: longer beside other processes, shorter a second time."""
    if options.compiling is not None:
        return _seconds_with_warm_cache(options.compiling) + 2 * _COMPILE_BLOCKS * course.block_seconds
    return _COMPILE_SECONDS / (1 - min(_MOST_TAKEN, course.taken))


def _seconds_with_warm_cache(cost: float) -> float:
    """Return the seconds that compiling takes with a warm cache, given those of the first time."""
    return max(_WARM_CACHE * cost, min(cost, _WARM_CACHE_SECONDS))


def _compile(course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
    """Measure `compile` on top of the settled set, if it may pay for itself within the full training."""
    for index in sorted(course.with_liveness(Liveness.LAST) - set(course.dropped) - course.chosen()):
        if not _may_pay(course, options):
            course.drop([index], TOO_SHORT_TO_COMPILE)
            host.note(Event("not worth it", (index,), text=TOO_SHORT_TO_COMPILE))
            continue
        if _search_end(course, options) - time.monotonic() < _compile_seconds(course, options):
            host.note(Event("not asked", (index,), text="compiling takes longer than the time that was left"))
            continue
        saved, cost = yield from _measure_compiled(index, course, options, host, _seconds_with_warm_cache)
        if saved is not None and saved < _seconds_with_warm_cache(cost):
            paid = f"a run pays {_seconds_with_warm_cache(cost):.0f} s for compiling"
            why = f"{paid}, which saves {saved:.0f} s of the full training"
            course.drop([index], why)
            host.note(Event("not worth it", (index,), text=why))


def compile_in_run(course: Course, options: OnlineOptions, host: Host, steps_left: int) -> BlockRequests:
    """Compile within a user's own run, if that is likely to pay over the steps left. Keep it on if steps are faster."""
    for index in sorted(course.with_liveness(Liveness.LAST) - set(course.dropped) - course.chosen()):
        left = steps_left * math.exp(course.posterior.level + course.posterior.gain(course.chosen())[0])
        if _USUAL_SAVING * left > _WORTH_IN_RUN * _compile_seconds(course, options):
            options = dataclasses.replace(options, total_steps=steps_left)
            yield from _measure_compiled(index, course, options, host, lambda cost: 0.0)  # it is paid for by then


def _measure_compiled(
    index: int, course: Course, options: OnlineOptions, host: Host, costs_again: Callable[[float], float]
) -> Generator[BlockRequest, MeasuredBlock, tuple[float | None, float]]:
    """Compile on top of the chosen set, measure both in turn, and settle on the better one.

    Args:
        index: The candidate that compiles.
        course: The search.
        options: Until when there is time, and how many steps the saving is counted over.
        host: Notes what compiling cost.
        costs_again: Turns those seconds into the seconds that a saving must exceed.

    Returns:
        Seconds that compiling saves over the steps (None if one of the two never ran well), and what it cost.
    """
    chosen, cost, saved = course.chosen(), 0.0, 0.0
    expected = math.exp(course.posterior.level + course.posterior.gain(chosen)[0])
    blocks: dict[frozenset[int], list[MeasuredBlock]] = {chosen: [], chosen | {index}: []}
    for turn in range(_COMPILE_BLOCKS):
        measured = yield from _block(course, BlockRequest(chosen | {index}, "compile", skip=3, expected=expected))
        if not turn:
            cost = max(0.0, host.compiling - 3 * expected)
            host.note(Event("compiled", (index,), cost))
        _add_to_set(measured, course, blocks)
        _add_to_set((yield from _block(course, BlockRequest(chosen, "compile"))), course, blocks)
        # Compiling may have taken longer than expected, and another turn may compile once more (seen in a training of
        # images: 14 s in the third turn). Three pairs of the claim matter more than another turn.
        turn_seconds = 2 * course.block_seconds + _seconds_with_warm_cache(cost)
        is_last = time.monotonic() + turn_seconds + 2 * _LEAST_PAIRS * course.block_seconds > options.claim_until
        faster, saved = _compiled(blocks, options.total_steps)
        if turn or is_last:  # settle each time, as the script may end after any block
            _settle(chosen | {index} if faster and saved >= costs_again(cost) else chosen, course, host)
        if is_last:
            break
    return (saved if all(blocks.values()) else None), cost


def _compiled(blocks: Mapping[frozenset[int], Sequence[MeasuredBlock]], steps: int) -> tuple[bool, float]:
    """Return whether compiled steps are faster, and the seconds that compiling saves over `steps` steps.

    Args:
        blocks: Blocks of the settled set, then of the set with compiling.
        steps: Steps of the full training.
    """
    if not all(blocks.values()):  # one of the two sets never ran well: the gain is unknown
        return False, 0.0
    plain, compiled = (statistics.median(set_paces) for set_paces in _comparable(blocks).values())
    return compiled < plain - AS_GOOD, max(0.0, math.exp(plain) - math.exp(compiled)) * steps


def _add_to_set(measured: MeasuredBlock, course: Course, blocks: dict[frozenset[int], list[MeasuredBlock]]) -> None:
    """Add a block to the course, and to its set in `blocks` if that set really acted."""
    if _add(course, measured):
        blocks.get(frozenset(measured.on), []).append(measured)


def _claim(plan: frozenset[int], course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
    """Measure baseline and plan in turn, A B B A, as often as there is time for, up to eight undisturbed pairs."""
    exact = bool(plan & host.by_pass)
    plain: frozenset[int] = frozenset()
    turn, quiet, pair_seconds = 0, 0, math.inf  # the shortest pair: the first may fill a cache
    while turn < _LEAST_PAIRS or (
        quiet < _MOST_PAIRS and turn < _MOST_TURNS and time.monotonic() + pair_seconds < options.claim_until
    ):
        started_at, disturbed = time.monotonic(), False
        for on, part in ((plain, "plain"), (plan, "plan"))[:: -1 if turn % 2 else 1]:
            expected = (
                math.exp(course.posterior.level + course.posterior.gain(on)[0]) if course.posterior.blocks else 0.0
            )
            measured = yield BlockRequest(on, part, exact=exact, expected=expected)
            disturbed = disturbed or measured.disturbed
        pair_seconds = min(pair_seconds, time.monotonic() - started_at)
        turn += 1
        quiet += not disturbed
