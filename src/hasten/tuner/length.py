"""How long the full training is: read off its command line, or seen in a process that came to its end."""

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
class Length:
    """Epochs of the full training, and where that is known from."""

    epochs: int
    known_from: str
    assumed: bool = False


def epochs_named(command: Sequence[str]) -> tuple[int, str] | None:
    """The number of epochs on a command line, and how it stands there; None where none does."""
    words = list(command)
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if EPOCHS.match(name) and (value := value if equals else following).isdecimal():
            return int(value), f"{name} {value}"
    return None


def length_of(command: Sequence[str], baseline: Timing) -> Length:
    """Read `--epochs 90`, `--epochs=90` or `epochs=90`; else assume ten minutes, and at least ten epochs.

    A script without a DataLoader counts 1,000 steps as an epoch.
    """
    if named := epochs_named(command):
        return Length(named[0], f"{named[1]} on the command line")
    seconds = max(1e-9, seconds_per_epoch(baseline))
    return Length(
        max(_ASSUMED_EPOCHS, round(_ASSUMED_SECONDS / seconds)),
        "assumed: the command line names no number of epochs",
        assumed=True,
    )


def seen_to_its_end(length: Length, run: Evidence | None) -> Length:
    """Return the epochs of a run, if it came to its end by itself in whole passes, in place of assumed ones.

    Where passes are cut, by the script (`next(iter(loader))` each step, a `break`) or by a trial, their number says
    nothing of epochs.
    """
    if not length.assumed or run is None or run.ended != "finished" or (loader := run.train_loader) is None:
        return length
    trained = [one for one in run.passes if one.trained]
    if len({one.loader for one in trained}) != 1 or any(one.batches != loader.batches for one in trained):
        return length
    return Length(len(trained), "a process of this tune came to the end of the training")


def steps_seen(run: Evidence) -> int:
    """Return how many steps a training has whose run came to its end, passes that a search has cut counted whole."""
    trained = sum(one.trained for one in run.passes)
    loader = run.train_loader
    whole = trained * (loader.batches or 0) if loader is not None else 0
    return max(1, run.steps, min(whole, 2 * run.steps))  # a search cuts no more than half; a script may, each pass


def steps_of(length: Length, timing: Timing) -> int:
    """Steps of the whole training."""
    return max(1, int(length.epochs * seconds_per_epoch(timing) / max(1e-6, timing.step)))


def seconds_per_epoch(timing: Timing) -> float:
    """Seconds of an epoch, or of 1,000 steps where there is none."""
    return timing.epoch if timing.epoch is not None else 1000 * timing.step


def full_seconds(timing: Timing, epochs: int) -> float:
    """Seconds of the whole training."""
    return timing.startup + epochs * seconds_per_epoch(timing)
