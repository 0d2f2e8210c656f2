"""What blocks tell of each technique: effects that were put in come out again, within their intervals."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hasten.online.posterior import CandidateEstimate, Posterior

PRIOR = (-0.03, 0.2)
SMALL = [-0.1, 0.05, 0.0, 0.2, -0.02]


def filled(
    effects: list[float],
    blocks: int,
    seed: int,
    noise: float = 0.05,
    together: dict[tuple[int, int], float] | None = None,
    drift: float = 0.0,
    hiccups: float = 0.0,
    processes: int = 1,
) -> Posterior:
    """A posterior that saw so many blocks, each with a set of techniques drawn by lot."""
    lot = random.Random(seed)
    together = together or {}
    found = Posterior([PRIOR] * len(effects), dict.fromkeys(together, (0.0, 0.15)))
    level = lot.gauss(0, 3)
    for number in range(blocks):
        process = number * processes // blocks
        if number and process != (number - 1) * processes // blocks:
            level += lot.gauss(0, 0.15)
        level += drift * lot.gauss(0, noise)
        on = {i for i in range(len(effects)) if lot.random() < 0.6}
        pace = level + sum(effects[i] for i in on) + noise * lot.gauss(0, 1)
        pace += sum(more for (one, other), more in together.items() if {one, other} <= on)
        if lot.random() < hiccups:
            pace += 2 * lot.random()
        found.add(on, math.exp(pace), process)
    return found


WORLDS = {
    "quiet": {"noise": 0.01},
    "noisy": {"noise": 0.1},
    "drifting": {"drift": 0.3},
    "with hiccups": {"hiccups": 0.05},
    "several processes": {"processes": 4},
    "all of it": {"drift": 0.3, "hiccups": 0.05, "processes": 3},
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_effects_lie_in_their_intervals(world: dict[str, float]) -> None:
    """95 % of 240 effects, and the estimates are no more than the noise off."""
    inside, misses = 0, []
    for seed in range(40):
        lot = random.Random(1000 + seed)
        effects = [lot.gauss(*PRIOR) for _ in range(6)]
        found = filled(effects, 60, seed, **world)
        for index, true in enumerate(effects):
            estimate = found.estimate(index, ())
            inside += abs(estimate.mean - true) < 1.96 * estimate.spread
            misses.append(abs(estimate.mean - true))
    assert 0.87 * 240 <= inside <= 0.995 * 240
    assert sum(misses) / len(misses) < 0.6 * world.get("noise", 0.05) + 0.005


@pytest.mark.parametrize("far", [math.log(25), -math.log(25)], ids=["slower", "faster"])
@pytest.mark.parametrize("blocks", [16, 60])
def test_an_effect_far_beyond_what_was_expected_leaves_the_others_their_intervals(far: float, blocks: int) -> None:
    """One of 25 times, which the expectation has 16 deviations off; 5 % noise. It must not pass for noise."""
    inside, sure, noises, spreads = 0, 0, [], []
    for seed in range(40):
        lot = random.Random(2000 + seed)
        effects = [far, *(lot.gauss(*PRIOR) for _ in range(5))]
        found = filled(effects, blocks, seed)
        estimates = [found.estimate(index, ()) for index in range(6)]
        inside += sum(abs(one.mean - true) < 1.96 * one.spread for one, true in zip(estimates, effects, strict=True))
        sure += estimates[0].helps < 1e-6 if far > 0 else estimates[0].helps > 1 - 1e-6
        spreads += [one.spread for one in estimates[1:]]
        noises.append(found.noise)
    assert sure == 40
    assert 0.87 * 240 <= inside <= 0.995 * 240
    assert 0.04 < sum(noises) / len(noises) < (0.06 if blocks > 30 else 0.1)
    assert sum(spreads) / len(spreads) < 3 * 0.05 / math.sqrt(blocks / 2)


@settings(max_examples=30)
@given(st.floats(-4, 4), st.integers(0, 1 << 32))
def test_how_large_an_effect_is_says_nothing_of_the_others(far: float, seed: int) -> None:
    """The same blocks, but that one technique makes steps up to 50 times faster or slower."""
    found, other = filled([far, *SMALL], 40, seed), filled([0.0, *SMALL], 40, seed)
    for index in range(1, 1 + len(SMALL)):
        one, before = found.estimate(index, ()), other.estimate(index, ())
        assert abs(one.mean - before.mean) < before.spread
        assert one.spread == pytest.approx(before.spread, rel=0.5)


def test_a_pair_that_acts_together_is_told_apart_from_each_alone() -> None:
    """Each alone is worth 0.1 or 0.2, both together no more than the better: seen over 20 searches."""
    inside = 0
    for seed in range(20):
        found = filled([-0.2, -0.1, 0.05], 60, seed, together={(0, 1): 0.1})
        assert found.estimate(1, ()).mean < -0.03
        both = found.estimate(1, {0})
        inside += abs(both.mean) < 1.96 * both.spread
        gain, spread = found.gain({0, 1})
        assert gain == pytest.approx(-0.2, abs=4 * spread)
        assert spread < 0.06
    assert inside >= 16


def test_without_a_known_pair_its_effect_is_not_made_up() -> None:
    found = filled([-0.2, 0.1], 40, 3)
    assert found.estimate(0, {1}) == found.estimate(0, ())


def test_a_hiccup_decides_nothing() -> None:
    """A block that took 50 times as long moves no estimate by more than its own spread."""
    before, after = filled([-0.1, 0.05, 0.0], 30, 1), filled([-0.1, 0.05, 0.0], 30, 1)
    after.add({0, 2}, 50 * math.exp(after.level))
    for index in range(3):
        moved = after.estimate(index, ()).mean - before.estimate(index, ()).mean
        assert abs(moved) < 2 * before.estimate(index, ()).spread
    assert after.noise < 2 * before.noise


def test_the_noise_is_found() -> None:
    for noise in (0.02, 0.05, 0.15):
        seen = [filled([-0.1, 0.1], 60, seed, noise=noise).noise for seed in range(8)]
        assert sum(seen) / len(seen) == pytest.approx(noise, rel=0.35)


def test_what_was_never_asked_is_as_expected() -> None:
    found = Posterior([(-0.1, 0.2), (0.05, 0.1)])
    assert found.estimate(0, ()) == CandidateEstimate(-0.1, pytest.approx(0.2), 0, 0)
    found.add({1}, 0.5)
    found.add((), 0.5)
    assert found.estimate(0, ()).mean == pytest.approx(-0.1)
    assert found.estimate(1, ()).blocks == found.estimate(1, ()).without == 1


def test_draws_are_as_likely_as_the_posterior_says() -> None:
    found = filled([-0.2, 0.1, 0.0], 30, 5)
    lot = random.Random(0)
    draws = [found.draw(lot) for _ in range(3000)]
    for index in range(3):
        estimate = found.estimate(index, ())
        seen = [draw[index] for draw in draws]
        mean = sum(seen) / len(seen)
        assert mean == pytest.approx(estimate.mean, abs=0.1 * estimate.spread)
        spread = math.sqrt(sum((one - mean) ** 2 for one in seen) / len(seen))
        assert spread == pytest.approx(estimate.spread, rel=0.1)


@given(st.floats(-1, 1), st.floats(1e-3, 0.5))
def test_an_estimate_in_words(mean: float, spread: float) -> None:
    """Its ratio is above 1 just where it is likely to help, and lies in its interval."""
    estimate = CandidateEstimate(mean, spread, 3, 3)
    ratio, low, high = estimate.ratio
    assert low < ratio < high
    assert 0 <= estimate.helps <= 1
    if abs(mean) > 1e-9:
        assert (ratio > 1) == (mean < 0)
        assert (estimate.helps > 0.5) == (mean < 0) or abs(mean / spread) < 1e-9


BLOCKS = st.lists(
    st.tuples(st.sets(st.integers(0, 3)), st.floats(1e-6, 1e4), st.integers(0, 2)), min_size=1, max_size=40
)


@example([(set(), 8.0, 0), ({0, 1, 2}, 7.0, 0), ({0, 2}, 1.0, 0)], random.Random(0))
@given(BLOCKS, st.randoms(use_true_random=False))
def test_any_blocks_give_finite_estimates_that_grow_surer(
    blocks: list[tuple[set[int], float, int]], lot: random.Random
) -> None:
    """Blocks of any length, in any order and from any process; more blocks at the same noise are never less sure."""
    found = Posterior([PRIOR] * 4, {(0, 1): (-0.1, 0.2)})
    for on, seconds, process in blocks:
        found.add(on, seconds, process)
    for index in range(4):
        estimate = found.estimate(index, {0, 1})
        assert math.isfinite(estimate.mean)
        terms = [(found.means()[index], PRIOR)] + [(found.means()[4], (-0.1, 0.2))] * (index < 2)  # the pair's is last
        # Each by itself: of two that are far off, one to either side, the sum is not.
        widest = math.hypot(*(max(spread, abs(mean - expected)) for mean, (expected, spread) in terms))
        assert 0 < estimate.spread <= widest + 1e-6, "wider only where it is far off"
        assert estimate.blocks + estimate.without == len(blocks)
    assert all(map(math.isfinite, found.draw(lot)))
    assert math.isfinite(found.level)


@given(st.floats(1e-4, 1e3))
def test_the_unit_of_time_does_not_matter(unit: float) -> None:
    """The same blocks measured in other units say the same of each technique."""
    lot = random.Random(2)
    one, other = Posterior([PRIOR] * 3), Posterior([PRIOR] * 3)
    for _ in range(12):
        on, seconds = {i for i in range(3) if lot.random() < 0.5}, math.exp(lot.gauss(0, 0.1))
        one.add(on, seconds)
        other.add(on, unit * seconds)
    for index in range(3):
        assert one.estimate(index, ()).mean == pytest.approx(other.estimate(index, ()).mean, abs=1e-6)


def test_more_blocks_make_it_surer() -> None:
    spreads = [filled([-0.1, 0.1, 0.0], blocks, 4).estimate(0, ()).spread for blocks in (8, 20, 60, 120)]
    assert all(later < before for before, later in pairwise(spreads))
