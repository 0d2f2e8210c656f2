"""Graphs that outlive their step, and memory over time.

On some steps a sentinel is hung on the graph of the loss, after its backward. It lives as long as the graph: a script
that keeps its losses (`losses.append(loss)`, `total += loss`) keeps all of them, one that keeps numbers none.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import weakref
from collections import Counter
from time import perf_counter
from typing import Any

from hasten.doctor.observe.event_log import script_place
from hasten.evidence import Event, MemoryPoint
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session

_FIRST = 16  # steps that are all watched; then every `_EVERY`, later every `_RARELY`, or each where steps are slow
_EVERY = 8
_LATER = 512
_RARELY = 32
_SLOW = 0.02  # seconds a step
_OLD = 5  # steps after which the graph of a loss ought to be gone
_SEVERAL = 3  # graphs alive that are more than a last or a best loss
_MOST = 128  # sentinels; with so many alive there is nothing more to learn
_POINTS = 512  # of memory, at the most
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def install(session: Session) -> None:
    """Watch the backwards of some steps."""
    graphs = Graphs(session, session.recorder)
    session.observers.append(graphs)
    session.steps_over.tell(graphs.on_step, 1)
    session.on_backward.append(graphs.on_backward)


class _Sentinel:
    """Lives as long as the graph it hangs on."""

    __slots__ = ("__weakref__",)


class Graphs:
    """Counts graphs that are alive many steps after their backward, and follows memory."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self._watching = True
        self._every = _EVERY
        self._woken = (0, perf_counter())
        self._sentinels: list[tuple[int, str, weakref.ref[Any]]] = []  # step, place, whether it lives
        self._old: Counter[str] = Counter()  # place of a backward -> sentinels hung there that are dead or old
        self._kept: dict[str, tuple[int, int]] = {}  # place -> most alive at once, of how many
        self._trusted = False  # what is alive is not garbage that waits for its collection
        self._collect_at = 0
        self._disturbed: list[int] = []
        self._retained: Counter[tuple[str, int]] = Counter()  # backward(retain_graph=True) by place and step
        self._stand_for: dict[int, int] = {}  # watched step -> how many steps it stands for
        self._points: list[MemoryPoint] = []
        self._apart = 0.05  # seconds between two points
        self._pointed = 0.0

    def on_step(self, steps: int) -> int:
        """A step is over: look what is alive, and whether to watch the next one."""
        now = perf_counter()
        before, at = self._woken
        if steps > before:
            slow = (now - at) / (steps - before) > _SLOW
            self._every = 1 if slow else _EVERY if steps < _LATER else _RARELY
        self._woken = steps, now
        kept, often = self._recorder.kept, self._every
        if kept.every > 1:  # in the steps that are not kept the clock may rest
            self._every = kept.every * max(1, often // kept.every)
            watch = steps == kept.next and steps % self._every < kept.every
        else:
            watch = steps < _FIRST or steps % often == 0
        if watch != self._watching:
            (self._session.on_backward.append if watch else self._session.on_backward.remove)(self.on_backward)
            self._watching = watch
        if watch:
            if steps >= _FIRST:
                self._stand_for[steps] = self._every
            self._look(steps)
            if now - self._pointed >= self._apart:
                self._pointed = now
                self._point(steps)
        if watch:
            return steps + 1
        in_its_turn = kept.every > 1 and kept.next % self._every < kept.every
        return max(steps + 1, kept.next if in_its_turn else steps + self._every - steps % self._every)

    # -- graphs --------------------------------------------------------------------------------------------

    def on_backward(self, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A backward of a watched step is over: hang a sentinel on its graph."""
        with self._session.run.guard("watching a graph"):  # a loss like no other
            roots = tensors if isinstance(tensors, list | tuple) else (tensors,)
            node = next((root.grad_fn for root in roots if root.grad_fn is not None), None)
            place = script_place(sys._getframe(2), past_torch=True)
            if node is None or place is None or (self._recorder.steps and self._session.in_step() < 0):
                return
            if (args[1] if len(args) > 1 else kwargs.get("retain_graph")) is True:
                self._retained[place, self._recorder.steps] += 1
            if len(self._sentinels) < _MOST:
                sentinel = _Sentinel()
                node.metadata["hasten"] = sentinel
                self._sentinels.append((self._recorder.steps, place, weakref.ref(sentinel)))

    def _look(self, steps: int) -> None:
        alive = self._alive(steps)
        if not alive:
            return
        if not self._trusted:
            if steps < self._collect_at:
                return
            gc.collect()  # cycles keep graphs too, but only until they are collected
            self._disturbed.append(steps)
            self._collect_at = 4 * steps
            alive = self._alive(steps)
            self._trusted = bool(alive)
        for place, count in alive.items():
            if count > self._kept.get(place, (0, 0))[0]:
                self._kept[place] = count, self._old[place] + count

    def _alive(self, steps: int) -> dict[str, int]:
        """By place, how many old graphs are alive, where they are several; the dead are let go of."""
        alive: Counter[str] = Counter()
        left = []
        for step, place, held in self._sentinels:
            if held() is None:
                self._old[place] += 1
            else:
                left.append((step, place, held))
                if steps - step > _OLD:
                    alive[place] += 1
        self._sentinels = left
        return {place: count for place, count in alive.items() if count >= _SEVERAL}

    # -- memory --------------------------------------------------------------------------------------------

    def _point(self, steps: int) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._points.append(MemoryPoint(steps, _resident(), _on_gpu(), used.ru_minflt, used.ru_stime))
        if len(self._points) > _POINTS:
            del self._points[1::2]
            self._apart *= 2

    def facts(self) -> dict[str, Any]:
        """Memory over time, and events of graphs."""
        total = self._recorder.steps
        events = [
            Event("retained_graph", place, count, total, detail=f"{count} of {of}")
            for place, (count, of) in self._kept.items()
        ]
        for place in {place for place, _ in self._retained}:
            seen = [
                (self._stand_for.get(step, 1), times) for (at, step), times in self._retained.items() if at == place
            ]
            steps = min(total, sum(weight for weight, _ in seen))
            events.append(Event("retain_graph", place, sum(weight * times for weight, times in seen), steps))
        self._point(total)
        return {"events": tuple(events), "memory": tuple(self._points), "disturbed": tuple(self._disturbed)}


def _resident() -> int:
    """Bytes of memory this process has; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def _on_gpu() -> int | None:
    import torch

    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"])
