"""How many samples to read ahead: as few as keep the training from waiting for them."""

from __future__ import annotations

import time
from collections import deque

from hasten.data.reading_threads import Task

_CALM = 16  # batches without waiting, after which an eighth of the room is given back
_WORTH = 0.02  # of a batch's time: less waiting than that is not worth the memory
_WEIGHT = 1 / 8  # of the newest sample in the means of time and size


class Depth:
    """The tasks of one pass in order, and how many of them may be made, or be in the making, before their turn.

    Threads without room have nothing to do while the training computes. Where the training then waits for samples, in
    two batches one after the other, there is room for as many more as they could have made. So where reading is the
    slower part anyway, and where the step is short, few samples lie in memory.

    Args:
        threads: How many make samples.
        budget: Bytes for samples before their turn. One sample may take more.
        size: Bytes of a sample, as long as none was made.
        room: How many samples to begin with, where a pass before has shown that; else two for each thread.
    """

    def __init__(self, threads: int, budget: int, size: int, room: int = 0) -> None:
        self.waiting: deque[Task] = deque()  # not given to a thread yet
        self.under_way: set[Task] = set()
        self._threads, self._budget = threads, budget
        self._least = 2 * threads
        self.room = max(self._least, room)
        self._size, self._seconds = float(size), 0.0  # means of samples
        self._idle = self._waited = 0.0  # seconds: of the threads before this batch, of the training in it
        self._could = 0.0  # samples that there was no room for before the last batch: one alone may be chance
        self._turned = time.perf_counter()
        self._calm = 0

    def next(self) -> Task | None:
        """Return the next task that a thread may have; None where there is no room, or no task."""
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
        """Take out a task whose turn has come, or for which nobody will ask."""
        if task in self.under_way:
            self.under_way.remove(task)
        else:
            self.waiting.remove(task)

    def took(self, task: Task, waited: float) -> None:
        """Note that the training took what a thread made, after it waited for so many seconds."""
        self._waited += waited
        weight = _WEIGHT if self._seconds else 1.0
        self._seconds += weight * (task.seconds - self._seconds)
        if task.size:
            self._size += weight * (task.size - self._size)

    def made_itself(self) -> None:
        """Note that the training made a sample that no thread had begun."""
        self._waited += self._seconds

    def turn(self) -> None:
        """Make room by what the last batch showed; called when the training comes for the next."""
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
        # The room that is made now was not there while the threads had nothing to do: the next batch shows nothing.
        self._idle = now - max(ends) if ends and all(ends) and not more else 0.0
        self._waited, self._turned = 0.0, now
