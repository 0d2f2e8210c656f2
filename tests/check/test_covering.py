"""The rows of test_pairs.py hold what they are said to hold: kinds of training, techniques, all pairs that can meet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, combinations, product

import pytest

from benchmarks.exact.cover import Pair, pairs_of
from benchmarks.exact.rows import ELSEWHERE, FOR_MEMORY, ON_FILES, SETTINGS, Row, acts, fits
from benchmarks.exact.trainings import DATA, EXTRAS, FILES, MANY_CLASSES, MODELS, OPTIMIZERS
from hasten.techniques import CATALOGUE
from hasten.techniques.base import Effect
from tests.check.test_pairs import EAGER, FEW, IN_BACKWARD, OF_FILES, OF_MANY_CLASSES, QUICK, apart, everything

FAST = [*FEW, *OF_FILES, OF_MANY_CLASSES, IN_BACKWARD]
# What a training of each kind has in its source.
KINDS = {
    "convolutions": r"nn\.Conv2d\(",
    "BatchNorm": r"nn\.BatchNorm2d\(",
    "dropout": r"nn\.Dropout\(",
    "recurrence": r"nn\.LSTM\(",
    "embeddings": r"nn\.Embedding\(\d+, \d+\)",
    "sparse embeddings": r"nn\.Embedding\(\d+, \d+, sparse=True\)",
    "attention": r"F\.scaled_dot_product_attention\(",
    "tied weights": r"head\.weight = self\.embed\.weight",
    "two optimizers": r"\noptimizers = \[torch\.optim\.\w+\(.*torch\.optim\.\w+\(.*\)\]",
    "accumulation": r"if \(number \+ 1\) % 2 == 0:",
    "clipping": r"clip_grad_norm_\(",
    "closures": r"def closure\(\):\n(.*\n)+.*\.step\(closure\)",
    "schedules": r"lr_scheduler\.\w+\(",
    "averaged weights": r"AveragedModel\(model\) if True",
    "validation": r"model\.eval\(\)\n",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_training_is_in_the_fast_rows(kind: str) -> None:
    assert [row.name for row in FAST if re.search(KINDS[kind], row.script)]


def test_each_technique_is_in_the_rows() -> None:
    """But for those that are compared elsewhere, and those that change the optimisation path."""
    held = {name for name, technique in CATALOGUE.items() if technique.effect is not Effect.TRAJECTORY} - set(ELSEWHERE)
    assert {name for row in [*everything(), *apart()] for name in row.plan} == held
    # These take minutes: one compiles C++, the other acts on a million numbers and more.
    assert {name for row in FAST for name in row.plan} == held - {"compile", "set_to_none"}


def test_each_pair_of_techniques_that_can_meet_meets_in_the_fast_rows() -> None:
    of_techniques = {pair for pair in possible(QUICK) if set(pair) <= set(QUICK)}
    assert len(of_techniques) > 50
    assert of_techniques <= met(FEW)


def test_each_technique_meets_every_other_and_each_kind_of_training() -> None:
    techniques = list(SETTINGS)
    pairs = possible(techniques)
    # Without `compile`, which is in few rows, kinds of training meet each other, too.
    assert {pair for pair in pairs if "compile" not in pair} <= met(
        row for row in everything() if "compile" not in row.plan
    )
    assert pairs <= met(everything())


@pytest.mark.parametrize("technique", [*ON_FILES, *FOR_MEMORY])
def test_what_is_in_rows_of_its_own_meets_everything_else_there(technique: str) -> None:
    pairs = possible([*EAGER, *ON_FILES, *FOR_MEMORY], DATA | FILES, [*EXTRAS, MANY_CLASSES])
    assert {pair for pair in pairs if technique in pair} <= met(apart())


def met(rows: Iterable[Row]) -> set[Pair]:
    """Return the pairs that meet in rows: of techniques, and of these with parts of trainings."""
    return {pair for row in rows for pair in pairs_of(row.features())}


def possible(techniques: Iterable[str], data: Iterable[str] = DATA, loops: Sequence[str] = EXTRAS) -> set[Pair]:
    """Return the pairs that can meet, by trying each training; a pair needs no more than two kinds of loop."""
    found = set()
    extras = list(chain.from_iterable(combinations(loops, number) for number in range(3)))
    for model, optimizer, kind, extra in product(MODELS, OPTIMIZERS, data, extras):
        if fits(model, optimizer, extra):
            on = [name for name in techniques if acts(name, model, optimizer, kind, extra)]
            found |= pairs_of([*Row.features_of([model], [optimizer], [kind], extra), *on])
    return found
