"""How far is read ahead: as far as it takes to keep the training from waiting, and no further than the budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data import read_ahead_depth as depth_module
from hasten.data.read_ahead_depth import Depth
from hasten.data.reading_threads import Task

AHEAD = 2  # batches whose tasks are known, as `hasten.data.read_ahead` has them


@dataclass
class Training:
    """A training on a clock of its own: seconds of making a sample, of the step, and of what it does to a sample."""

    threads: int
    sample: float
    step: float
    own: float
    batch: int
    budget: int = 1 << 40
    size: int = 1000

    def __post_init__(self) -> None:
        self.now = 1.0
        self.depth = Depth(self.threads, self.budget, self.size)
        self.free_at, self.ends = [1.0] * self.threads, dict[Task, float]()
        self.queue = deque[Task]()

    def run(self, batches: int) -> list[tuple[float, int]]:
        """Return the seconds of each of the next batches, and the samples in memory when the step after it ends."""
        taken = list[tuple[float, int]]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(depth_module.time, "perf_counter", lambda: self.now)
            for _ in range(batches):
                began = self.now
                self._settle()
                self.depth.turn()
                while len(self.queue) < (AHEAD + 1) * self.batch:
                    self.queue.append(Task(len(taken)))
                    self.depth.waiting.append(self.queue[-1])
                self._feed()
                for _ in range(self.batch):
                    self._take(self.queue.popleft())
                self.now += self.step
                self._settle()
                made = sum(bool(task.made_at) for task in self.depth.under_way)
                taken.append((self.now - began, made))
        return taken

    def _take(self, task: Task) -> None:
        begun = task in self.ends
        waited = max(0.0, self.ends[task] - self.now) if begun else 0.0
        self.depth.forget(task)
        self._feed()
        if begun:
            self.now += waited
            self._settle(task)
            self.depth.took(task, waited)
        else:
            self.depth.made_itself()
            self.now += self.sample
        self.now += self.own
        self._settle()

    def _feed(self) -> None:
        while (task := self.depth.next()) is not None:
            thread = self.free_at.index(min(self.free_at))
            self.ends[task] = self.free_at[thread] = max(self.now, self.free_at[thread]) + self.sample

    def _settle(self, *tasks: Task) -> None:
        for task in (*self.depth.under_way, *tasks):
            if self.ends[task] <= self.now:
                task.made_at, task.seconds, task.size = self.ends[task], self.sample, self.size


TIMES = st.floats(2e-4, 2e-2)


@given(st.integers(1, 8), TIMES, st.one_of(st.just(0.0), st.floats(0, 0.2)), st.floats(0, 2e-3), st.integers(4, 64))
def test_it_soon_goes_as_fast_as_threads_and_step_allow(
    threads: int, sample: float, step: float, own: float, batch: int
) -> None:
    """The slower of threads and training gives the pace; no more is held than threads make while nothing is taken."""
    taken = Training(threads, sample, step, own, batch).run(60)
    pace = sum(seconds for seconds, _ in taken[20:]) / 40
    assert pace <= 1.06 * max(batch * sample / threads, step + batch * own) + 3 * sample
    held = max(made for _, made in taken[20:])
    assert held <= 2 * threads + 3 + min(batch, (step + batch * own) / sample * threads)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 12))
def test_never_more_than_the_budget(threads: int, size: int, samples: int) -> None:
    taken = Training(threads, 1e-3, 0.1, 1e-4, 32, budget=samples * size, size=size).run(20)
    assert max(made for _, made in taken) <= samples
    assert max(made for _, made in taken[10:]) >= min(samples, 2 * threads)


def test_room_that_is_not_needed_any_more_is_given_back() -> None:
    """A validation with long steps, or a disk that was cold, and then a training that only reads."""
    training = Training(2, sample=2e-3, step=0.1, own=1e-4, batch=32)
    training.run(10)
    assert training.depth.room >= 24
    training.step = 0.0
    training.run(400)
    assert training.depth.room <= 6
