"""Decides how many samples to read ahead: as few as keep the training from waiting for them."""

from __future__ import annotations

import time
from collections import deque

from hasten.data.reading_threads import Task

_CALM = 16  # batches without waiting, after which the room shrinks by 1/8
_WORTH = 0.02  # share of a batch's time: shorter waits are not worth more memory
_WEIGHT = 1 / 8  # weight of the newest sample in the moving means of time and size


class Depth:
    """The tasks of one pass in order, and how many of them (the room) may be started before their turn.

    Problem: too little room leaves threads idle while the training computes; too much only takes memory. Approach: if
    the threads were idle and the training then waited for samples, in two batches in a row, add room for the samples
    they could have made in the idle time. So where reading is the bottleneck anyway, or the step is short, few samples
    are held in memory.

    Args:
        threads: Number of threads that make samples.
        budget: Bytes for samples before their turn. A single sample may take more.
        size: Assumed bytes of a sample until one was made.
        room: The room to begin with, from an earlier pass; at least two samples per thread.
    """

    def __init__(self, threads: int, budget: int, size: int, room: int = 0) -> None:
        self.waiting: deque[Task] = deque()  # not handed to a thread yet
        self.under_way: set[Task] = set()
        self._threads, self._budget = threads, budget
        self._least = 2 * threads
        self.room = max(self._least, room)
        self._size, self._seconds = float(size), 0.0  # moving means over samples
        self._idle = self._waited = 0.0  # seconds: the threads idle before this batch, the training waiting in it
        self._could = 0.0  # samples that had no room before the last batch; a single batch may be chance
        self._turned = time.perf_counter()
        self._calm = 0

    def next(self) -> Task | None:
        """Return the next task for a thread; None if there is no room or no task."""
        if not self.waiting or len(self.under_way) >= self.room:
            return None
        if self.under_way:
            held = sum(task.size or self._size for task in self.under_way)
            if held + self._size > self._budget:
                return None
        task = self.waiting.popleft()
        self.under_way.add(task)
        return task

    def forget(self, task: Task) -> None:
        """Remove a task whose turn has come, or that nobody will use."""
        if task in self.under_way:
            self.under_way.remove(task)
        else:
            self.waiting.remove(task)

    def took(self, task: Task, waited: float) -> None:
        """Record that the training took a thread's result after waiting for `waited` seconds."""
        self._waited += waited
        weight = _WEIGHT if self._seconds else 1.0
        self._seconds += weight * (task.seconds - self._seconds)
        if task.size:
            self._size += weight * (task.size - self._size)

    def made_itself(self) -> None:
        """Record that the training made a sample itself, as no thread had begun it."""
        self._waited += self._seconds

    def turn(self) -> None:
        """Adjust the room by what the last batch showed; called when the training asks for the next."""
        now = time.perf_counter()
        worth = self._waited > _WORTH * (now - self._turned)
        could = min(self._idle, self._waited) / self._seconds * self._threads if worth and self._seconds else 0.0
        more, self._could = round(min(could, self._could)), could
        self._calm += 1
        if more:
            self.room = min(self.room + more, max(self._least, len(self.under_way) + len(self.waiting)))
            self._calm = 0
        elif self._calm == _CALM:
            self.room = max(self._least, self.room - max(1, self.room // 8))
            self._calm = 0
        ends = [task.made_at for task in self.under_way]
        # If room was added now, the threads' idle time was under the old room, and says nothing about the next batch.
        self._idle = now - max(ends) if ends and all(ends) and not more else 0.0
        self._waited, self._turned = 0.0, now
