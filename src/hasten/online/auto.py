"""Tunes a person's own run while it goes on: nothing of it is thrown away, and what helps stays on.

First a few steps as the script is. What they tell says which techniques may help; all of those are on in the next
blocks, then what draws from the posterior take to help, as in `hasten tune`, but at the steps and passes that come
anyway. What was chosen stays on, and is looked at again now and then.
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
from hasten.online.blocks import Wish
from hasten.online.course import Course
from hasten.online.driver import Driver
from hasten.online.eligibility import candidates, now_left_alone, seconds_of_step, steps_known, too_large, too_short
from hasten.online.losses import Losses
from hasten.online.options import AutoOptions, Candidate, OnlineOptions
from hasten.online.record import Event, Measured
from hasten.online.schedule import Host, Wishes, ask, play_off, search
from hasten.online.switches import Schedule, Switched, process_of
from hasten.plan import Setting
from hasten.techniques import Liveness, toml_value

if TYPE_CHECKING:
    from hasten.evidence.open_pass import OpenPass
    from hasten.evidence.recorder import Recorder
    from hasten.switchboard import Switchboard

_NEVER = sys.maxsize
_PLAIN_STEPS, _PLAIN_SECONDS, _LEAST_PLAIN = 24, 3.0, 4  # as the script is, before anything is switched
_SHARE = 0.2  # of a training whose length is known: no more of it is searched
_BLOCKS = 60  # of a search that has all its time
_LEAST_BLOCK, _MOST_BLOCK = 0.1, 0.5  # seconds
_GLANCE = 64  # steps from one look at the loss to the next, while nothing is measured
_LONGEST = 64  # times as long between two looks, where they found the same again and again
_APART = 100  # times a block's length between two looks: a hundredth of the training runs as the script is


@dataclass(frozen=True)
class Around:
    """The process that is tuned, as the tuning sees it.

    Attributes:
        board: Switches techniques.
        recorder: Says how long steps took.
        command: The training's command line.
        evidence: Gives the evidence so far.
        say: Tells the person a line.
        over: Called when nobody needs to hear of steps any more.
        together: In a training of several ranks that are switched together: why these cannot be, or ""; None: one rank.
    """

    board: Switchboard
    recorder: Recorder
    command: tuple[str, ...]
    evidence: Callable[[], Evidence]
    say: Callable[[str], None]
    over: Callable[[], None]
    together: Callable[[Evidence], str] | None = None


class Auto:
    """Tunes the run of which it is told each step and pass.

    Args:
        options: How long to search, and what to leave behind.
        around: What the process gives.
    """

    compiling = 0.0
    by_pass: ClassVar[set[int]] = set()  # no block waits for its pass: they may be long in a real training

    def __init__(self, options: AutoOptions, around: Around) -> None:
        self._options, self._around = options, around
        self._recorder, self._board = around.recorder, around.board
        self._recorder.may_rest = False
        self._pid = os.getpid()
        self._losses = Losses()
        self._watched: set[int] = set()  # candidates whose first block was looked at
        self._driver: Driver | None = None
        self._schedule: Schedule | None = None
        self._able: tuple[Candidate, ...] = ()
        self._chosen: frozenset[int] | None = None
        self._hopeful: frozenset[int] = frozenset()  # come on with the next pass, and were never measured
        self._passes = self._look_at = 0
        self._began = self._step_seconds = self._block_seconds = 0.0
        self._stays = self._over = False
        self._why = ""

    # -- told by the session -----------------------------------------------------------------------------------

    def on_step(self, steps: int) -> int | None:
        """A step is over; answers behind how many to be told again, None: the next."""
        if os.getpid() != self._pid and not self._began:  # it trains in its fork, such as a daemon
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
        """A pass through a loader begins or is over."""
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
            self._why = f"tuning failed: {type(error).__name__}: {error}"  # switched off at the end of the next step
        if opened.trained and self._hopeful:
            self._look_at = 0

    def abandon(self, why: str) -> None:
        """Nothing can be switched any more: what is on stays on."""
        if not self._over:
            self._over = True
            self._log(dict(self._board.on))
            self._around.say(f"auto: nothing is switched from here on: {why}")
            self._around.over()

    def close(self) -> None:
        """The process ends."""
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
        """What is switched between two steps of one thread would come within a step of another: a second training, or
        one whose batches this thread draws for it."""
        threads = self._recorder.threads
        threads.add(threading.get_ident())
        if len(threads) > 1:
            threads &= {thread.ident for thread in threading.enumerate()}
            if len(threads) > 1:
                self._why = self._why or "its steps are the work of several threads"

    def _glance(self, steps: int) -> int | None:
        """Nothing is measured: look at the loss now and then."""
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
        """Begin the search once enough steps were seen as the script is."""
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
        able = candidates(evidence, [one for one in self._board.techniques if one.switchable])
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
        whole = steps_known(evidence, self._options)
        seconds = min(self._options.most_seconds, _SHARE * whole * self._step_seconds if whole else math.inf)
        self._block_seconds = max(_LEAST_BLOCK, min(_MOST_BLOCK, seconds / _BLOCKS))
        until = time.monotonic() + seconds
        options = OnlineOptions(able, "", until, math.inf, self._block_seconds, self._options.seed)
        ranks = None if self._around.together is None else os.getppid()  # their launcher, and so all of them
        self._driver = Driver(options, self._board, self._recorder, self._asked_all, self._wishes, self, ranks)

    # -- what is asked -----------------------------------------------------------------------------------------

    def _wishes(self, course: Course, options: OnlineOptions, host: Host) -> Wishes:
        """Ask for blocks, and end when one of them went wrong."""
        asks, measured = self._asks(course, options), None
        while not self._why:
            try:
                wish = next(asks) if measured is None else asks.send(measured)
            except StopIteration:
                return
            measured = yield wish
            new = set(measured.on) - self._watched
            self._note_why(self._left_alone() or self._losses.wrong(bool(measured.on), watched=bool(new)))
            self._watched |= new

    def _asks(self, course: Course, options: OnlineOptions) -> Wishes:
        yield from search(course, options)
        if not _unasked(course):
            yield from play_off(course, options, self)
        plain: frozenset[int] = frozenset()
        turn, apart = 0, 1
        while True:
            chosen, self._hopeful = course.chosen(), _unasked(course)
            self._settle(course, chosen)
            if not chosen and not self._hopeful:
                return
            on, other = chosen | self._hopeful, chosen if self._hopeful else plain
            yield from self._stay(course, on, apart)
            for one in (on, other)[:: -1 if turn % 2 else 1]:
                yield from ask(course, Wish(one, "look"))
            turn += 1
            apart = min(_LONGEST, 2 * apart) if course.chosen() == chosen else 1

    def _stay(self, course: Course, on: frozenset[int], times: int) -> Wishes:
        """Have these on, unmeasured and hardly listened to, until it is time to look again."""
        pace = math.exp(course.posterior.level + course.posterior.gain(on)[0])
        apart = max(self._options.look_every, int(_APART * self._block_seconds / pace))
        self._look_at = self._recorder.steps + times * apart
        self._stays = True
        self._recorder.may_rest = self._around.together is None  # ranks count steps alike only if all of them count
        yield Wish(on, "stay")
        self._stays = self._recorder.may_rest = False
        self._hopeful = frozenset()

    def _settle(self, course: Course, chosen: frozenset[int]) -> None:
        """This is chosen: write the plan, and say so where it is new."""
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
        """The play-off's events are of no use here."""

    def _left_alone(self) -> str:
        return now_left_alone(together=self._around.together is not None)

    # -- told by the driver ------------------------------------------------------------------------------------

    def write(self, one: Measured | Event) -> None:
        """A block is over, or something else happened: switches are written down before they are made."""
        if not isinstance(one, Event):
            return
        if one.kind == "switch":
            self._log({self._able[i].name: self._able[i].setting for i in one.on})
        elif one.kind == "over" and one.text:
            self._why = self._why or "the loss turned to NaN or infinity"

    def _log(self, on: dict[str, Setting]) -> None:
        if self._schedule is None:
            return
        try:
            self._schedule.write(Switched(self._recorder.steps, self._passes, on))
        except OSError as error:
            self._schedule = None
            self._why = f"{self._options.schedule} cannot be written, and is left empty: {error.strerror}"

    def _asked_all(self) -> None:
        """Nothing is left to be asked."""
        if not self._why:
            self._over = True
            self._all_off()
            self._around.over()

    def _stop(self) -> None:
        """Everything is off for good."""
        self._over = True
        was_on = bool(self._board.on)
        self._all_off()
        off = "everything is switched off, and the training goes on as it is" if was_on else "the run is left alone"
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
    """Return techniques switched with a pass that were never on, since no pass has begun."""
    ran = {i for block in course.posterior.seen for i in block.on}
    able = sorted(course.of(Liveness.PASS) - ran - set(course.out))
    return frozenset({course.candidates[i].name: i for i in reversed(able)}.values())
