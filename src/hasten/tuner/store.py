"""Store what a tune learned about a training beside its plan, so that the next tune continues from there.

There is one JSON file per combination of training, machine and versions, in `.hasten/`. None of it is needed: a file
that is damaged or not hasten's is reported in one line and ignored.
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
from hasten.tuner.found import SearchState
from hasten.tuner.proof import Proof, beside_others
from hasten.tuner.training_key import Key, changes, without_paths

SCHEMA = "hasten-store/1"
FOLDER = ".hasten"
_MOST_BYTES = 1 << 20
_MOST_FILES = 200
_MOST_ROWS = 300
_LEAST_SPREAD = 0.03  # of log(seconds per step): uncertainty that remains about another hour, with any number of blocks
_WIDER, _MUCH_WIDER = 1.5, 3.0  # factors on deviations: for the same training; if script or arguments changed
_KNOWN = 0.06  # standard deviation up to which an effect counts as measured; above, it is a mere expectation
_EARLIER = "in an earlier tune: "
_MOST = 3.0  # of log(seconds per step): no technique has a larger effect, so a file that says so is invalid


@dataclass(frozen=True)
class SettingResult:
    """Results for one setting.

    Attributes:
        name: Name of the technique.
        setting: The setting.
        mean: Change of log(seconds per step) when it is on beside the plan; negative is faster.
        spread: Standard deviation of that change.
        blocks: Number of blocks in which it was on.
        validation: (mean, standard deviation) of its effect on a batch of validation; None if not measured.
        off: Why it is off for good; "" if it is not.
    """

    name: str
    setting: Setting
    mean: float
    spread: float
    blocks: int
    validation: tuple[float, float] | None = None
    off: str = ""


@dataclass(frozen=True)
class StoreFile:
    """Content of a store file.

    Attributes:
        key: Training, machine and versions that it holds for.
        date: When the tune ended, ISO 8601.
        plan: The plan that was found: technique -> setting.
        speedup: The speed-up, and the ends of its 95 % interval.
        proven: Whether that was proven: an `Answer`.
        learned: Results of each setting that was measured, or is off for good.
        prior: Joint estimate of all effects, for the next tune's search.
        disturbed: Share of the CPU that others took while the claim was measured, from 0 to 1; None if undisturbed.
    """

    key: Key
    date: str
    plan: dict[str, Setting]
    speedup: tuple[float, float, float]
    proven: str
    learned: tuple[SettingResult, ...]
    prior: Prior
    disturbed: float | None = None
    schema: str = SCHEMA


@dataclass(frozen=True)
class RecalledTraining:
    """Knowledge of a training from an earlier tune.

    Attributes:
        said: Line for the user: what is reused, or what changed.
        learned: Results by `Candidate.key`; empty if they are not used.
        prior: Prior of the search: the earlier estimate, widened so that new blocks can overturn it.
        same: Whether nothing changed and the earlier tune was undisturbed, so that its measurements count as such.
    """

    said: str
    learned: dict[str, SettingResult] = field(default_factory=dict)
    prior: Prior | None = None
    same: bool = False


# -- writing -----------------------------------------------------------------------------------------------


def remember(folder: Path, key: Key, found: SearchState, proof: Proof) -> str:
    """Store what a tune learned. Return why that was not possible, in a line; "" if it was.

    Args:
        folder: The store, beside the plan; created if it is missing.
        key: Key of the training.
        found: Result of the search.
        proof: Proof of the tune.
    """
    learned, prior = _learned(found), found.course.prior()
    if not learned:
        return ""
    for _, before in _of(folder, key, []):
        if before.key == key:  # keep results of settings that this tune did not try (under --only, say)
            now = {_name(one) for one in learned}
            learned += tuple(one for one in before.learned if _name(one) not in now)
            prior = prior.beside(before.prior)
    stored = StoreFile(
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


def _text(stored: StoreFile) -> str:
    """Return JSON with one line per field, so that diffs in a repository are readable."""
    fields = dataclasses.asdict(stored).items()
    lines = (f" {json.dumps(name)}: {json.dumps(value, allow_nan=False, ensure_ascii=False)}" for name, value in fields)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _learned(found: SearchState) -> tuple[SettingResult, ...]:
    """Return the results of each setting that was measured, now or in an earlier tune, or that is off for good."""
    course = found.course
    learned = []
    for index, (one, estimate) in enumerate(zip(course.candidates, course.estimates(found.chosen), strict=True)):
        off = without_paths(course.out[index]) if index in course.lasting else ""
        if not (estimate.blocks or one.known or off):
            continue
        seen = course.validation.estimate(index, ()) if course.validation.seen else None
        validation = (seen.mean, seen.spread) if seen is not None else None
        learned.append(
            SettingResult(one.name, one.setting, estimate.mean, estimate.spread, estimate.blocks, validation, off)
        )
    return tuple(learned)


# -- reading -----------------------------------------------------------------------------------------------


def recall(folder: Path, key: Key) -> RecalledTraining | None:
    """Return what earlier tunes learned about a training; None if it was never tuned here.

    Args:
        folder: The store; it may be missing.
        key: Key of the training.
    """
    trouble: list[str] = []
    known = sorted(_of(folder, key, trouble), key=lambda pair: pair[1].date, reverse=True)
    best = _best(known, key)
    if not trouble:
        return best
    said = "; ".join([best.said, trouble[0]] if best is not None else trouble[:1])
    return dataclasses.replace(best or RecalledTraining(""), said=said)


def _best(known: Sequence[tuple[Path, StoreFile]], key: Key) -> RecalledTraining | None:
    """Return the latest tune of the same training; else of one whose effects apply here; else only what changed."""
    for path, stored in known:
        if stored.key == key:
            said = f"continues from what the tune of {_day(stored)} learned ({path.parent.name}/{path.name})"
            if stored.disturbed is not None:  # on a quiet machine all effects may differ
                said += f"{beside_others(stored.disturbed)}: it counts for less"
            return _recalled(stored, said, same=stored.disturbed is None)
    for _, stored in known:
        if stored.key.place == key.place:
            said = f"{changes(stored.key, key)}: what the tune of {_day(stored)} learned counts for less"
            return _recalled(stored, said, same=False)
    return RecalledTraining(f"{changes(known[0][1].key, key)}: what was known is not used") if known else None


def applied(candidates: Sequence[Candidate], recalled: RecalledTraining | None) -> tuple[Candidate, ...]:
    """Return the candidates with an earlier tune's estimates as their priors, deviations widened."""
    if recalled is None or recalled.prior is None:
        return tuple(candidates)
    return tuple(_with(one, recalled, recalled.prior) for one in candidates)


def drop_again(course: Course, recalled: RecalledTraining | None) -> None:
    """Switch off candidates that crashed, hung or broke their promise in an earlier tune of the same training."""
    if recalled is None or not recalled.same:
        return
    for index, one in enumerate(course.candidates):
        learned = recalled.learned.get(one.key)
        if learned is not None and learned.off:
            course.drop([index], f"{_EARLIER}{learned.off.removeprefix(_EARLIER)}", lasting=True)


def _with(one: Candidate, recalled: RecalledTraining, prior: Prior) -> Candidate:
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


def _recalled(stored: StoreFile, said: str, same: bool) -> RecalledTraining:
    prior = stored.prior.widened(_WIDER if same else _MUCH_WIDER, _LEAST_SPREAD)
    return RecalledTraining(said, {_name(one): one for one in stored.learned}, prior, same)


def _of(folder: Path, key: Key, trouble: list[str]) -> Iterator[tuple[Path, StoreFile]]:
    """Yield the stored files of this script, on any machine. Append problems with invalid files to `trouble`."""
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


def _read(path: Path) -> StoreFile:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise HastenError("it is not a file")
    if found.st_size > _MOST_BYTES:
        raise HastenError(f"it has {found.st_size:,} bytes, and is none that tune wrote")
    stored = read_plain(StoreFile, path, SCHEMA, "what a tune learned", "delete it, or give --no-memory")
    figures = [(one.mean, one.spread) for one in stored.learned]
    figures += [one.validation for one in stored.learned if one.validation is not None]
    sane = all(abs(mean) <= _MOST and 0 <= spread <= _MOST for mean, spread in figures)  # NaN is neither
    if not sane or len(stored.prior.rows) > _MOST_ROWS or not stored.prior.is_sane(_MOST):
        raise HastenError("it holds figures that no training gives")
    return stored


def _name(one: SettingResult) -> str:
    return Candidate(one.name, one.setting).key


def _why(error: Exception) -> str:
    text = error.message if isinstance(error, HastenError) else str(error)
    return without_paths(text.splitlines()[0])[:200]


def _day(stored: StoreFile) -> str:
    return day[0] if (day := re.match(r"\d{4}-\d\d-\d\d", stored.date)) else "an unknown day"
