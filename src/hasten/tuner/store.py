"""Store: what a tune learned of a training, kept beside its plan, so that the next tune goes on from there.

One JSON file a training, a machine and versions, in `.hasten/`. Nothing in it is needed: a file that is damaged,
or somebody else's, is said in a line and ignored.
"""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hasten import files
from hasten.errors import HastenError
from hasten.evidence.plain import read_plain
from hasten.plan import Setting
from hasten.tuner.found import Found
from hasten.tuner.key import Key, changes, without_paths
from hasten.tuner.proof import Proof
from hasten.warm.course import Course
from hasten.warm.options import Candidate

SCHEMA = "hasten-store/1"
FOLDER = ".hasten"
_MOST_BYTES = 1 << 20
_MOST_FILES = 200
_LEAST_SPREAD = 0.03  # of log(seconds per step): what blocks of another hour leave open, however many they were
_WIDER, _MUCH_WIDER = 1.5, 3.0  # where all is the same; where the script or its arguments are others
_KNOWN = 0.06  # spread up to which an effect counts as measured; beyond it is an expectation like any other
_MOST = 3.0  # of log(seconds per step): no technique does more, whatever a file says


@dataclass(frozen=True)
class Effect:
    """What was found of one setting.

    Attributes:
        name: The technique's.
        setting: The setting.
        mean: Change of log(seconds per step) when it alone is on.
        spread: Standard deviation.
        blocks: Blocks in which it was on.
        validation: Mean and spread of log(seconds per batch of validation), where that was seen.
        off: Why it is off for good; "" where it is not.
    """

    name: str
    setting: Setting
    mean: float
    spread: float
    blocks: int
    validation: tuple[float, float] | None = None
    off: str = ""


@dataclass(frozen=True)
class Together:
    """What two settings do beyond what each does alone: mean and spread. They are named as `Candidate.key` does."""

    one: str
    other: str
    mean: float
    spread: float


@dataclass(frozen=True)
class Stored:
    """The file.

    Attributes:
        key: What it holds for.
        date: When the tune ended, ISO 8601.
        effects: Of each setting that was measured.
        together: Of pairs of them.
        plan: The plan that was found: technique -> setting.
        speedup: How many times faster it was, and the 95 % interval.
        proven: The answer to whether that is proven.
    """

    key: Key
    date: str
    effects: tuple[Effect, ...]
    together: tuple[Together, ...] = ()
    plan: dict[str, Setting] = field(default_factory=dict)
    speedup: tuple[float, float, float] = (1.0, 1.0, 1.0)
    proven: str = ""
    schema: str = SCHEMA


@dataclass(frozen=True)
class Recalled:
    """What is known of a training from an earlier tune.

    Attributes:
        said: A line for the person: what it is, or what changed.
        effects: By `Candidate.key`; empty where what was known is not used.
        together: By the two settings.
        same: Nothing changed: what was measured counts as such.
    """

    said: str
    effects: dict[str, Effect] = field(default_factory=dict)
    together: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    same: bool = False

    @property
    def wider(self) -> float:
        """How many times wider spreads are, so that new blocks can overturn what was known."""
        return _WIDER if self.same else _MUCH_WIDER


# -- writing -----------------------------------------------------------------------------------------------


def remember(folder: Path, key: Key, found: Found, proof: Proof) -> str:
    """Keep what a tune learned; say why in a line where that was not possible, else "".

    Args:
        folder: The store, beside the plan; made where it is missing.
        key: Of the training.
        found: What the search learned.
        proof: What came of it.
    """
    effects = effects_of(found.course)
    if not effects:
        return ""
    now = {_name(one.name, one.setting) for one in effects}
    # What this tune did not ask, as under --only, stays known.
    before = [one for _, one in _of(folder, key, []) if one.key == key][:1]
    others = tuple(one for kept in before for one in kept.effects if _name(one.name, one.setting) not in now)
    stored = Stored(
        key=key,
        date=proof.created,
        effects=(*effects, *others),
        together=_together_of(found.course),
        plan=found.plan(),
        speedup=(proof.speedup.ratio, proof.speedup.low, proof.speedup.high),
        proven=str(proof.proven),
    )
    try:
        folder.mkdir(exist_ok=True)
        text = json.dumps(dataclasses.asdict(stored), indent=1, allow_nan=False) + "\n"
        files.write_own(folder / key.file, text, "what a tune learned", files.json_of(SCHEMA))
    except (OSError, HastenError, ValueError) as error:
        why = error.message if isinstance(error, HastenError) else str(error)
        return f"what was learned is not kept for the next tune: {why.splitlines()[0]}"
    return ""


def effects_of(course: Course) -> tuple[Effect, ...]:
    """What a search knows of each setting that was measured, now or before, or that is off for good."""
    effects = []
    for index, one in enumerate(course.candidates):
        estimate = course.posterior.estimate(index, ())
        off = without_paths(course.out[index]) if index in course.lasting else ""
        if not (estimate.blocks or one.known or off):
            continue
        seen = course.validation.estimate(index, ()) if course.validation.seen else None
        validation = (seen.mean, seen.spread) if seen is not None else None
        effects.append(Effect(one.name, one.setting, estimate.mean, estimate.spread, estimate.blocks, validation, off))
    return tuple(effects)


def _together_of(course: Course) -> tuple[Together, ...]:
    names = [one.key for one in course.candidates]
    return tuple(
        Together(names[i], names[j], mean, spread) for (i, j), (mean, spread) in course.posterior.together().items()
    )


# -- reading -----------------------------------------------------------------------------------------------


def recall(folder: Path, key: Key) -> Recalled | None:
    """Look up what is known of a training; None where it was never tuned here.

    Args:
        folder: The store; it may be missing.
        key: Of the training.
    """
    trouble: list[str] = []
    known = sorted(_of(folder, key, trouble), key=lambda pair: pair[1].date, reverse=True)
    best = _best(known, key)
    if not trouble:
        return best
    said = "; ".join([best.said, trouble[0]] if best is not None else trouble[:1])
    return dataclasses.replace(best or Recalled(""), said=said)


def _best(known: Sequence[tuple[Path, Stored]], key: Key) -> Recalled | None:
    """Of the latest tune of the same training; else of one whose effects hold here too; else only what changed."""
    for path, stored in known:
        if stored.key == key:
            said = f"goes on from what the tune of {_day(stored)} learned ({path.parent.name}/{path.name})"
            return _recalled(stored, said, same=True)
    for _, stored in known:
        if stored.key.place == key.place:
            said = f"{changes(stored.key, key)}: what the tune of {_day(stored)} learned counts for less"
            return _recalled(stored, said, same=False)
    return Recalled(f"{changes(known[0][1].key, key)}: what was known is not used") if known else None


def applied(candidates: Sequence[Candidate], recalled: Recalled | None) -> tuple[Candidate, ...]:
    """Return candidates that expect what an earlier tune found, with spreads widened."""
    if recalled is None or not recalled.effects:
        return tuple(candidates)
    return tuple(_with(one, recalled) for one in candidates)


def drop_again(course: Course, recalled: Recalled | None) -> None:
    """What crashed, hung or broke its word in the very same training stays off."""
    if recalled is None or not recalled.same:
        return
    for index, one in enumerate(course.candidates):
        effect = recalled.effects.get(one.key)
        if effect is not None and effect.off:
            course.drop([index], effect.off, lasting=True)


def _with(one: Candidate, recalled: Recalled) -> Candidate:
    effect = recalled.effects.get(one.key)
    if effect is None:
        return one
    together = {
        other: (mean, _wide(spread, recalled))
        for (name, other), (mean, spread) in recalled.together.items()
        if name == one.key
    }
    validation = (one.mean, one.spread)
    if effect.validation is not None:
        validation = effect.validation[0], _wide(effect.validation[1], recalled)
    return dataclasses.replace(
        one,
        mean=effect.mean,
        spread=_wide(effect.spread, recalled),
        known=recalled.same and effect.spread <= _KNOWN,
        together=together,
        validation=validation,
    )


def _wide(spread: float, recalled: Recalled) -> float:
    return min(1.0, max(spread, _LEAST_SPREAD) * recalled.wider)


def _recalled(stored: Stored, said: str, same: bool) -> Recalled:
    return Recalled(
        said,
        {_name(one.name, one.setting): one for one in stored.effects},
        {(one.one, one.other): (one.mean, one.spread) for one in stored.together},
        same,
    )


def _of(folder: Path, key: Key, trouble: list[str]) -> Iterator[tuple[Path, Stored]]:
    """What is kept of this script, on any machine; files that are none are told to `trouble`."""
    name = re.compile(re.escape(key.stem) + r"-[0-9a-f]{12}\.json")
    try:
        paths = sorted(path for path in folder.iterdir() if name.fullmatch(path.name))[:_MOST_FILES]
    except FileNotFoundError:
        return
    except OSError as error:
        trouble.append(f"{folder.name} cannot be read ({error.strerror}): ignored")
        return
    for path in paths:
        try:
            stored = _read(path)
        except (HastenError, OSError) as error:
            why = error.message if isinstance(error, HastenError) else str(error)
            why = without_paths(why.splitlines()[0]).replace(str(path), path.name)
            trouble.append(f"{folder.name}/{path.name} is ignored: {why}")
            continue
        if stored.key.script == key.script:
            yield path, stored


def _read(path: Path) -> Stored:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise HastenError("it is not a file")
    if found.st_size > _MOST_BYTES:
        raise HastenError(f"it has {found.st_size:,} bytes, and is none that tune wrote")
    stored = read_plain(Stored, path, SCHEMA, "what a tune learned", "delete it, or give --no-memory")
    figures = [(one.mean, one.spread) for one in stored.effects]
    figures += [(pair.mean, pair.spread) for pair in stored.together]
    figures += [one.validation for one in stored.effects if one.validation is not None]
    if not all(abs(mean) <= _MOST and 0 <= spread <= _MOST for mean, spread in figures):  # NaN is neither
        raise HastenError("it holds figures that no training gives")
    return stored


def _name(name: str, setting: Setting) -> str:
    return Candidate(name, setting).key


def _day(stored: Stored) -> str:
    return day[0] if (day := re.match(r"\d{4}-\d\d-\d\d", stored.date)) else "an unknown day"
