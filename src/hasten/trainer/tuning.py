"""`Trainer(plan="auto")`: a fit is tuned while it goes on, by the code of `hasten run --auto`.

A schedule in place of a plan repeats such a fit: the same switches at the same steps.
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
from hasten.online.auto import Around, Auto
from hasten.online.auto_plan import AUTO_NAME, new_files
from hasten.online.eligibility import replayed, switchable, told_without_asking
from hasten.online.options import AutoOptions
from hasten.online.rank_sync import Following, Leading, LeadingBoard
from hasten.online.replay import Replay
from hasten.online.switches import Switched, is_schedule, read_schedule
from hasten.plan import Setting
from hasten.switchboard import Switchboard
from hasten.techniques import CATALOGUE, build
from hasten.trainer.callbacks.step_clock import StepClock

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

# What compiled code has in it: each switch would have it compiled again.
_COMPILED_IN = ("precision", "channels_last", "matmul_precision", "attention", "cpu_threads")


def tuning_of(plan: str | os.PathLike[str]) -> Tuning | None:
    """Return what `plan="auto"`, or a schedule in place of a plan, asks for; None for a plan.

    Raises:
        HastenError: The schedule cannot be read.
    """
    if plan == "auto":
        return Tuning()
    try:
        found = is_schedule(read_bytes(Path(plan)))
    except OSError:  # Plan.read says what is wrong with it
        return None
    return Tuning(read_schedule(Path(plan))) if found else None


class Tuning(StepClock):
    """Switches techniques between the steps of a fit, and leaves on what helps.

    Args:
        schedule: What an earlier fit had switched, to repeat it; None to search.

    Attributes:
        seconds: Of the search at the most.
        least_seconds: A fit that takes no longer is left alone.
    """

    def __init__(self, schedule: list[Switched] | None = None) -> None:
        super().__init__()
        self.seconds = self.least_seconds = 60.0
        self._schedule = schedule
        self._board: LeadingBoard | None = None
        self._told: Auto | Leading | Following | Replay | None = None
        self._again = 0  # steps that must be over before it is told again

    def board(self, flags: Mapping[str, Setting | None], installed: Mapping[str, Setting]) -> Switchboard:
        """The Trainer's Run: what its flags ask for, throughout, and what may be switched.

        Args:
            flags: Technique name -> setting, None where the flag was not given. What was given is not switched.
            installed: The techniques that are on throughout.

        Raises:
            HastenError: The schedule switches what a flag sets.
        """
        settled = {name for name, setting in flags.items() if setting is not None}
        if self._schedule is not None:
            able = replayed(self._schedule)
            if both := sorted(settled & {technique.name for technique in able}):
                raise HastenError(f"the schedule switches {both[0]}, and a flag sets it", "leave one of them out")
        else:
            # The Trainer drops gradients anyway.
            left = settled | {"set_to_none"} | (set(_COMPILED_IN) if installed.get("compile") else set())
            able = [technique for technique in switchable(this_machine()) if technique.name not in left]
        self._board = LeadingBoard(able, fixed=build(installed, CATALOGUE))
        return self._board

    # -- hooks -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin: rank 0 decides, the others do as it did."""
        self._end()
        if self._board is None:
            return
        self._again = 0
        recorder = Recorder(on_step=self._on_step, on_pass=self._on_pass, may_rest=True)
        over = self._hear_no_more
        if self._schedule is not None:
            self._told = Replay(self._schedule, self._board, recorder, trainer.say, over)
        elif trainer.world.rank:
            self._told = Following(self._board, recorder, trainer.world.rank, over)
        else:
            around = Around(
                self._board,
                recorder,
                tuple(sys.argv),
                partial(self._evidence, trainer, recorder),
                trainer.say,
                over,
                _nothing_against if trainer.world.size > 1 else None,
            )
            auto = Auto(self._options(trainer), around)
            self._told = Leading(auto, self._board) if trainer.world.size > 1 else auto
        self.listen(trainer, recorder)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """The fit is over: what comes after it is not tuned."""
        self._end()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """The fit is over, also for a callback that had it for itself."""
        self._end()

    def _hear_no_more(self) -> None:
        self.listen_no_more()

    def _end(self) -> None:
        self.listen_no_more()
        search, self._told = self._told, None
        if search is not None:
            search.close()
            assert self._board is not None
            self._board.switch({})

    # -- told by the recorder ----------------------------------------------------------------------------------

    def _on_step(self, steps: int) -> None:
        if self._told is not None and steps >= self._again:
            again = self._told.on_step(steps)
            self._again = steps + 1 if again is None else again

    def _on_pass(self, opened: Any, began: bool) -> None:
        if self._told is not None:
            self._told.on_pass(opened, began)

    # -- what the search is told -------------------------------------------------------------------------------

    def _options(self, trainer: Trainer) -> AutoOptions:
        plan = Path(trainer.default_root_dir) / AUTO_NAME
        plan.parent.mkdir(parents=True, exist_ok=True)
        schedule = new_files(plan)
        return AutoOptions(
            str(plan),
            str(schedule),
            shown=str(plan),
            least_seconds=self.least_seconds,
            most_seconds=self.seconds,
            steps=_batches_left(trainer),
        )

    def _evidence(self, trainer: Trainer, recorder: Recorder) -> Evidence:
        built = self.built(trainer, recorder)
        train = getattr(trainer, "train_dataloader", None)
        held = train if isinstance(train, torch.utils.data.DataLoader) else None
        built["loaders"] = tuple(told_without_asking(facts, held) for facts in built["loaders"])
        return so_far(recorder, tuple(sys.argv), built, listened="trainer")


def _nothing_against(_: Evidence) -> str:
    """The Trainer trains several ranks as DistributedDataParallel does: all do the same in each step."""
    return ""


def _batches_left(trainer: Trainer) -> int | None:
    """Batches of this fit, as far as epochs and steps bound them; None where nothing does."""
    bounds = [math.inf]
    if trainer.max_epochs not in (None, -1):
        done = 0 if trainer.engine.loop is None else trainer.progress.batch_idx
        bounds.append((trainer.max_epochs - trainer.current_epoch) * trainer.num_training_batches - done)
    if trainer.max_steps != -1:
        bounds.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    least = min(bounds)
    return None if math.isinf(least) else max(0, int(least))
