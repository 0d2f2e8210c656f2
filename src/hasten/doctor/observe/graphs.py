"""Find autograd graphs that outlive their step, and record memory over time.

A script that keeps its losses (`losses.append(loss)`, `total += loss`) keeps their whole graphs. To see it, a sentinel
object is attached to the loss's graph after the backward of some steps, and held by a weak reference: it lives exactly
as long as the graph. If several sentinels are alive many steps later, even after a garbage collection, graphs are kept.
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

# The first `_FIRST` steps are all watched, then every `_INTERVAL`-th, from step `_LATER` on every `_LATE_INTERVAL`-th.
# Steps that take longer than `_SLOW` seconds are all watched.
_FIRST = 16
_INTERVAL = 8
_LATER = 512
_LATE_INTERVAL = 32
_SLOW = 0.02
_OLD = 5  # steps after which the graph of a loss should have been freed
_SEVERAL = 3  # fewer graphs alive at once may be a last and a best loss, which a script may keep
_MOST = 128  # sentinels; with so many alive there is nothing more to learn
_POINTS = 512  # memory points, at most; beyond that every second one is dropped
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def install(session: Session) -> None:
    """Watch the backwards of some steps, from the first on."""
    graphs = Graphs(session, session.recorder)
    session.observers.append(graphs)
    session.step_listeners.add(graphs.on_step, 1)
    session.on_backward.append(graphs.on_backward)


class _Sentinel:
    """An object attached to a graph; it lives as long as the graph."""

    __slots__ = ("__weakref__",)


class Graphs:
    """Counts graphs that are alive many steps after their backward, and samples memory."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self._watching = True
        self._interval = _INTERVAL
        self._last_call = (0, perf_counter())  # of `on_step`: steps, when
        self._sentinels: list[tuple[int, str, weakref.ref[Any]]] = []  # step and place of the backward, sentinel
        self._freed: Counter[str] = Counter()  # place of a backward -> sentinels attached there whose graph was freed
        self._most_alive: dict[str, tuple[int, int]] = {}  # place -> most graphs alive at once, of how many
        self._trusted = False  # a collection has shown that graphs alive here are not just uncollected cycles
        self._collect_at = 0
        self._disturbed: list[int] = []
        self._retained: Counter[tuple[str, int]] = Counter()  # backward(retain_graph=True) by place and step
        self._stand_for: dict[int, int] = {}  # watched step -> how many steps it represents
        self._points: list[MemoryPoint] = []
        self._point_interval = 0.05  # seconds between two memory points
        self._last_point = 0.0

    def on_step(self, steps: int) -> int:
        """Check which graphs are alive, sample memory, and decide whether to watch the next step.

        Returns:
            How many steps must be over at the next call.
        """
        now = perf_counter()
        steps_before, at = self._last_call
        if steps > steps_before:
            slow = (now - at) / (steps - steps_before) > _SLOW
            self._interval = 1 if slow else _INTERVAL if steps < _LATER else _LATE_INTERVAL
        self._last_call = steps, now
        kept, interval = self._recorder.kept, self._interval
        # In a long run the recorder keeps one step of `kept.every`, and its clock rests in the others: then only kept
        # steps are watched, because listening in the others would wake it.
        if kept.every > 1:
            self._interval = kept.every * max(1, interval // kept.every)
            watch = steps == kept.next and steps % self._interval < kept.every
        else:
            watch = steps < _FIRST or steps % interval == 0
        if watch != self._watching:
            (self._session.on_backward.append if watch else self._session.on_backward.remove)(self.on_backward)
            self._watching = watch
        if watch:
            if steps >= _FIRST:
                self._stand_for[steps] = self._interval
            self._check_graphs(steps)
            if now - self._last_point >= self._point_interval:
                self._last_point = now
                self._sample_memory(steps)
        if watch:
            return steps + 1
        in_its_turn = kept.every > 1 and kept.next % self._interval < kept.every
        return max(steps + 1, kept.next if in_its_turn else steps + self._interval - steps % self._interval)

    # -- graphs --------------------------------------------------------------------------------------------

    def on_backward(self, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Attach a sentinel to the graph after a backward of a watched step."""
        with self._session.run.guard("watching a graph"):  # roots may be anything that the script passes to backward
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

    def _check_graphs(self, steps: int) -> None:
        """Record how many old graphs are alive, after a collection if they may only be uncollected cycles."""
        alive = self._alive(steps)
        if not alive:
            return
        if not self._trusted:
            if steps < self._collect_at:
                return
            gc.collect()  # a reference cycle keeps its graph alive too, but only until it is collected
            self._disturbed.append(steps)
            self._collect_at = 4 * steps  # collections are slow: if this one freed them all, wait long for the next
            alive = self._alive(steps)
            self._trusted = bool(alive)
        for place, count in alive.items():
            if count > self._most_alive.get(place, (0, 0))[0]:
                self._most_alive[place] = count, self._freed[place] + count

    def _alive(self, steps: int) -> dict[str, int]:
        """Return how many old graphs are alive by place, where they are several; forget sentinels that died."""
        alive: Counter[str] = Counter()
        remaining = []
        for step, place, sentinel in self._sentinels:
            if sentinel() is None:
                self._freed[place] += 1
            else:
                remaining.append((step, place, sentinel))
                if steps - step > _OLD:
                    alive[place] += 1
        self._sentinels = remaining
        return {place: count for place, count in alive.items() if count >= _SEVERAL}

    # -- memory --------------------------------------------------------------------------------------------

    def _sample_memory(self, steps: int) -> None:
        """Add a memory point."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._points.append(MemoryPoint(steps, _resident(), _on_gpu(), used.ru_minflt, used.ru_stime))
        if len(self._points) > _POINTS:
            del self._points[1::2]
            self._point_interval *= 2

    def facts(self) -> dict[str, Any]:
        """Return memory over time, events of kept and retained graphs, and disturbed steps."""
        total = self._recorder.steps
        events = [
            Event("retained_graph", place, count, total, detail=f"{count} of {watched}")
            for place, (count, watched) in self._most_alive.items()
        ]
        for place in {place for place, _ in self._retained}:
            weighted = [
                (self._stand_for.get(step, 1), times)
                for (where, step), times in self._retained.items()
                if where == place
            ]
            steps = min(total, sum(weight for weight, _ in weighted))
            events.append(Event("retain_graph", place, sum(weight * times for weight, times in weighted), steps))
        self._sample_memory(total)
        return {"events": tuple(events), "memory": tuple(self._points), "disturbed": tuple(self._disturbed)}


def _resident() -> int:
    """Return this process's resident memory (bytes); 0 if /proc does not tell it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def _on_gpu() -> int | None:
    """Return the bytes allocated on the current GPU; None if CUDA is not in use."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"])
