"""A block's time is the device's, on a GPU that is played: it works off, one after the other, what steps queue."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.evidence import Phase
from hasten.evidence.recorder import Recorder
from hasten.online import driver as module
from hasten.online.blocks import BlockRequest
from hasten.online.course import Course
from hasten.online.driver import Driver
from hasten.online.options import OnlineOptions
from hasten.online.record import Event, MeasuredBlock
from hasten.online.schedule import BlockRequests, Host
from hasten.switchboard import Switchboard

_BLOCK = 0.1  # seconds


class Batches:
    """An iterator, as the recorder knows one."""


class Played:
    """A CPU that takes `call` seconds for a step and queues `work` seconds for the GPU; the search takes `own`."""

    def __init__(self, call: float, work: float, own: float, wishes: list[BlockRequest]) -> None:
        self.now = self.free = 0.0
        self.call, self.work, self.own, self.asked = call, work, own, wishes
        self.written: list[MeasuredBlock] = []
        self.over = False
        self.recorder = Recorder(lambda: self.now, on_step=lambda steps: self.driver.on_step(steps))
        options = OnlineOptions((), "", 0.0, 0.0, block_seconds=_BLOCK)
        with patch.object(module, "synchronize", self.sync):
            self.driver = Driver(options, Switchboard([], self.recorder), self.recorder, self.end, self.wishes, self)

    def wishes(self, course: Course, options: OnlineOptions, host: Host) -> BlockRequests:
        for wish in self.asked:
            yield wish
            self.now += self.own

    def write(self, one: MeasuredBlock | Event) -> None:
        if isinstance(one, MeasuredBlock):
            self.written.append(one)

    def end(self) -> None:
        self.over = True

    def sync(self) -> None:
        self.now = max(self.now, self.free)

    def train(self, batches: int) -> list[MeasuredBlock]:
        """Train for an epoch after the other until the driver has had its blocks."""
        with patch.object(module, "synchronize", self.sync):
            while not self.over:
                for _ in self.epoch(batches):
                    self.now += self.call
                    self.free = max(self.free, self.now) + self.work
                    self.recorder.backward(self.call, [])
        return self.written

    def epoch(self, batches: int) -> Iterator[None]:
        iterator = Batches()
        self.recorder.pass_begins(0, iterator, self.now, self.now)
        for _ in range(batches):
            start = self.now  # as the tap around `__next__` takes it, before it says that a batch is asked for
            self.recorder.batch_requested(iterator, start)
            self.recorder.batch_received(iterator, start, self.now)
            yield
        self.recorder.batch_requested(iterator, self.now)
        self.recorder.exhausted(iterator, self.now)


@pytest.mark.parametrize("skip", [0, 2, 3])
def test_what_the_device_had_still_to_do_counts_in_no_block(skip: int) -> None:
    """The CPU is ten times ahead of the GPU when the steps that do not count are over."""
    blocks = Played(0.001, 0.01, 0.0, [BlockRequest(frozenset(), "search", skip=skip)] * 4).train(5000)
    assert len(blocks) == 4
    for block in blocks:
        assert block.step_seconds == pytest.approx(0.01, rel=0.02)
        assert sum(block.phases) == pytest.approx(0.001), "phases are the CPU's, without the wait for the GPU"


@settings(max_examples=40)
@given(
    call=st.floats(1e-3, 5e-3),
    work=st.floats(0, 0.02),
    own=st.floats(0, 0.5),
    skips=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    batches=st.integers(4, 200),
)
def test_a_block_takes_what_its_steps_take(
    call: float, work: float, own: float, skips: list[int], batches: int
) -> None:
    """Whatever the search itself takes between two blocks, and wherever a pass ends."""
    blocks = Played(call, work, own, [BlockRequest(frozenset(), "search", skip=skip) for skip in [2, *skips]]).train(
        batches
    )
    assert len(blocks) == len(skips) + 1
    for block in blocks:
        # The GPU is idle until the block's first step has queued its work, and goes on through steps that do not
        # count where a pass ends within the block.
        passes = block.steps // (batches - 1) + 2
        assert block.seconds >= (1 - 1e-9) * (block.steps * call)
        assert block.seconds <= block.steps * max(call, work) + passes * (call + work) + 1e-6
        assert block.phases[Phase.DATA] == pytest.approx(0.0, abs=1e-9)


class Fed(Played):
    """Steps of 5 ms while workers have batches ready or nothing left to make, and of 20 ms beside their work."""

    def epoch(self, batches: int) -> Iterator[None]:
        self.recorder.on_pass = self.driver.on_pass
        for number, _ in enumerate(super().epoch(batches)):
            self.call = 0.02 if 6 <= number < batches - 8 else 0.005
            yield


def test_steps_count_where_workers_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass of 20 batches, of which they make 8 ahead: a full pass has hardly any steps but such."""
    monkeypatch.setattr(Driver, "_ready", lambda self: 8)
    blocks = Fed(0.02, 0.0, 0.0, [BlockRequest(frozenset(), "search")] * 6).train(20)
    assert [block.step_seconds for block in blocks[2:]] == pytest.approx([0.02] * 4)  # before, no pass had ended yet
