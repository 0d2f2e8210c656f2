"""Tune a user's own run while it trains (`hasten run --auto`, `Trainer(plan="auto")`).

The first few steps run unchanged, and show which techniques may help. Then the search of `hasten tune` runs on the
steps and passes of the training itself: no step is repeated or thrown away. The chosen techniques stay on, and now and
then a pair of blocks checks that they still help. Every switch is written to a schedule before it is made, for
`--replay`.
"""

from __future__ import annotations

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
from hasten.online.losses import Losses
from hasten.online.options import AutoOptions, Candidate, OnlineOptions
from hasten.online.record import Event, MeasuredBlock
from hasten.online.schedule import BlockRequests, Host, ask, compile_in_run, play_off, search
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
_LONGEST = 64  # the interval between two looks doubles up to this factor while they confirm the choice
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
        over: Called when no further step needs to be reported.
        together: If several ranks are switched together: returns why they cannot be, or "". None for a single rank.
    """

    board: Switchboard
    recorder: Recorder
    command: tuple[str, ...]
    evidence: Callable[[], Evidence]
    say: Callable[[str], None]
    over: Callable[[], None]
    together: Callable[[Evidence], str] | None = None


class Auto:
    """Tunes a run. The session calls `on_step` after each step and `on_pass` for each pass.

    Args:
        options: How long to search, and which files to write.
        around: The process that is tuned.
    """

    compiling = 0.0
    by_pass: ClassVar[set[int]] = set()  # no block waits for a pass: in a real training passes may be long

    def __init__(self, options: AutoOptions, around: TunedProcess) -> None:
        self._options, self._around = options, around
        self._recorder, self._board = around.recorder, around.board
        self._recorder.may_rest = False
        self._pid = os.getpid()
        self._losses = Losses()
        self._watched: set[int] = set()  # candidates whose first block's losses were compared
        self._driver: Driver | None = None
        self._schedule: Schedule | None = None
        self._able: tuple[Candidate, ...] = ()
        self._whole: int | None = None  # steps of the whole training, if known
        self._chosen: frozenset[int] | None = None
        self._hopeful: frozenset[int] = frozenset()  # per-pass techniques never measured, on from the next pass
        self._passes = self._look_at = 0
        self._began = self._step_seconds = self._block_seconds = 0.0
        self._stays = self._over = False
        self._why = ""

    # -- called by the session ---------------------------------------------------------------------------------

    def on_step(self, steps: int) -> int | None:
        """Take in the step that just ended. Return the number of the step to be called after; None for the next."""
        if os.getpid() != self._pid and not self._began:  # the script trains in a fork of itself, such as a daemon
            self._around.say("auto: the run is left alone: it trains in a fork of the process that imported torch")
        if self._over or os.getpid() != self._pid:
            return _NEVER
        again = None
        try:
            self._note_threads()
            if not self._why:
                again = self._glance(steps) if self._stays else self._step(steps)
        except Exception as error:  # tuning never breaks a script
            self._why = f"tuning failed: {type(error).__name__}: {error}"
        if self._why:
            self._stop()
        return _NEVER if self._is_over() else again

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """Take in the begin or end of a pass through a loader."""
        if self._over or began or os.getpid() != self._pid:
            return
        self._passes += opened.trained
        if opened.trained:
            self._note_threads()
        if self._driver is None:
            return
        try:
            self._driver.on_pass(opened, began)
        except Exception as error:  # tuning never breaks a script
            self._why = f"tuning failed: {type(error).__name__}: {error}"  # the next step's end switches all off
        if opened.trained and self._hopeful:
            self._look_at = 0

    def abandon(self, why: str) -> None:
        """End the tuning because nothing can be switched any more. What is on stays on."""
        if not self._over:
            self._over = True
            self._log(dict(self._board.on))
            self._around.say(f"auto: nothing is switched from here on: {why}")
            self._around.over()

    def close(self) -> None:
        """End the tuning as the process ends."""
        if not self._over and self._chosen is None and self._recorder.steps and os.getpid() == self._pid:
            former = f"; {self._options.shown} is an earlier run's" if Path(self._options.plan).exists() else ""
            self._around.say(f"auto: the run ended before anything was settled: no plan was written{former}")
        self._over = True

    # -- steps -------------------------------------------------------------------------------------------------

    def _step(self, steps: int) -> int | None:
        self._losses.saw(self._recorder.last[1])
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
                self._why = self._why or "its steps are the work of several threads"

    def _glance(self, steps: int) -> int | None:
        """Read the loss now and then, while nothing is measured."""
        self._losses.saw(self._recorder.last[1])
        self._why = self._why or self._left_alone() or self._losses.wrong(bool(self._board.on), watched=False)
        if self._why:
            return None
        if steps < self._look_at:
            return min(steps + _GLANCE, self._look_at)
        assert self._driver is not None
        self._driver.skip()
        return None

    def _begin_if_known(self, steps: int) -> None:
        """Begin the search once enough unchanged steps were seen."""
        now = time.monotonic()
        self._began = self._began or now
        if steps < _PLAIN_STEPS and (steps < _LEAST_PLAIN or now - self._began < _PLAIN_SECONDS):
            return
        self._why = self._left_alone()
        if self._why:
            return
        evidence = self._around.evidence()
        if self._around.together is not None and (why := self._around.together(evidence)):
            self._why = why
            return
        self._whole = whole = steps_known(evidence, self._options)
        able = candidates(evidence, [one for one in self._board.techniques if one.switchable and self._in_time(one)])
        self._able = able = tuple(one for one in able if not too_large(one.name, evidence))
        self._why = too_short(evidence, self._options)
        if not able:
            self._why = self._why or "no technique that can be switched in a run applies to this training"
        if self._why:
            return
        self._losses.wrong(on=False, watched=False)
        try:
            process = process_of(self._options.root) if self._options.root else None
            self._schedule = Schedule(self._options.schedule, self._around.command, process)
        except FileExistsError:
            self._why = f"{self._options.schedule} is another process's of this run"
            return
        except OSError as error:
            self._why = f"{self._options.schedule} cannot be written: {error.strerror}"
            return
        self._step_seconds = seconds_of_step(evidence)
        seconds = min(self._options.most_seconds, _SHARE * whole * self._step_seconds if whole else math.inf)
        self._block_seconds = max(_LEAST_BLOCK, min(_MOST_BLOCK, seconds / _BLOCKS))
        until = time.monotonic() + seconds
        options = OnlineOptions(able, "", until, math.inf, self._block_seconds, self._options.seed)
        ranks = None if self._around.together is None else os.getppid()  # their launcher, and so all of them
        self._driver = Driver(options, self._board, self._recorder, self._asked_all, self._wishes, self, ranks)

    def _in_time(self, technique: Technique) -> bool:
        """Return whether a technique can pay. One that compiles needs a known length, and ranks would wait for it."""
        compiles = technique.liveness_of(technique.setting) is Liveness.LAST
        return not compiles or (self._whole is not None and self._around.together is None)

    # -- the schedule of blocks --------------------------------------------------------------------------------

    def _wishes(self, course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
        """Request blocks until one of them goes wrong."""
        asks, measured = self._asks(course, options, host), None
        while not self._why:
            try:
                wish = next(asks) if measured is None else asks.send(measured)
            except StopIteration:
                return
            measured = yield wish
            new = set(measured.on) - self._watched
            self._note_why(self._left_alone() or self._losses.wrong(bool(measured.on), watched=bool(new)))
            self._watched |= new

    def _asks(self, course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
        """Request the search's blocks; then keep the chosen set on, and compare it now and then."""
        yield from search(course, options)
        if not _unasked(course):
            yield from play_off(course, options, self)
        plain: frozenset[int] = frozenset()
        turn, apart, compiled = 0, 1, False
        while True:
            chosen, self._hopeful = course.chosen(), _unasked(course)
            self._settle(course, chosen)
            if not (compiled or self._hopeful or self._whole is None):
                compiled = True
                yield from compile_in_run(course, options, host, self._whole - self._recorder.steps)
                continue
            if not chosen and not self._hopeful:
                return
            on, other = chosen | self._hopeful, chosen if self._hopeful else plain
            yield from self._stay(course, on, apart)
            for one in (on, other)[:: -1 if turn % 2 else 1]:
                yield from ask(course, BlockRequest(one, "look"))
            turn += 1
            apart = min(_LONGEST, 2 * apart) if course.chosen() == chosen else 1

    def _stay(self, course: Course, on: frozenset[int], times: int) -> BlockRequests:
        """Keep these on until the next look, without measuring and with the recorder mostly at rest."""
        pace = math.exp(course.posterior.level + course.posterior.gain(on)[0])
        apart = max(self._options.look_every, int(_APART * self._block_seconds / pace))
        self._look_at = self._recorder.steps + times * apart
        self._stays = True
        self._recorder.may_rest = self._around.together is None  # ranks must count the same steps, so none may rest
        yield BlockRequest(on, "stay")
        self._stays = self._recorder.may_rest = False
        self._hopeful = frozenset()

    def _settle(self, course: Course, chosen: frozenset[int]) -> None:
        """Write the plan of the chosen set and tell the user, if the set is new."""
        if chosen == self._chosen:
            return
        first, self._chosen = self._chosen is None, chosen
        plan = plan_of(course, chosen, self._around.command)
        said = ", ".join(f"{name} = {toml_value(setting)}" for name, setting in plan.techniques.items())
        pace = f"{gain_of(course, chosen):.2f}x as fast as without{beside_others(course)}"
        gain = f"{said}: {pace}" if chosen else "nothing helps here"
        try:
            write_own(Path(self._options.plan), plan.to_toml(), "the plan", is_auto_plan)
            where = f"; the plan is in {self._options.shown}"
        except HastenError as error:
            where = f"; {error}"
        verb = "settled" if first else "changed its mind"
        self._around.say(f"auto: {verb} after {self._recorder.steps} steps: {gain}{where}")

    def note(self, event: Event) -> None:
        """Ignore the play-off's events: no report is made of this run."""

    def _left_alone(self) -> str:
        return now_left_alone(together=self._around.together is not None)

    # -- called by the driver ----------------------------------------------------------------------------------

    def write(self, entry: MeasuredBlock | Event) -> None:
        """Write a switch to the schedule, before the driver makes it."""
        if not isinstance(entry, Event):
            return
        if entry.kind == "switch":
            self._log({self._able[i].name: self._able[i].setting for i in entry.on})
        elif entry.kind == "over" and entry.text:
            self._why = self._why or "the loss turned to NaN or infinity"

    def _log(self, on: dict[str, Setting]) -> None:
        if self._schedule is None:
            return
        try:
            self._schedule.write(RecordedSwitch(self._recorder.steps, self._passes, on))
        except OSError as error:
            self._schedule = None
            self._why = f"{self._options.schedule} cannot be written, and is left empty: {error.strerror}"

    def _asked_all(self) -> None:
        """End the tuning because the schedule has no more blocks."""
        if not self._why:
            self._over = True
            self._all_off()
            self._around.over()

    def _stop(self) -> None:
        """Switch everything off for good, and tell the user why."""
        self._over = True
        was_on = bool(self._board.on)
        self._all_off()
        off = "everything is switched off, and the training continues unchanged" if was_on else "the run is left alone"
        self._around.say(f"auto: {off}: {self._why}")
        self._around.over()

    def _is_over(self) -> bool:
        return self._over

    def _note_why(self, why: str) -> None:
        self._why = self._why or why

    def _all_off(self) -> None:
        if self._board.on:
            self._log({})
            self._board.switch({})
        self._recorder.may_rest = True


def _unasked(course: Course) -> frozenset[int]:
    """Return per-pass techniques that were never on, because no pass has begun since the search did."""
    ran = {i for block in course.posterior.seen for i in block.on}
    able = sorted(course.of(Liveness.PASS) - ran - set(course.out))
    return frozenset({course.candidates[i].name: i for i in reversed(able)}.values())
