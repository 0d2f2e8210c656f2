"""The critical batch of real scripts whose gradients follow a known law, and of those that have none."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hasten import HastenError
from hasten.batch.noise import CriticalBatch, as_json, critical_batch, lines, steps_to_look_at
from hasten.batch.words import as_json as page_as_json
from hasten.batch.words import lines as page
from hasten.techniques.convergence.gradient_sketch import sketch
from hasten.techniques.convergence.noise_scale import NoiseScale
from tests.batch.test_search import MB, attempts_of, found_by
from tests.taps.forked_pythons import forked_pythons

# A sample's gradient is w - x, with x around 0 and a spread of 1 in each of 50 dimensions: tr(Sigma) = 50. SGD with a
# rate of 0.1 leaves 0.9 of w in each step, where |w|^2 = 50 * 4 at the start; clipping would leave less of a gradient.
SCRIPT = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((50,), 2.0))
            self.norm = torch.nn.BatchNorm1d(50, affine=False)  # its buffers move, its output is not used

        def forward(self, x):
            self.norm(x)
            return 0.5 * (self.w - x).square().sum(1)

    torch.manual_seed(0)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = DataLoader(TensorDataset(torch.randn(1003, 50)), batch_size=8, shuffle=True)
    parts = {parts}
    for epoch in range(8):
        for number, (x,) in enumerate(data):
            (model(x).mean() / parts).backward()
            if (number + 1) % parts == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
"""
# As Lightning's loop does: forward and backward in the step's closure, clipping behind them.
BY_CLOSURE = (
    SCRIPT[: SCRIPT.index("    for epoch")]
    + """
    for epoch in range(8):
        for (x,) in data:
            def closure():
                optimizer.zero_grad()
                loss = model(x).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})
                return loss
            optimizer.step(closure)
"""
)


@pytest.fixture(autouse=True)
def attempts_are_forks() -> Iterator[None]:
    """A script that is looked at is a fork of this process: no memory is measured here, and torch is imported."""
    with forked_pythons():
        yield


def truth(step: int, clip: float = math.inf) -> float:
    """The noise scale after so many steps, of weights that go straight to the mean."""
    norm = math.sqrt(50 * 4)
    for _ in range(step):
        norm -= 0.1 * min(norm, clip)
    return 50 / norm**2


@pytest.mark.parametrize(
    ("script", "parts", "clip"),
    [(SCRIPT, 1, math.inf), (SCRIPT, 2, 5.0), (BY_CLOSURE, 1, 5.0)],
    ids=["plain", "accumulated and clipped", "closure"],
)
def test_a_script_whose_noise_scale_is_known_gets_it(tmp_path: Path, script: str, parts: int, clip: float) -> None:
    script = script.format(parts=parts, clip=clip if clip < math.inf else 1e9)
    found = critical_batch(attempts_of(script, tmp_path), 8, 1003, (3, 12), lambda line: None)
    assert found.why == ""
    assert [step for step, _ in found.looks] == [3, 12]
    for step, noise in found.looks:
        assert noise.samples == 8 * parts
        assert noise.gradients >= 31  # all but one of a pass that is smaller
        # The way to these weights was noisy too. Had they gone on, 16 steps would have come to 20 times as much.
        assert noise.low / 1.3 <= truth(step, clip) <= noise.high * 1.3, (step, noise, truth(step, clip))
        assert noise.high < 3 * truth(step, clip)
    assert not list((tmp_path / "scratch").iterdir())


ENDS = [
    (
        """
        other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        for epoch in range(40):
            for (x,) in data:
                for one in (optimizer, other):
                    model(x).square().mean().backward()
                    one.step()
        """,
        "several optimizers",
    ),
    (
        """
        for (x,) in data:
            model(x).square().mean().backward()
            optimizer.step()
        """,
        "fewer than 28 steps",
    ),
    (
        """
        for epoch in range(10):
            for (x,) in data:
                def closure():
                    optimizer.zero_grad()
                    for part in x.chunk(2):
                        loss = model(part).square().mean()
                        loss.backward()
                    return loss
                optimizer.step(closure)
        """,
        "goes backward several times",
    ),
]
HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=8)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(("loop", "why"), ENDS, ids=["two optimizers", "too short", "closure"])
def test_a_script_that_cannot_be_looked_at_is_told_why(tmp_path: Path, loop: str, why: str) -> None:
    import textwrap

    found = critical_batch(attempts_of(HEAD + textwrap.dedent(loop), tmp_path), 8, 160, (8,), lambda line: None)
    assert found.looks == ()
    assert why in found.why
    assert why in lines(found)[0]


def test_few_batches_are_not_asked() -> None:
    from hasten.batch.attempt import Attempts

    found = critical_batch(Attempts([], (), Path(), 0), 8, 24, (3,), lambda line: None)
    assert "fewer than 4 batches" in found.why


def test_folded_gradients_keep_their_products() -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = [3000, 1, 40_000, 7000]
    rows = [[torch.randn(size, generator=draw) for size in sizes] for _ in range(2)]
    rows[1] = [one + 0.5 * other for one, other in zip(rows[1], rows[0], strict=True)]
    flat = [torch.cat(row) for row in rows]
    whole = [sketch(list(row), sizes, width=10**6) for row in rows]
    assert all(torch.equal(one, other) for one, other in zip(whole, flat, strict=True))
    small = [sketch(list(row), sizes, width=4096) for row in rows]
    assert [len(one) for one in small] == [4096, 4096]
    for one, other in ((0, 0), (0, 1), (1, 1)):
        off = float(small[one] @ small[other] - flat[one] @ flat[other])
        assert abs(off) < 5 / math.sqrt(4096) * float(flat[one].norm() * flat[other].norm())
    assert torch.equal(sketch(list(rows[0]), sizes, width=4096), small[0])  # the same signs each time


def test_parameters_without_gradients_are_zeros_and_sparse_ones_are_read() -> None:
    sparse = torch.sparse_coo_tensor([[1]], [[2.0, 3.0]], (4, 2))
    assert sketch([None, sparse], [3, 8]).tolist() == [0, 0, 0, 0, 0, 2, 3, 0, 0, 0, 0]


def test_the_folding_draws_nothing_from_the_scripts_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sketch([torch.ones(100)], [100], width=10)
    assert torch.equal(torch.get_rng_state(), before)


def test_steps_are_read_and_nonsense_is_refused() -> None:
    assert steps_to_look_at("10, 30,90") == (10, 30, 90)
    assert steps_to_look_at("0") == ()
    for wrong in ("", "10,5", "0,5", "5,5", "many", "-3", "3,"):
        with pytest.raises(HastenError, match="--noise-at"):
            steps_to_look_at(wrong)


def test_the_page_and_the_file_say_what_it_means() -> None:
    found = found_by(10_000 * MB)
    found.critical = CriticalBatch(
        ((10, NoiseScale(120.0, 80.0, 200.0, 16, 8)), (30, NoiseScale(900.0, 400.0, math.inf, 16, 8)))
    )
    text = "\n".join(page(found))
    assert "           10       120   80 to 200\n           30       900   400 to no bound" in text
    assert f"By it, batch {found.saturated} takes" in text
    data = json.loads(json.dumps(page_as_json(found, ("train.py",))))["critical_batch"]
    assert data["looks"][1] == {
        "after_steps": 30, "batch_size": 900.0, "low": 400.0, "high": None, "gradients": 16, "samples_in_each": 8,
    }  # fmt: skip
    steps = (1 + 900 / found.saturated) / (1 + 900 / 8)
    assert data["at_saturated"]["steps_factor"] == round(steps, 3)
    found.critical = CriticalBatch(((10, NoiseScale(3.0, 2.0, 5.0, 16, 8)),), "the script ended before")
    text = "\n".join(page(found))
    assert "batch 8 is above it" in text
    assert "no later look: the script ended before" in text
    assert as_json(found.critical)["why_no_more"] == "the script ended before"
