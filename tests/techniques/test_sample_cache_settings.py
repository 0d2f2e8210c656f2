"""Where the sample cache is worth trying, and which of a dataset's functions it may keep the results of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hasten.evidence import LoaderFacts, Probe
from hasten.techniques import Choices, Refusal
from hasten.techniques.data.sample_cache import SampleCache, with_loader_function
from tests.techniques.conftest import LOADER, evidence_of


def facts(loader: LoaderFacts = LOADER, **probe: Any) -> LoaderFacts:
    known = {"repeatable": True, "sample_seconds": 1e-3, "sample_bytes": 4096}
    return dataclasses.replace(loader, probe=Probe(**{**known, **probe}))


ROLLED = {"repeatable": False, "loader_function": "pil_loader", "loader_repeatable": True, "loader_seconds": 1e-3}


@pytest.mark.parametrize(
    ("loaders", "share", "expected"),
    [
        ((facts(),), 0.5, ("samples",)),
        ((facts(**ROLLED),), 0.5, ("decoded",)),
        ((facts(**ROLLED), dataclasses.replace(facts(), role="validation")), 0.5, ("both",)),
        ((facts(**ROLLED), dataclasses.replace(facts(sample_bytes=1 << 40), role="validation")), 0.5, ("decoded",)),
        ((facts(**ROLLED), dataclasses.replace(facts(), role="unused")), 0.5, ("decoded",)),
        ((facts(), dataclasses.replace(facts(**ROLLED), role="validation")), 0.5, "not every loader"),
        ((facts(), dataclasses.replace(facts(**ROLLED), role="unused")), 0.5, ("samples",)),
        ((facts(repeatable=False),), 0.5, "gives other samples"),
        ((facts(**{**ROLLED, "loader_repeatable": False}),), 0.5, "gives other samples"),
        ((facts(sample_seconds=5e-6),), 0.5, "no more than the cache itself"),
        ((facts(sample_bytes=1 << 40),), 0.5, "do not fit"),
        ((facts(repeatable=None, failed="ValueError: x"),), 0.5, "ValueError: x"),
        ((dataclasses.replace(LOADER, probe=None),), 0.5, "no probe"),
        ((dataclasses.replace(facts(), iterable=True),), 0.5, "no index"),
        ((dataclasses.replace(facts(), start_method="spawn", num_workers=2),), 0.5, "spawn"),
        ((dataclasses.replace(facts(), start_method="spawn", num_workers=0),), 0.5, ("samples",)),
        ((facts(),), 0.01, "waits 1 %"),
        ((), 0.5, "without a DataLoader"),
    ],
)
def test_worth_trying(loaders: tuple[LoaderFacts, ...], share: float, expected: Any) -> None:
    answer = SampleCache.settings(evidence_of(loaders=loaders, data_share=share))
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def test_the_loader_function_is_found_inside_subsets_only_where_it_is_an_attribute_of_its_own() -> None:
    inner = Holder(loader=print)
    assert with_loader_function(Holder(dataset=Holder(dataset=inner))) is inner
    assert with_loader_function(Holder(loader="not a function")) is None

    class WithMethod:
        def loader(self) -> None: ...

    assert with_loader_function(WithMethod()) is None
    endless = Holder()
    endless.dataset = endless
    assert with_loader_function(endless) is None
