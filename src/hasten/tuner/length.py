"""Find out how long the full training is: from its command line, or from a process that reached its end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hasten.evidence.schema import Evidence
from hasten.tuner.timing import Timing

EPOCHS = re.compile(
    r"^(?i:(?:--?|\+)?(?:trainer\.|train\.|training\.)?(?:num|n|max|nb|total)?[-_]?(?:train[-_])?epochs?)$|^-e$"
)
_ASSUMED_SECONDS = 600.0
_ASSUMED_EPOCHS = 10


@dataclass(frozen=True)
class TrainingLength:
    """Number of epochs of the full training, and how that is known."""

    epochs: int
    known_from: str
    assumed: bool = False


def epochs_named(command: Sequence[str]) -> tuple[int, str] | None:
    """Return the number of epochs on a command line, and its wording there; None if there is none."""
    arguments = list(command)
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        if EPOCHS.match(name) and (value := value if equals else following).isdecimal():
            return int(value), f"{name} {value}"
    return None


def length_of(command: Sequence[str], baseline: Timing) -> TrainingLength:
    """Return the training's length from `--epochs 90`, `--epochs=90` or `epochs=90` on its command line.

    Without such an argument, assume ten minutes and at least ten epochs. Without a DataLoader, 1,000 steps count as an
    epoch.
    """
    if named := epochs_named(command):
        return TrainingLength(named[0], f"{named[1]} on the command line")
    seconds = max(1e-9, seconds_per_epoch(baseline))
    return TrainingLength(
        max(_ASSUMED_EPOCHS, round(_ASSUMED_SECONDS / seconds)),
        "assumed: the command line names no number of epochs",
        assumed=True,
    )


def length_of_finished_run(length: TrainingLength, run: Evidence | None) -> TrainingLength:
    """Replace an assumed length by the passes of a run that ended by itself, if all its passes were complete.

    If passes are cut short, by the script (`next(iter(loader))` in each step, a `break`) or by a trial, their number
    says nothing about epochs.
    """
    if not length.assumed or run is None or run.ended != "finished" or (loader := run.train_loader) is None:
        return length
    trained = [loader_pass for loader_pass in run.passes if loader_pass.trained]
    if len({loader_pass.loader for loader_pass in trained}) != 1 or any(
        loader_pass.batches != loader.batches for loader_pass in trained
    ):
        return length
    return TrainingLength(len(trained), "a process of this tune came to the end of the training")


def steps_seen(run: Evidence) -> int:
    """Return the steps of a training whose run reached its end. Passes that a search cut short count as complete."""
    trained = sum(loader_pass.trained for loader_pass in run.passes)
    loader = run.train_loader
    steps_of_whole_passes = trained * (loader.batches or 0) if loader is not None else 0
    # At most twice the steps that ran: a search cuts at most half of the steps, and more means the script does.
    return max(1, run.steps, min(steps_of_whole_passes, 2 * run.steps))


def steps_of(length: TrainingLength, timing: Timing) -> int:
    """Return the number of steps of the full training."""
    return max(1, int(length.epochs * seconds_per_epoch(timing) / max(1e-6, timing.step)))


def seconds_per_epoch(timing: Timing) -> float:
    """Return the seconds of an epoch, or of 1,000 steps if there are no epochs."""
    return timing.epoch if timing.epoch is not None else 1000 * timing.step


def full_seconds(timing: Timing, epochs: int) -> float:
    """Return the seconds of the full training."""
    return timing.startup + epochs * seconds_per_epoch(timing)
