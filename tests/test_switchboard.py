"""The Switchboard: what is on, what is told of what is built, what fails."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.errors import HastenError
from hasten.switchboard import Switchboard
from hasten.techniques import Effect, Liveness, Resource, Technique
from hasten.techniques.compute.cpu_threads import CpuThreads
from hasten.techniques.compute.precision import Precision


class Adding(Technique):
    """Adds its setting to what the call gives."""

    name = "adding"
    effect = Effect.EXACT
    relieves = Resource.COMPUTE
    liveness = Liveness.STEP
    values = int

    def __init__(self, setting: Any) -> None:
        super().__init__(setting)
        self.told: list[Any] = []
        self.wrapped = 0

    def model(self, model: Any, args: Any) -> None:
        self.told.append(model)

    def forward(self, call: Any) -> Any:
        self.wrapped += 1
        return lambda number: call(number) + self.setting

    def batches(self, fetch: Any, iterator: Any) -> Any:
        return lambda: fetch() + self.setting


class Doubling(Adding):
    """Doubles what the call gives."""

    name = "doubling"
    values = (True,)

    def forward(self, call: Any) -> Any:
        return lambda number: 2 * call(number)


class Failing(Adding):
    """Fails in the place that is its setting."""

    name = "failing"
    values = ("on", "off", "model", "forward", "batches")

    def _maybe(self, place: str) -> None:
        if self.setting == place:
            raise RuntimeError(f"no {place} here\nwith more lines")

    def on(self) -> None:
        super().on()
        self._maybe("on")

    def off(self) -> None:
        super().off()
        self.told.append("off")
        self._maybe("off")

    def model(self, model: Any, args: Any) -> None:
        self._maybe("model")

    def forward(self, call: Any) -> Any:
        self._maybe("forward")
        return call

    def batches(self, fetch: Any, iterator: Any) -> Any:
        self._maybe("batches")
        return fetch


def plain(number: int) -> int:
    return number


def test_a_call_leads_through_what_is_on() -> None:
    board = Switchboard([Adding(1), Adding(10), Doubling(True)])
    call = board.wrap("forward", plain)
    assert (call(5), board.on) == (5, {})
    for wanted, gives in (
        ({"adding": 1}, 6),
        ({"adding": 10, "doubling": True}, 30),
        ({"doubling": True}, 10),
        ({"adding": False}, 5),
        ({"adding": 1, "doubling": True}, 12),
        ({}, 5),
    ):
        board.switch(wanted)
        assert (call(5), board.on) == (gives, {name: one for name, one in wanted.items() if one})
    assert [one.wrapped for one in board.techniques if isinstance(one, Adding)] == [1, 1, 0]


def test_one_of_a_name_is_on_and_true_is_not_one() -> None:
    one, ten = Adding(1), Adding(10)
    board = Switchboard([one, ten])
    board.switch({"adding": 10})
    assert (one.active, ten.active) == (False, True)
    with pytest.raises(HastenError, match="adding = true is not among"):
        board.switch({"adding": True})
    assert board.on == {"adding": 10}


def test_all_are_told_of_models_but_a_pass_begins_with_what_is_on() -> None:
    one, ten = Adding(1), Adding(10)
    board = Switchboard([one, ten])
    model = object()
    board.model(model, ())
    assert one.told == ten.told == [model]
    before = board.batches(lambda: 0, None)
    board.switch({"adding": 10})
    assert (before(), board.batches(lambda: 0, None)()) == (0, 10)


@pytest.mark.parametrize("place", ["on", "off", "model", "forward", "batches"])
def test_what_fails_is_off_for_good(place: str) -> None:
    failing = Failing(place)
    board = Switchboard([failing, Adding(1)])
    call = board.wrap("forward", plain)
    board.switch({"failing": place, "adding": 1})
    board.model(object(), ())
    assert board.batches(lambda: 0, None)() == 1
    assert call(5) == 6
    board.switch({"adding": 1})
    assert board.broken == {"failing": f"RuntimeError: no {place} here"}
    assert f"failing: RuntimeError: no {place} here" in board.skipped
    board.switch({"failing": place, "adding": 1})
    assert board.on == {"adding": 1}
    assert not failing.active
    assert failing.told == ["off"]  # it was told to undo what it had begun
    assert call(5) == 6


def test_what_needs_a_process_of_its_own_is_not_taken() -> None:
    assert Precision.liveness_of("bf16-mixed") is Liveness.STEP
    with pytest.raises(HastenError, match='precision = "bf16-true" can only be set when a process starts'):
        Switchboard([Precision("bf16-true")])


def test_global_switches_are_set_by_on_alone() -> None:
    import torch

    threads = torch.get_num_threads()
    board = Switchboard([CpuThreads(threads + 1), CpuThreads(threads + 2)])
    board.process()
    assert torch.get_num_threads() == threads
    board.switch({"cpu_threads": threads + 1})
    board.switch({"cpu_threads": threads + 2})
    assert torch.get_num_threads() == threads + 2
    board.switch({})
    assert torch.get_num_threads() == threads


def test_what_is_fixed_is_on_throughout() -> None:
    fixed, switched = Adding(10), Doubling(True)
    board = Switchboard([switched], fixed=[fixed])
    call = board.wrap("forward", lambda number: number)
    assert (call(1), board.on) == (11, {})
    board.switch({"doubling": True})
    assert (call(1), board.on) == (12, {"doubling": True})
    board.switch({})
    assert (call(1), fixed.active, switched.active) == (11, True, False)
    with pytest.raises(HastenError, match="not among the techniques that can be switched"):
        board.switch({"adding": 10})
