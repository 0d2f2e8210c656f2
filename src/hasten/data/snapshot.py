"""A snapshot of all that samples depend on, which tells later whether any of it changed.

A snapshot goes through a dataset and all that its code reaches: attributes, elements, arrays, globals, closures, class
attributes. What cannot be looked into (an open file, a lock, an iterator) makes a snapshot blind, and it says so.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from hasten.data.content_stamp import Stamp
from hasten.data.snapshot_parts import ATOMS, Node, ReachableParts, same_parts, weight

_QUICK_PARTS, _QUICK_NODES, _QUICK_BYTES = 600, 60, 1 << 14  # what a quick comparison goes through: some 15 us
_LISTS = 4  # long lists, and as many arrays, that are looked at where samples have their rows
_SHARE = 0.01  # of the time between looks may go into whole ones
_SMALLEST = sys.float_info.min  # half of it is a denormal number


class Snapshot:
    """The state that some objects depend on, at the time it is made.

    Args:
        roots: The objects, by the name under which they are spoken of.

    Attributes:
        blind: Why not all can be seen: "holds an open file (.log)"; "" where all can.
        names: All names of globals and attributes in the code that was reached.
        stores: Whether that code sets attributes or globals.
        late: What a comparison during a pass found changed that had not been looked at for some time.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        parts = ReachableParts(roots)
        self.blind = parts.blind
        self.names = parts.names
        self.stores = parts.stores
        self._quick: list[Node] = []
        self._rest: list[Node] = []
        self._stamps = parts.stamps
        self._alive = parts.alive
        room = _QUICK_PARTS
        for node in sorted(parts.nodes, key=weight):
            room -= len(node[3]) + 4
            (self._quick if room > 0 and len(self._quick) < _QUICK_NODES else self._rest).append(node)
        self._lists = [
            (name, thing, was) for name, thing, _, was in self._rest if type(thing) is list and len(was) > 64
        ]
        self._lists = self._lists[:_LISTS]
        small = sorted(parts.stamps, key=lambda stamp: stamp.size)
        self._quick_stamps, left = [], _QUICK_BYTES
        for stamp in small[:_QUICK_NODES]:
            left -= stamp.size
            self._quick_stamps.append((stamp, left > 0))
        whole = len(self._quick_stamps) == len(parts.stamps) and all(whole for _, whole in self._quick_stamps)
        self._sees_all = whole and not self._rest  # a quick comparison is a whole one
        self._in_rows = [stamp for stamp in small if stamp.keep_rows()][:_LISTS]
        self.late = ""
        self._spent = self._whole_took = 0.0
        self._since = time.perf_counter()

    def changed(self, rows: Any = ()) -> str:
        """Return what a quick comparison finds changed: all small parts; the whole where that costs next to nothing.

        Args:
            rows: Indices of samples: long lists are looked at there.
        """
        if found := self.changed_small():
            return found
        if self._lists and rows and type(rows) is list:
            for name, held, was in self._lists:
                if any(type(i) is int and i < len(was) and (i >= len(held) or held[i] is not was[i]) for i in rows):
                    return name
        if rows and type(rows) is list and (found := next((s.name for s in self._in_rows if s.row_changed(rows)), "")):
            return found
        if not self._sees_all:
            start = time.perf_counter()
            if (self._spent + self._whole_took) <= _SHARE * (start - self._since):
                self.late = self._all_of_the_rest(start)
                return self.late
        return ""

    def changed_small(self) -> str:
        """Return what of the small parts is changed, or ""."""
        for name, thing, read, was in self._quick:
            if not same_parts(was, read(thing)):
                return name
        for stamp, whole in self._quick_stamps:
            if stamp.changed(whole):
                return stamp.name
        return ""

    def changed_at_all(self) -> str:
        """Return what a whole comparison finds changed, or ""."""
        return self.changed_small() or self._all_of_the_rest(time.perf_counter())

    def _all_of_the_rest(self, start: float) -> str:
        found = next((name for name, thing, read, was in self._rest if not same_parts(was, read(thing))), "")
        found = found or next((stamp.name for stamp in self._stamps if stamp.changed(True)), "")
        self._whole_took = time.perf_counter() - start
        self._spent += self._whole_took
        return found

    def parts(self) -> tuple[list[Node], list[Stamp]]:
        """Return all that was looked at: objects with how to read their parts, and arrays, tensors and generators."""
        return [*self._quick, *self._rest], self._stamps

    def reached(self) -> list[Any]:
        """Return every object that was met: instances, classes, functions."""
        return list(self._alive.values())

    def holds(self, value: Any) -> bool:
        """Whether a sample or batch has parts in it that are the looked-at objects' own: lists, memory of arrays."""
        queue, seen = deque([value]), set()
        while queue:
            part = queue.popleft()
            kind = type(part)
            if kind in ATOMS or id(part) in seen:
                continue
            seen.add(id(part))
            if id(part) in self._alive and kind not in (tuple, frozenset):
                return True
            memory = Stamp.memory_of(part)
            if memory is not None:
                if any(stamp.overlaps(*memory) for stamp in self._stamps):
                    return True
            elif isinstance(part, list | tuple | set | frozenset | deque):
                queue.extend(part)
            elif isinstance(part, dict):
                queue.extend(part.values())
            else:
                queue.extend(getattr(part, "__dict__", {}).values())
        return False


def ambient() -> Any:
    """Return what of torch's switches decides which tensors a sample's making gives."""
    torch = sys.modules["torch"]  # asked for each sample: an import statement would take as long as the rest
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.get_default_dtype(), autocast, torch.is_inference_mode_enabled()


def flushes_denormals() -> bool:
    """Whether `torch.set_flush_denormal` is on, which has no other sign than what it does."""
    return _SMALLEST / 2 == 0.0


def random_states() -> tuple[Any, ...]:
    """Return the states of the process-wide random generators on the CPU, in a form that can be compared."""
    from hasten.data import rng

    return rng.raw({})
