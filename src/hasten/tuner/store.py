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
from hasten.tuner.proof import Proof, beside_others
from hasten.tuner.search_state import SearchState
from hasten.tuner.training_key import Key, changes, without_paths

SCHEMA = "hasten-store/1"
FOLDER = ".hasten"
_MOST_BYTES = 1 << 20
_MOST_FILES = 200
_MOST_ROWS = 300
_LEAST_SPREAD = 0.03  # of log(seconds per step): uncertainty that remains about another hour, with any number of blocks
_WIDER, _MUCH_WIDER = 1.5, 3.0  # factors on deviations: for the same training; if script or arguments changed
_MEASURED_SPREAD = 0.06  # standard deviation up to which an effect counts as measured; above, it is a mere expectation
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
        message: Line for the user: what is reused, or what changed.
        results: Results by `Candidate.key`; empty if they are not used.
        prior: Prior of the search: the earlier estimate, widened so that new blocks can overturn it.
        unchanged: Whether nothing changed and the earlier tune was undisturbed, so that its measurements count as such.
    """

    message: str
    results: dict[str, SettingResult] = field(default_factory=dict)
    prior: Prior | None = None
    unchanged: bool = False


# -- writing -----------------------------------------------------------------------------------------------


def remember(folder: Path, key: Key, state: SearchState, proof: Proof) -> str:
    """Store what a tune learned. Return why that was not possible, in a line; "" if it was.

    Args:
        folder: The store, beside the plan; created if it is missing.
        key: Key of the training.
        state: Result of the search.
        proof: Proof of the tune.
    """
    results, prior = _results_of(state), state.course.prior()
    if not results:
        return ""
    for _, earlier in _stored_for(folder, key, []):
        if earlier.key == key:  # keep results of settings that this tune did not try (under --only, say)
            names = {_key_of(result) for result in results}
            results += tuple(result for result in earlier.learned if _key_of(result) not in names)
            prior = prior.beside(earlier.prior)
    stored = StoreFile(
        key=key,
        date=proof.created,
        plan=state.plan(),
        speedup=(proof.speedup.ratio, proof.speedup.low, proof.speedup.high),
        proven=str(proof.proven),
        learned=results,
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


def _results_of(state: SearchState) -> tuple[SettingResult, ...]:
    """Return the results of each setting that was measured, now or in an earlier tune, or that is off for good."""
    course = state.course
    results = []
    for index, (candidate, estimate) in enumerate(zip(course.candidates, course.estimates(state.chosen), strict=True)):
        off = without_paths(course.dropped[index]) if index in course.lasting else ""
        if not (estimate.blocks or candidate.known or off):
            continue
        on_validation = course.validation.estimate(index, ()) if course.validation.blocks else None
        validation = (on_validation.mean, on_validation.spread) if on_validation is not None else None
        results.append(
            SettingResult(
                candidate.name, candidate.setting, estimate.mean, estimate.spread, estimate.blocks, validation, off
            )
        )
    return tuple(results)


# -- reading -----------------------------------------------------------------------------------------------


def recall(folder: Path, key: Key) -> RecalledTraining | None:
    """Return what earlier tunes learned about a training; None if it was never tuned here.

    Args:
        folder: The store; it may be missing.
        key: Key of the training.
    """
    trouble: list[str] = []
    stored_files = sorted(_stored_for(folder, key, trouble), key=lambda pair: pair[1].date, reverse=True)
    best = _best(stored_files, key)
    if not trouble:
        return best
    message = "; ".join([best.message, trouble[0]] if best is not None else trouble[:1])
    return dataclasses.replace(best or RecalledTraining(""), message=message)


def _best(stored_files: Sequence[tuple[Path, StoreFile]], key: Key) -> RecalledTraining | None:
    """Return the latest tune of the same training; else of one whose effects apply here; else only what changed."""
    for path, stored in stored_files:
        if stored.key == key:
            message = f"continues from what the tune of {_day(stored)} learned ({path.parent.name}/{path.name})"
            if stored.disturbed is not None:  # on a quiet machine all effects may differ
                message += f"{beside_others(stored.disturbed)}: it counts for less"
            return _recalled(stored, message, unchanged=stored.disturbed is None)
    for _, stored in stored_files:
        if stored.key.effects_key == key.effects_key:
            message = f"{changes(stored.key, key)}: what the tune of {_day(stored)} learned counts for less"
            return _recalled(stored, message, unchanged=False)
    return (
        RecalledTraining(f"{changes(stored_files[0][1].key, key)}: what was known is not used")
        if stored_files
        else None
    )


def applied(candidates: Sequence[Candidate], recalled: RecalledTraining | None) -> tuple[Candidate, ...]:
    """Return the candidates with an earlier tune's estimates as their priors, deviations widened."""
    if recalled is None or recalled.prior is None:
        return tuple(candidates)
    return tuple(_with_prior(candidate, recalled, recalled.prior) for candidate in candidates)


def drop_again(course: Course, recalled: RecalledTraining | None) -> None:
    """Switch off candidates that crashed, hung or broke their promise in an earlier tune of the same training."""
    if recalled is None or not recalled.unchanged:
        return
    for index, candidate in enumerate(course.candidates):
        result = recalled.results.get(candidate.key)
        if result is not None and result.off:
            course.drop([index], f"{_EARLIER}{result.off.removeprefix(_EARLIER)}", lasting=True)


def _with_prior(candidate: Candidate, recalled: RecalledTraining, prior: Prior) -> Candidate:
    result = recalled.results.get(candidate.key)
    if result is None or candidate.key not in prior.rows:
        return candidate
    row, validation = prior.rows.index(candidate.key), (candidate.mean, candidate.spread)
    if result.validation is not None:
        validation = result.validation[0], _widened(result.validation[1], recalled.unchanged)
    measured = (result.mean, _widened(result.spread, unchanged=True))
    return dataclasses.replace(
        candidate,
        mean=prior.mean[row],
        spread=prior.spread(row),
        known=measured if recalled.unchanged and result.spread <= _MEASURED_SPREAD else None,
        validation=validation,
    )


def _widened(spread: float, unchanged: bool) -> float:
    return max(spread, _LEAST_SPREAD) * (_WIDER if unchanged else _MUCH_WIDER)


def _recalled(stored: StoreFile, message: str, unchanged: bool) -> RecalledTraining:
    prior = stored.prior.widened(_WIDER if unchanged else _MUCH_WIDER, _LEAST_SPREAD)
    return RecalledTraining(message, {_key_of(result): result for result in stored.learned}, prior, unchanged)


def _stored_for(folder: Path, key: Key, trouble: list[str]) -> Iterator[tuple[Path, StoreFile]]:
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
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise HastenError("it is not a file")
    if status.st_size > _MOST_BYTES:
        raise HastenError(f"it has {status.st_size:,} bytes, and is none that tune wrote")
    stored = read_plain(StoreFile, path, SCHEMA, "what a tune learned", "delete it, or give --no-memory")
    figures = [(result.mean, result.spread) for result in stored.learned]
    figures += [result.validation for result in stored.learned if result.validation is not None]
    sane = all(abs(mean) <= _MOST and 0 <= spread <= _MOST for mean, spread in figures)  # NaN is neither
    if not sane or len(stored.prior.rows) > _MOST_ROWS or not stored.prior.is_sane(_MOST):
        raise HastenError("it holds figures that no training gives")
    return stored


def _key_of(result: SettingResult) -> str:
    return Candidate(result.name, result.setting).key


def _why(error: Exception) -> str:
    text = error.message if isinstance(error, HastenError) else str(error)
    return without_paths(text.splitlines()[0])[:200]


def _day(stored: StoreFile) -> str:
    return day[0] if (day := re.match(r"\d{4}-\d\d-\d\d", stored.date)) else "an unknown day"
