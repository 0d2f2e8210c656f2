"""Tune a user's own run while it trains (`hasten run --auto`, `Trainer(plan="auto")`).

The first few steps run unchanged, and show which techniques may help. Then the search of `hasten tune` runs on the
steps and passes of the training itself: no step is repeated or thrown away. The chosen techniques stay on, and now and
then a pair of blocks checks that they still help, or whether another set is faster. Every switch is written to a
schedule before it is made, for `--replay`.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.files import write_own
from hasten.online.auto_plan import beside_others, gain_of, is_auto_plan, plan_of
from hasten.online.blocks import BlockRequest
from hasten.online.course import Course
from hasten.online.driver import Driver
from hasten.online.eligibility import candidates, now_left_alone, seconds_of_step, steps_known, too_large, too_short
from hasten.online.interactions import place_of
from hasten.online.looks import Looks
from hasten.online.losses import Losses
from hasten.online.options import AutoOptions, Candidate, OnlineOptions
from hasten.online.record import Event, MeasuredBlock
from hasten.online.schedule import BlockRequests, Host, compile_in_run, play_off, request_block, search
from hasten.online.switches import RecordedSwitch, Schedule, process_of
from hasten.plan import Setting
from hasten.techniques import Liveness, Technique, toml_value

if TYPE_CHECKING:
    from hasten.evidence.open_pass import OpenPass
    from hasten.evidence.recorder import Recorder
    from hasten.switchboard import Switchboard

_NEVER = sys.maxsize
_PLAIN_STEPS, _PLAIN_SECONDS, _LEAST_PLAIN = 24, 3.0, 4  # unchanged steps (or seconds) before anything is switched
_SHARE = 0.2  # of a training of known length: the most that the search may take
_BLOCKS = 60  # of a search that has all its time
_LEAST_BLOCK, _MOST_BLOCK = 0.1, 0.5  # seconds
_GLANCE = 64  # steps between two reads of the loss while nothing is measured
_APART = 100  # lengths of a block between two looks: about a hundredth of the training runs without the techniques


@dataclass(frozen=True)
class TunedProcess:
    """What the tuning needs of the process that it tunes.

    Attributes:
        board: The switchboard.
        recorder: Measures the steps.
        command: The training's command line.
        evidence: Returns the evidence so far.
        say: Prints a line for the user.
        stop_listening: Called when no further step needs to be reported.
        together: If several ranks are switched together: returns why they cannot be, or "". None for a single rank.
    """

    board: Switchboard
    recorder: Recorder
    command: tuple[str, ...]
    evidence: Callable[[], Evidence]
    say: Callable[[str], None]
    stop_listening: Callable[[], None]
    together: Callable[[Evidence], str] | None = None


class Auto:
    """Tunes a run. The session calls `on_step` after each step and `on_pass` for each pass.

    Args:
        options: How long to search, and which files to write.
        process: The process that is tuned.
    """

    compiling = 0.0
    by_pass: ClassVar[set[int]] = set()  # no block waits for a pass: in a real training passes may be long

    def __init__(self, options: AutoOptions, process: TunedProcess) -> None:
        self._options, self._process = options, process
        self._recorder, self._board = process.recorder, process.board
        self._recorder.may_rest = False
        self._pid = os.getpid()
        self._losses = Losses()
        self._watched: set[int] = set()  # candidates whose first block's losses were compared
        self._driver: Driver | None = None
        self._schedule: Schedule | None = None
        self._candidates: tuple[Candidate, ...] = ()
        self._total_steps: int | None = None  # of the whole training, if known
        self._chosen: frozenset[int] | None = None
        self._untried: frozenset[int] = frozenset()  # per-pass techniques never measured, on from the next pass
        self._passes = self._next_look = 0
        self._started_at = self._step_seconds = self._block_seconds = 0.0
        self._between_looks = self._ended = False
        self._stop_reason = ""

    # -- called by the session ---------------------------------------------------------------------------------

    def on_step(self, steps: int) -> int | None:
        """Take in the step that just ended. Return the number of the step to be called after; None for the next."""
        if os.getpid() != self._pid and not self._started_at:  # the script trains in a fork of itself, such as a daemon
            self._process.say("auto: the run is left alone: it trains in a fork of the process that imported torch")
        if self._ended or os.getpid() != self._pid:
            return _NEVER
        next_call = None
        try:
            self._note_threads()
            if not self._stop_reason:
                next_call = self._glance(steps) if self._between_looks else self._step(steps)
        except Exception as error:  # tuning never breaks a script
            self._stop_reason = f"tuning failed: {type(error).__name__}: {error}"
        if self._stop_reason:
            self._stop()
        return _NEVER if self._has_ended() else next_call

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """Take in the begin or end of a pass through a loader."""
        if self._ended or began or os.getpid() != self._pid:
            return
        self._passes += opened.trained
        if opened.trained:
            self._note_threads()
        if self._driver is None:
            return
        try:
            self._driver.on_pass(opened, began)
        except Exception as error:  # tuning never breaks a script
            # The next step's end switches all off.
            self._stop_reason = f"tuning failed: {type(error).__name__}: {error}"
        if opened.trained and self._untried:
            self._next_look = 0

    def abandon(self, why: str) -> None:
        """End the tuning because nothing can be switched any more. What is on stays on."""
        if not self._ended:
            self._ended = True
            self._log(dict(self._board.on))
            self._process.say(f"auto: nothing is switched from here on: {why}")
            self._process.stop_listening()

    def close(self) -> None:
        """End the tuning as the process ends."""
        if not self._ended and self._chosen is None and self._recorder.steps and os.getpid() == self._pid:
            earlier = (
                f"; {self._options.plan_shown_as} is an earlier run's" if Path(self._options.plan).exists() else ""
            )
            self._process.say(f"auto: the run ended before anything was settled: no plan was written{earlier}")
        self._ended = True

    # -- steps -------------------------------------------------------------------------------------------------

    def _step(self, steps: int) -> int | None:
        self._losses.add(self._recorder.last[1])
        if self._driver is None:
            self._begin_if_known(steps)
        else:
            self._driver.on_step(steps)
        return None

    def _note_threads(self) -> None:
        """End the tuning if several threads train or draw batches.

        A switch between two steps of one thread would fall within a step of another: that of a second training, or one
        whose batches this thread draws ahead.
        """
        threads = self._recorder.threads
        threads.add(threading.get_ident())
        if len(threads) > 1:
            threads &= {thread.ident for thread in threading.enumerate()}
            if len(threads) > 1:
                self._stop_reason = self._stop_reason or "its steps are the work of several threads"

    def _glance(self, steps: int) -> int | None:
        """Read the loss now and then, while nothing is measured."""
        self._losses.add(self._recorder.last[1])
        self._stop_reason = (
            self._stop_reason or self._left_alone() or self._losses.problem(bool(self._board.on), watched=False)
        )
        if self._stop_reason:
            return None
        if steps < self._next_look:
            return min(steps + _GLANCE, self._next_look)
        assert self._driver is not None
        self._driver.skip()
        return None

    def _begin_if_known(self, steps: int) -> None:
        """Begin the search once enough unchanged steps were seen."""
        now = time.monotonic()
        self._started_at = self._started_at or now
        if steps < _PLAIN_STEPS and (steps < _LEAST_PLAIN or now - self._started_at < _PLAIN_SECONDS):
            return
        self._stop_reason = self._left_alone()
        if self._stop_reason:
            return
        evidence = self._process.evidence()
        if self._process.together is not None and (why := self._process.together(evidence)):
            self._stop_reason = why
            return
        self._total_steps = total_steps = steps_known(evidence, self._options)
        techniques = [technique for technique in self._board.techniques if self._may_switch(technique)]
        eligible = candidates(evidence, techniques)
        self._candidates = eligible = tuple(each for each in eligible if not too_large(each.name, evidence))
        self._stop_reason = too_short(evidence, self._options)
        if not eligible:
            self._stop_reason = (
                self._stop_reason or "no technique that can be switched in a run applies to this training"
            )
        if self._stop_reason:
            return
        self._losses.problem(on=False, watched=False)
        try:
            writer = process_of(self._options.root) if self._options.root else None
            self._schedule = Schedule(self._options.schedule, self._process.command, writer)
        except FileExistsError:
            self._stop_reason = f"{self._options.schedule} is another process's of this run"
            return
        except OSError as error:
            self._stop_reason = f"{self._options.schedule} cannot be written: {error.strerror}"
            return
        self._step_seconds = seconds_of_step(evidence)
        seconds = min(
            self._options.most_seconds, _SHARE * total_steps * self._step_seconds if total_steps else math.inf
        )
        self._block_seconds = max(_LEAST_BLOCK, min(_MOST_BLOCK, seconds / _BLOCKS))
        until = time.monotonic() + seconds
        options = OnlineOptions(
            eligible,
            "",
            until,
            math.inf,
            self._block_seconds,
            self._options.seed,
            total_steps=0,  # no time of the search is kept for compiling: see `compile_in_run`
        )
        ranks = None if self._process.together is None else os.getppid()  # their launcher, and so all of them
        self._driver = Driver(options, self._board, self._recorder, self._schedule_ended, self._requests, self, ranks)

    def _may_switch(self, technique: Technique) -> bool:
        """Return whether a technique may be switched in this run.

        One that compiles may only if the training's length is known, to see whether it pays, and no other rank waits.
        """
        if not technique.switchable:
            return False
        compiles = technique.liveness_of(technique.setting) is Liveness.LAST
        return not compiles or (self._total_steps is not None and self._process.together is None)

    # -- the schedule of blocks --------------------------------------------------------------------------------

    def _requests(self, course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
        """Request blocks until one of them goes wrong."""
        requests, measured = self._all_requests(course, options, host), None
        while not self._stop_reason:
            try:
                request = next(requests) if measured is None else requests.send(measured)
            except StopIteration:
                return
            measured = yield request
            untested = set(measured.on) - self._watched
            self._note_stop_reason(
                self._left_alone() or self._losses.problem(bool(measured.on), watched=bool(untested))
            )
            self._watched |= untested

    def _all_requests(self, course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
        """Request the search's blocks; then keep the chosen set on, and compare it with others now and then."""
        yield from search(course, options)
        if not _never_on(course):
            yield from play_off(course, options, self)
        looks, compiled = Looks(course, functools.partial(self._interval, course)), False
        while True:
            chosen, self._untried = course.chosen(), _never_on(course)
            self._settle(course, chosen)
            if not (compiled or self._untried or self._total_steps is None):
                compiled = True
                yield from compile_in_run(course, options, host, self._total_steps - self._recorder.steps)
                continue
            if not chosen and not self._untried:
                return
            look = looks.next(chosen, self._untried, self._recorder.steps)
            yield from self._wait_until(look.step, chosen | self._untried)
            for on in look.pair:
                yield from request_block(course, BlockRequest(on, "look"))
            looks.compared()

    def _interval(self, course: Course, on: frozenset[int]) -> int:
        """Return the steps between two looks."""
        pace = math.exp(course.posterior.level + course.posterior.gain(on)[0])
        return max(self._options.look_every, int(_APART * self._block_seconds / pace))

    def _wait_until(self, step: int, on: frozenset[int]) -> BlockRequests:
        """Keep these on until the next look, without measuring and with the recorder mostly at rest."""
        self._next_look = step
        self._between_looks = True
        self._recorder.may_rest = self._process.together is None  # ranks must count the same steps, so none may rest
        yield BlockRequest(on, "stay")
        self._between_looks = self._recorder.may_rest = False
        self._untried = frozenset()

    def _settle(self, course: Course, chosen: frozenset[int]) -> None:
        """Write the plan of the chosen set and tell the user, if the set is new."""
        if chosen == self._chosen:
            return
        first, self._chosen = self._chosen is None, chosen
        plan = plan_of(course, chosen, self._process.command)
        settings = ", ".join(f"{name} = {toml_value(setting)}" for name, setting in plan.techniques.items())
        pace = f"{gain_of(course, chosen):.2f}x as fast as without{beside_others(course)}"
        gain = f"{settings}: {pace}" if chosen else "nothing helps here"
        try:
            write_own(Path(self._options.plan), plan.to_toml(), "the plan", is_auto_plan)
            plan_note = f"; the plan is in {self._options.plan_shown_as}"
        except HastenError as error:
            plan_note = f"; {error}"
        verb = "settled" if first else "changed its mind"
        self._process.say(f"auto: {verb} after {self._recorder.steps} steps: {gain}{plan_note}")

    def note(self, event: Event) -> None:
        """Ignore the play-off's events: no report is made of this run."""

    def _left_alone(self) -> str:
        return now_left_alone(together=self._process.together is not None)

    # -- called by the driver ----------------------------------------------------------------------------------

    def write(self, entry: MeasuredBlock | Event) -> None:
        """Write a switch to the schedule, before the driver makes it."""
        if not isinstance(entry, Event):
            return
        if entry.kind == "switch":
            self._log({self._candidates[i].name: self._candidates[i].setting for i in entry.on})
        elif entry.kind == "over" and entry.text:
            self._stop_reason = self._stop_reason or "the loss turned to NaN or infinity"

    def _log(self, on: dict[str, Setting]) -> None:
        if self._schedule is None:
            return
        try:
            self._schedule.write(RecordedSwitch(self._recorder.steps, self._passes, on))
        except OSError as error:
            self._schedule = None
            self._stop_reason = f"{self._options.schedule} cannot be written, and is left empty: {error.strerror}"

    def _schedule_ended(self) -> None:
        """End the tuning because the schedule has no more blocks."""
        if not self._stop_reason:
            self._ended = True
            self._all_off()
            self._process.stop_listening()

    def _stop(self) -> None:
        """Switch everything off for good, and tell the user why."""
        self._ended = True
        was_on = bool(self._board.on)
        self._all_off()
        off = "everything is switched off, and the training continues unchanged" if was_on else "the run is left alone"
        self._process.say(f"auto: {off}: {self._stop_reason}")
        self._process.stop_listening()

    def _has_ended(self) -> bool:
        return self._ended

    def _note_stop_reason(self, why: str) -> None:
        self._stop_reason = self._stop_reason or why

    def _all_off(self) -> None:
        if self._board.on:
            self._log({})
            self._board.switch({})
        self._recorder.may_rest = True


def _never_on(course: Course) -> frozenset[int]:
    """Return per-pass techniques that were never on, because no pass has begun since the search did."""
    ran = {i for block in course.posterior.blocks for i in block.on}
    never_on = sorted(course.with_liveness(Liveness.PASS) - ran - set(course.dropped))
    return frozenset({place_of(course.candidates[i].name): i for i in reversed(never_on)}.values())
