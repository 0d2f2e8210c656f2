"""Search: tries each applicable technique's settings and keeps what wins by more than the noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hasten.evidence import Evidence, Phase
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Choices, Effect, Refusal, Resource, Technique, toml_value
from hasten.tuner.length import Length, seconds_per_epoch
from hasten.tuner.proof import Ratio, Skipped, Tried
from hasten.tuner.stats import ratio_of
from hasten.tuner.timing import Timing
from hasten.tuner.trial import Trial, Trials

_LEAST_GAIN = 1.01
_HOPELESS = 0.97  # one trial this much slower than the last is not repeated
_CLEAR = 1.12  # one trial this much faster needs one repetition, not two
_DOUBTED = 3  # pairs after which a technique that still shows no gain is dropped from the combination
_FRESH = 20.0  # seconds for which a measurement of the present plan stands beside a new one: machines drift
_LAST = ("compile",)  # tried when the rest is settled: each change of what it compiles costs a compilation

Say = Callable[[str], None]
Settings = dict[str, Setting]


@dataclass
class Gain:
    """A technique that was kept, and what it brought when it was added."""

    name: str
    setting: Setting
    ratio: Ratio
    how: str
    why: str


@dataclass
class Search:
    """The plan as it grows.

    Args:
        trials: Where trials run.
        evidence: Of the baseline, with probed datasets.
        length: Of the full training: what start-up costs are weighed against.
        until: Monotonic time at which the search must leave the rest of the budget to the proof.
        say: Progress, a line each.
        allow_trajectory: Whether techniques that change the optimisation path may be tried.
        only: Names of the techniques to try; empty for all.
    """

    trials: Trials
    evidence: Evidence
    length: Length
    until: Callable[[], float]
    say: Say
    allow_trajectory: bool = False
    only: frozenset[str] = frozenset()
    plan: Settings = field(default_factory=dict)
    gains: dict[str, Gain] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    _latest: dict[str, tuple[Trial, float]] = field(default_factory=dict)
    _again: list[tuple[str, Choices, Settings]] = field(default_factory=list)
    _combining: bool = False

    # -- the whole search ------------------------------------------------------------------------------

    def run(self) -> None:
        """Try everything that applies, each on top of what was kept before it."""
        for name, choices in self._candidates():
            if not self._time_left(name):
                continue
            before = dict(self.plan)
            lost_by = self._try(name, choices)
            if lost_by is not None and lost_by > 0.9:
                self._again.append((name, choices, before))

    def run_again(self) -> None:
        """Try what lost narrowly once more, where what was kept since could change its worth."""
        for name, choices, before in self._again:
            if self.plan != before and _hangs_together(name, self.plan, before) and self._seconds_left() > 0:
                self.say(f"{name} once more, on top of {', '.join(self.plan)}")
                self._try(name, choices)

    def _candidates(self) -> list[tuple[str, Choices]]:
        shares = self._shares()
        found = []
        for name, technique in CATALOGUE.items():
            if self.only and name not in self.only:
                self.skipped.append(Skipped(name, "not among those that --only names"))
            elif technique.effect is Effect.TRAJECTORY and not self.allow_trajectory:
                self.skipped.append(Skipped(name, "changes the optimisation path; tried only with --allow trajectory"))
            elif isinstance(answer := self._ask(technique), Refusal):
                self.skipped.append(Skipped(name, answer.reason))
            else:
                found.append((name, answer))
        return sorted(found, key=lambda one: (one[0] in _LAST, -shares[CATALOGUE[one[0]].relieves]))

    def _ask(self, technique: type[Technique]) -> Choices | Refusal:
        return technique.settings(self.evidence)

    def _shares(self) -> dict[Resource, float]:
        """How much of the time each resource's techniques could relieve."""
        evidence = self.evidence
        compute = evidence.share(Phase.FORWARD) + evidence.share(Phase.BACKWARD)
        trained = sum(over.end - over.start for over in evidence.passes if over.trained)
        validated = sum(over.end - over.start for over in evidence.passes if not over.trained)
        return {
            Resource.DATA: evidence.share(Phase.DATA),
            Resource.TRANSFER: evidence.share(Phase.TRANSFER),
            Resource.COMPUTE: compute,
            Resource.MEMORY: compute,
            Resource.OPTIMIZER: evidence.share(Phase.OPTIMIZER),
            Resource.VALIDATION: validated / (trained + validated) if trained + validated > 0 else 0.0,
        }

    def _seconds_left(self) -> float:
        """Time for more candidates: what leaving out each kept technique will take is set aside."""
        each = statistics.median([trial.seconds for trial in self.trials.done if trial.ok] or [10.0])
        aside = 0.0 if self._combining else 1.2 * each * len(self.plan)
        return self.until() - aside - time.monotonic()

    def _time_left(self, name: str) -> bool:
        if self._seconds_left() > 0:
            return True
        self.skipped.append(Skipped(name, "not tried: the budget was spent"))
        return False

    # -- one technique -----------------------------------------------------------------------------------

    def _try(self, name: str, choices: Choices) -> float | None:
        """Race each setting against the plan as it is; the best ratio if none was kept, else None."""
        best = 0.0
        base = {key: value for key, value in self.plan.items() if key != name}
        for setting in choices.settings:
            if self._seconds_left() <= 0 and best:
                break
            ratio = self._race(name, setting, {**base, name: setting}, choices.why)
            best = max(best, ratio)
        return None if name in self.plan else best

    def _race(self, name: str, setting: Setting, plan: Settings, why: str) -> float:
        """Measure a candidate against the present plan, alternately until it is clear which is faster."""
        start = time.monotonic()
        pairs: list[tuple[Timing, Timing]] = []
        label = f"{name} = {toml_value(setting)}"
        while True:
            base = self.measured(self.plan, fresh=len(pairs) > 0 and not _clear(pairs))
            other = self.trials.run(plan, timeout=self._timeout())
            if base.timing is None or other.timing is None:
                self._note(name, setting, other.outcome, other.reason, None, start)
                self.say(f"{label}: {other.outcome}: {other.reason}")
                return 0.0
            self._latest[_key(plan)] = (other, time.monotonic())
            pairs.append((base.timing, other.timing))
            ratio = ratio_of(pairs)
            if (verdict := self._verdict(ratio, pairs)) is not None:
                break
        outcome, reason = verdict
        self._note(name, setting, outcome, reason, ratio, start)
        if outcome == "kept":  # before it is said: who reads that may press Ctrl-C and count on it
            self.gains[name] = Gain(name, setting, ratio, "when it was added", why)
            self.plan = plan
        self.say(f"{label}: {ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}], {outcome}")
        return ratio.ratio

    def _verdict(self, ratio: Ratio, pairs: list[tuple[Timing, Timing]]) -> tuple[str, str] | None:
        """Kept or lost and why; None to measure once more."""
        if ratio.ratio < _HOPELESS and len(pairs) == 1:
            return "lost", f"{ratio.ratio:.2f}x of the speed without it"
        if len(pairs) == 1 or (len(pairs) == 2 and ratio.low <= 1.0 < ratio.ratio and self._seconds_left() > 0):
            return None
        if ratio.low <= 1.0 or ratio.ratio < _LEAST_GAIN:
            return "lost", f"{ratio.ratio:.2f}x is within the noise [{ratio.low:.2f}, {ratio.high:.2f}]"
        return self._weighed(pairs[-1][0], pairs[-1][1]) or ("kept", "")

    def _weighed(self, base: Timing, other: Timing) -> tuple[str, str] | None:
        """A gain per epoch against what start-up takes longer."""
        extra = other.startup - base.startup
        gain = seconds_per_epoch(base) - seconds_per_epoch(other)
        if extra <= 1.0 or extra < gain * self.length.epochs:
            return None
        what = f"costs {extra:.0f} s at the start and gains {gain:.2f} s an epoch"
        return "lost", f"{what}: not won back in {self.length.epochs} epochs"

    def measured(self, plan: Mapping[str, Setting], fresh: bool = False) -> Trial:
        """A trial of a plan: the latest, unless it is old or a fresh one is asked for."""
        trial, at = self._latest.get(_key(plan), (None, 0.0))
        if trial is None or fresh or time.monotonic() - at > _FRESH:
            trial = self.trials.run(plan, timeout=self._timeout())
            self._latest[_key(plan)] = (trial, time.monotonic())
        return trial

    def remember(self, trial: Trial) -> None:
        """Let a trial that was run elsewhere stand for its plan."""
        self._latest[_key(trial.plan)] = (trial, time.monotonic())

    def _timeout(self) -> float:
        """A trial that takes several times as long as the longest so far, compilation aside, hangs."""
        longest = max((trial.seconds for trial in self.trials.done if trial.ok), default=30.0)
        return 4 * longest + 150.0

    def _note(self, name: str, setting: Setting, outcome: str, reason: str, ratio: Ratio | None, start: float) -> None:
        seconds = time.monotonic() - start
        if ratio is None:
            self.tried.append(Tried(name, setting, outcome, reason, seconds=seconds))
        else:
            self.tried.append(
                Tried(name, setting, outcome, reason, ratio.ratio, ratio.low, ratio.high, seconds=seconds)
            )

    # -- the combination ---------------------------------------------------------------------------------

    def check_combination(self) -> None:
        """Leave out each kept technique in turn: its contribution, or that it no longer helps."""
        if len(self.plan) < 2:
            return
        self._combining = True
        for name in sorted(self.plan, key=lambda kept: self.gains[kept].ratio.ratio):
            without = {key: value for key, value in self.plan.items() if key != name}
            if self._seconds_left() <= 0 or not without:
                return
            start = time.monotonic()
            self.say(f"leaving out {name}")
            pairs = self._pairs_without(without)
            if pairs is None:
                continue
            ratio = ratio_of(pairs)
            if ratio.ratio < 1.0 and (len(pairs) == _DOUBTED or ratio.high < 1.0):
                self._note(name, self.plan[name], "dropped", "no longer helps in the combination", ratio, start)
                self.say(f"{name} no longer helps in the combination ({ratio.ratio:.2f}x): dropped")
                self.plan = without
                del self.gains[name]
            else:
                gain = self.gains[name]
                self.gains[name] = Gain(name, gain.setting, ratio, "leave-one-out", gain.why)

    def drop(self, names: list[str], reason: str) -> None:
        """Take techniques out of the plan again."""
        for name in names:
            gain = self.gains.pop(name)
            self._note(name, gain.setting, "dropped", reason, gain.ratio, time.monotonic())
        self.plan = {name: setting for name, setting in self.plan.items() if name not in names}

    def _pairs_without(self, without: Settings) -> list[tuple[Timing, Timing]] | None:
        """Pairs of (without, with), three where the first leave doubt; None where it does not run without."""
        pairs: list[tuple[Timing, Timing]] = []
        while len(pairs) < _DOUBTED:
            full = self.measured(self.plan, fresh=bool(pairs))
            less = self.trials.run(without, timeout=self._timeout())
            if full.timing is None or less.timing is None:
                return None
            self._latest[_key(without)] = (less, time.monotonic())
            pairs.append((less.timing, full.timing))
            if ratio_of(pairs).ratio > 1.03 or self._seconds_left() <= 0:
                break
        return pairs


def _clear(pairs: list[tuple[Timing, Timing]]) -> bool:
    return len(pairs) == 1 and ratio_of(pairs).ratio > _CLEAR


def _key(plan: Mapping[str, Setting]) -> str:
    return repr(sorted(plan.items()))


def _hangs_together(name: str, plan: Settings, before: Settings) -> bool:
    """Whether what was kept since could change a technique's worth: it relieves another part, or is compile."""
    added = [CATALOGUE[other].relieves for other in plan if other not in before]
    return "compile" in set(plan) - set(before) or any(part is not CATALOGUE[name].relieves for part in added)
