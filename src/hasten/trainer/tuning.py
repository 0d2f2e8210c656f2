"""`Trainer(plan="auto")`: tunes a fit while it runs, with the code of `hasten run --auto`.

The callback `Tuning` owns the Trainer's Run (a switchboard of techniques), and passes steps and passes to a controller:
a search (`Auto`), its copy on rank 0 (`LeadingRank`) with followers on the other ranks (`FollowingRank`), or a
`Replay`. A schedule as the plan repeats an earlier fit: the same switches at the same steps.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.evidence import Evidence, this_machine
from hasten.evidence.recorded import so_far
from hasten.evidence.recorder import Recorder
from hasten.files import read_bytes
from hasten.online.auto import Auto, TunedProcess
from hasten.online.auto_plan import AUTO_NAME, new_files
from hasten.online.eligibility import facts_without_probe, replayed, switchable
from hasten.online.options import AutoOptions
from hasten.online.rank_sync import FollowingRank, LeadingBoard, LeadingRank
from hasten.online.replay import Replay
from hasten.online.switches import RecordedSwitch, is_schedule, read_schedule
from hasten.plan import Setting
from hasten.switchboard import Switchboard
from hasten.techniques import CATALOGUE, build
from hasten.trainer.callbacks.step_clock import StepClock

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

# Techniques that are baked into compiled code: switching one would recompile it each time.
_COMPILED = ("precision", "channels_last", "matmul_precision", "attention", "cpu_threads")


def tuning_of(plan: str | os.PathLike[str]) -> Tuning | None:
    """Return the Tuning for `plan="auto"` or a schedule; None for an ordinary plan.

    Raises:
        HastenError: The schedule cannot be read.
    """
    if plan == "auto":
        return Tuning()
    try:
        is_a_schedule = is_schedule(read_bytes(Path(plan)))
    except OSError:  # Plan.read reports it later
        return None
    return Tuning(read_schedule(Path(plan))) if is_a_schedule else None


class Tuning(StepClock):
    """Callback that switches techniques between the steps of a fit, and leaves on those that help.

    Args:
        schedule: The switches of an earlier fit, to repeat them; None: search.

    Attributes:
        seconds: The longest that the search may take.
        least_seconds: A shorter fit is not tuned.
    """

    def __init__(self, schedule: list[RecordedSwitch] | None = None) -> None:
        super().__init__()
        self.seconds = self.least_seconds = 60.0
        self._schedule = schedule
        self._board: LeadingBoard | None = None
        self._controller: Auto | LeadingRank | FollowingRank | Replay | None = None
        self._next_call = 0  # the controller is next called after this many steps

    def board(self, flags: Mapping[str, Setting | None], installed: Mapping[str, Setting]) -> Switchboard:
        """Return the Trainer's Run, with the techniques that are always on, and those that may be switched.

        Args:
            flags: Technique name -> setting; None if the flag was not given. A technique set by a flag is not switched.
            installed: The techniques that are always on.

        Raises:
            HastenError: The schedule switches what a flag sets.
        """
        settled = {name for name, setting in flags.items() if setting is not None}
        if self._schedule is not None:
            switched = replayed(self._schedule)
            if duplicates := sorted(settled & {technique.name for technique in switched}):
                raise HastenError(f"the schedule switches {duplicates[0]}, and a flag sets it", "leave one of them out")
        else:
            # The Trainer drops gradients anyway.
            excluded = settled | {"set_to_none"} | (set(_COMPILED) if installed.get("compile") else set())
            switched = [technique for technique in switchable(this_machine()) if technique.name not in excluded]
        self._board = LeadingBoard(switched, fixed=build(installed, CATALOGUE))
        return self._board

    # -- hooks -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the controller: rank 0 decides, the other ranks follow."""
        self._end()
        if self._board is None:
            return
        self._next_call = 0
        recorder = Recorder(on_step=self._on_step, on_pass=self._on_pass, may_rest=True)
        on_end = self._stop_listening
        if self._schedule is not None:
            self._controller = Replay(self._schedule, self._board, recorder, trainer.say, on_end)
        elif trainer.world.rank:
            self._controller = FollowingRank(self._board, recorder, trainer.world.rank, on_end)
        else:
            around = TunedProcess(
                self._board,
                recorder,
                tuple(sys.argv),
                partial(self._evidence, trainer, recorder),
                trainer.say,
                on_end,
                _no_objection if trainer.world.size > 1 else None,
            )
            auto = Auto(self._options(trainer), around)
            self._controller = LeadingRank(auto, self._board) if trainer.world.size > 1 else auto
        self.listen(trainer, recorder)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Stop tuning; a validation or test after the fit is not tuned."""
        self._end()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Stop tuning, also when a callback ends a run that it started for its own purpose."""
        self._end()

    def _stop_listening(self) -> None:
        self.listen_no_more()

    def _end(self) -> None:
        """Close the controller and switch its techniques off."""
        self.listen_no_more()
        search, self._controller = self._controller, None
        if search is not None:
            search.close()
            assert self._board is not None
            self._board.switch({})

    # -- called by the recorder --------------------------------------------------------------------------------

    def _on_step(self, steps: int) -> None:
        if self._controller is not None and steps >= self._next_call:
            next_call = self._controller.on_step(steps)
            self._next_call = steps + 1 if next_call is None else next_call

    def _on_pass(self, opened: Any, begins: bool) -> None:
        if self._controller is not None:
            self._controller.on_pass(opened, begins)

    # -- what the search needs ---------------------------------------------------------------------------------

    def _options(self, trainer: Trainer) -> AutoOptions:
        plan = Path(trainer.default_root_dir) / AUTO_NAME
        plan.parent.mkdir(parents=True, exist_ok=True)
        schedule = new_files(plan)
        return AutoOptions(
            str(plan),
            str(schedule),
            plan_shown_as=str(plan),
            least_seconds=self.least_seconds,
            most_seconds=self.seconds,
            steps=_batches_left(trainer),
        )

    def _evidence(self, trainer: Trainer, recorder: Recorder) -> Evidence:
        built = self.built(trainer, recorder)
        train = getattr(trainer, "train_dataloader", None)
        loader = train if isinstance(train, torch.utils.data.DataLoader) else None
        built["loaders"] = tuple(facts_without_probe(facts, loader) for facts in built["loaders"])
        return so_far(recorder, tuple(sys.argv), built, listened="trainer")


def _no_objection(_: Evidence) -> str:
    """Raise no objection to tuning several ranks: the Trainer's ranks all do the same in each step, as under DDP."""
    return ""


def _batches_left(trainer: Trainer) -> int | None:
    """Return the number of batches left in this fit, bounded by epochs and steps; None if unbounded."""
    bounds = [math.inf]
    if trainer.max_epochs not in (None, -1):
        done = 0 if trainer.engine.loop is None else trainer.progress.batch_idx
        bounds.append((trainer.max_epochs - trainer.current_epoch) * trainer.num_training_batches - done)
    if trainer.max_steps != -1:
        bounds.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    least = min(bounds)
    return None if math.isinf(least) else max(0, int(least))
