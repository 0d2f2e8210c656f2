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
from hasten.online.course import Course
from hasten.online.options import Candidate
from hasten.online.prior import Prior
from hasten.plan import Setting
from hasten.tuner.found import Found
from hasten.tuner.proof import Proof, beside_others
from hasten.tuner.training_key import Key, changes, without_paths

SCHEMA = "hasten-store/1"
FOLDER = ".hasten"
_MOST_BYTES = 1 << 20
_MOST_FILES = 200
_MOST_ROWS = 300
_LEAST_SPREAD = 0.03  # of log(seconds per step): what blocks of another hour leave open, however many they were
_WIDER, _MUCH_WIDER = 1.5, 3.0  # where all is the same; where the script or its arguments are others
_KNOWN = 0.06  # spread up to which an effect counts as measured; beyond it is an expectation like any other
_EARLIER = "in an earlier tune: "
_MOST = 3.0  # of log(seconds per step): no technique does more, whatever a file says


@dataclass(frozen=True)
class Learned:
    """Results for one setting.

    Attributes:
        name: The technique's.
        setting: The setting.
        mean: Change of log(seconds per step) when it is on beside the plan; negative is faster.
        spread: Standard deviation.
        blocks: Blocks in which it was on.
        validation: Mean and spread of the same for a batch of validation, alone, where that was seen.
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
class Stored:
    """The file.

    Attributes:
        key: What it holds for.
        date: When the tune ended, ISO 8601.
        plan: The plan that was found: technique -> setting.
        speedup: How many times faster it was, and the 95 % interval.
        proven: The answer to whether that is proven.
        learned: Of each setting that was measured, or is off for good.
        prior: All effects together, for the next tune's search.
        disturbed: Share of the CPU that others took while the claim was measured, from 0 to 1; None where they
            disturbed nothing.
    """

    key: Key
    date: str
    plan: dict[str, Setting]
    speedup: tuple[float, float, float]
    proven: str
    learned: tuple[Learned, ...]
    prior: Prior
    disturbed: float | None = None
    schema: str = SCHEMA


@dataclass(frozen=True)
class Recalled:
    """Knowledge of a training from an earlier tune.

    Attributes:
        said: A line for the person: what it is, or what changed.
        learned: By `Candidate.key`; empty where what was known is not used.
        prior: The search's expectation: what was known, widened so that new blocks can overturn it.
        same: Nothing changed, and others disturbed nothing: what was measured counts as such.
    """

    said: str
    learned: dict[str, Learned] = field(default_factory=dict)
    prior: Prior | None = None
    same: bool = False


# -- writing -----------------------------------------------------------------------------------------------


def remember(folder: Path, key: Key, found: Found, proof: Proof) -> str:
    """Keep what a tune learned; say why in a line where that was not possible, else "".

    Args:
        folder: The store, beside the plan; made where it is missing.
        key: Of the training.
        found: What the search learned.
        proof: What came of it.
    """
    learned, prior = _learned(found), found.course.prior()
    if not learned:
        return ""
    for _, before in _of(folder, key, []):
        if before.key == key:  # what this tune did not ask, as under --only, stays known
            now = {_name(one) for one in learned}
            learned += tuple(one for one in before.learned if _name(one) not in now)
            prior = prior.beside(before.prior)
    stored = Stored(
        key=key,
        date=proof.created,
        plan=found.plan(),
        speedup=(proof.speedup.ratio, proof.speedup.low, proof.speedup.high),
        proven=str(proof.proven),
        learned=learned,
        prior=prior.rounded(),
        disturbed=proof.disturbed,
    )
    try:
        folder.mkdir(exist_ok=True)
        files.write_own(folder / key.file, _text(stored), "what a tune learned", files.json_of(SCHEMA))
    except (OSError, HastenError, ValueError) as error:
        return f"what was learned is not kept for the next tune: {_why(error)}"
    return ""


def _text(stored: Stored) -> str:
    """JSON with a line for each field, so that a repository shows what changed."""
    fields = dataclasses.asdict(stored).items()
    lines = (f" {json.dumps(name)}: {json.dumps(value, allow_nan=False, ensure_ascii=False)}" for name, value in fields)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _learned(found: Found) -> tuple[Learned, ...]:
    """Yield what a search knows of each setting that was measured, now or before, or that is off for good."""
    course = found.course
    learned = []
    for index, (one, estimate) in enumerate(zip(course.candidates, course.estimates(found.chosen), strict=True)):
        off = without_paths(course.out[index]) if index in course.lasting else ""
        if not (estimate.blocks or one.known or off):
            continue
        seen = course.validation.estimate(index, ()) if course.validation.seen else None
        validation = (seen.mean, seen.spread) if seen is not None else None
        learned.append(Learned(one.name, one.setting, estimate.mean, estimate.spread, estimate.blocks, validation, off))
    return tuple(learned)


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
            if stored.disturbed is not None:  # on a quiet machine it may all be otherwise
                said += f"{beside_others(stored.disturbed)}: it counts for less"
            return _recalled(stored, said, same=stored.disturbed is None)
    for _, stored in known:
        if stored.key.place == key.place:
            said = f"{changes(stored.key, key)}: what the tune of {_day(stored)} learned counts for less"
            return _recalled(stored, said, same=False)
    return Recalled(f"{changes(known[0][1].key, key)}: what was known is not used") if known else None


def applied(candidates: Sequence[Candidate], recalled: Recalled | None) -> tuple[Candidate, ...]:
    """Return candidates that expect what an earlier tune found, with spreads widened."""
    if recalled is None or recalled.prior is None:
        return tuple(candidates)
    return tuple(_with(one, recalled, recalled.prior) for one in candidates)


def drop_again(course: Course, recalled: Recalled | None) -> None:
    """Keep off what crashed, hung or broke its word in the very same training."""
    if recalled is None or not recalled.same:
        return
    for index, one in enumerate(course.candidates):
        learned = recalled.learned.get(one.key)
        if learned is not None and learned.off:
            course.drop([index], f"{_EARLIER}{learned.off.removeprefix(_EARLIER)}", lasting=True)


def _with(one: Candidate, recalled: Recalled, prior: Prior) -> Candidate:
    learned = recalled.learned.get(one.key)
    if learned is None or one.key not in prior.rows:
        return one
    row, validation = prior.rows.index(one.key), (one.mean, one.spread)
    if learned.validation is not None:
        validation = learned.validation[0], _wide(learned.validation[1], recalled.same)
    known = (learned.mean, _wide(learned.spread, same=True))
    return dataclasses.replace(
        one,
        mean=prior.mean[row],
        spread=prior.spread(row),
        known=known if recalled.same and learned.spread <= _KNOWN else None,
        validation=validation,
    )


def _wide(spread: float, same: bool) -> float:
    return max(spread, _LEAST_SPREAD) * (_WIDER if same else _MUCH_WIDER)


def _recalled(stored: Stored, said: str, same: bool) -> Recalled:
    prior = stored.prior.widened(_WIDER if same else _MUCH_WIDER, _LEAST_SPREAD)
    return Recalled(said, {_name(one): one for one in stored.learned}, prior, same)


def _of(folder: Path, key: Key, trouble: list[str]) -> Iterator[tuple[Path, Stored]]:
    """Yield what is kept of this script, on any machine; files that are none are told to `trouble`."""
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
            trouble.append(f"{folder.name}/{path.name} is ignored: {_why(error)}")
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
    figures = [(one.mean, one.spread) for one in stored.learned]
    figures += [one.validation for one in stored.learned if one.validation is not None]
    sane = all(abs(mean) <= _MOST and 0 <= spread <= _MOST for mean, spread in figures)  # NaN is neither
    if not sane or len(stored.prior.rows) > _MOST_ROWS or not stored.prior.is_sane(_MOST):
        raise HastenError("it holds figures that no training gives")
    return stored


def _name(one: Learned) -> str:
    return Candidate(one.name, one.setting).key


def _why(error: Exception) -> str:
    text = error.message if isinstance(error, HastenError) else str(error)
    return without_paths(text.splitlines()[0])[:200]


def _day(stored: Stored) -> str:
    return day[0] if (day := re.match(r"\d{4}-\d\d-\d\d", stored.date)) else "an unknown day"
