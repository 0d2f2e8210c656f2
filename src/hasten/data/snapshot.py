"""A snapshot of everything that samples depend on, which can later tell whether any of it changed.

It covers a dataset and everything that its code reaches: attributes, elements, arrays, globals, closures, class
attributes (`ReachableParts` collects them). Objects that cannot be inspected (an open file, a lock, an iterator) make
it blind, with a reason, and then it must not be relied on.

A full comparison may be slow, so `changed` compares small parts each time (some 15 us) and long lists and arrays only
in the rows of the current samples; it compares the rest now and then, within 1 % of the time. `changed_at_all` always
compares everything.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from hasten.data.content_stamp import Stamp
from hasten.data.snapshot_parts import ATOMS, Node, ReachableParts, same_parts, weight

_QUICK_PARTS, _QUICK_NODES, _QUICK_BYTES = 600, 60, 1 << 14  # limits of a quick comparison, which takes some 15 us
_LISTS = 4  # long lists, and as many arrays, compared in the samples' rows
_SHARE = 0.01  # share of the time that full comparisons may take
_SMALLEST = sys.float_info.min  # half of it is a denormal number


class Snapshot:
    """The state of some objects, and of everything they depend on, when the snapshot is made.

    Args:
        roots: The objects, by their names in messages.

    Attributes:
        blind: Why some objects cannot be inspected: "holds an open file (.log)"; "" if all can.
        names: All names of globals and attributes in the reached code.
        stores: Whether that code sets attributes or globals.
        late: The change that a full comparison during a pass found, which may have happened some time ago; "": none.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        parts = ReachableParts(roots)
        self.blind = parts.blind
        self.names = parts.names
        self.stores = parts.stores
        self._quick: list[Node] = []
        self._slow: list[Node] = []
        self._stamps = parts.stamps
        self._alive = parts.alive
        room_left = _QUICK_PARTS
        for node in sorted(parts.nodes, key=weight):
            room_left -= len(node[3]) + 4
            (self._quick if room_left > 0 and len(self._quick) < _QUICK_NODES else self._slow).append(node)
        self._lists = [
            (name, value, was) for name, value, _, was in self._slow if type(value) is list and len(was) > 64
        ]
        self._lists = self._lists[:_LISTS]
        small = sorted(parts.stamps, key=lambda stamp: stamp.size)
        self._quick_stamps, bytes_left = [], _QUICK_BYTES
        for stamp in small[:_QUICK_NODES]:
            bytes_left -= stamp.size
            self._quick_stamps.append((stamp, bytes_left > 0))
        compares_all = len(self._quick_stamps) == len(parts.stamps) and all(full for _, full in self._quick_stamps)
        self._sees_all = compares_all and not self._slow  # a quick comparison already covers everything
        self._in_rows = [stamp for stamp in small if stamp.keep_rows()][:_LISTS]
        self.late = ""
        self._spent = self._whole_took = 0.0
        self._since = time.perf_counter()

    def changed(self, rows: Any = ()) -> str:
        """Return the name of a changed part, or "": compares the small parts, and all others if the time budget allows.

        Args:
            rows: Indices of the current samples: long lists and arrays are compared there.
        """
        if change := self.changed_small():
            return change
        if self._lists and rows and type(rows) is list:
            for name, value, was in self._lists:
                if any(type(i) is int and i < len(was) and (i >= len(value) or value[i] is not was[i]) for i in rows):
                    return name
        if rows and type(rows) is list and (part := next((s.name for s in self._in_rows if s.row_changed(rows)), "")):
            return part
        if not self._sees_all:
            start = time.perf_counter()
            if (self._spent + self._whole_took) <= _SHARE * (start - self._since):
                self.late = self._all_of_the_rest(start)
                return self.late
        return ""

    def changed_small(self) -> str:
        """Return the name of a changed small part, or ""."""
        for name, value, read, was in self._quick:
            if not same_parts(was, read(value)):
                return name
        for stamp, whole in self._quick_stamps:
            if stamp.changed(whole):
                return stamp.name
        return ""

    def changed_at_all(self) -> str:
        """Return the name of a changed part, or "": compares everything."""
        return self.changed_small() or self._all_of_the_rest(time.perf_counter())

    def _all_of_the_rest(self, start: float) -> str:
        change = next((name for name, value, read, was in self._slow if not same_parts(was, read(value))), "")
        change = change or next((stamp.name for stamp in self._stamps if stamp.changed(True)), "")
        self._whole_took = time.perf_counter() - start
        self._spent += self._whole_took
        return change

    def parts(self) -> tuple[list[Node], list[Stamp]]:
        """Return everything compared: objects with functions to read their parts; arrays, tensors and generators."""
        return [*self._quick, *self._slow], self._stamps

    def reached(self) -> list[Any]:
        """Return every object reached: instances, classes, functions."""
        return list(self._alive.values())

    def holds(self, value: Any) -> bool:
        """Return whether a sample or batch shares objects or array memory with the dataset."""
        queue, visited = deque([value]), set()
        while queue:
            part = queue.popleft()
            kind = type(part)
            if kind in ATOMS or id(part) in visited:
                continue
            visited.add(id(part))
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
    """Return torch's default dtype, autocast dtype and inference mode, which decide the tensors that code makes."""
    torch = sys.modules["torch"]  # called for each sample, where an import statement takes as long as all the rest
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.get_default_dtype(), autocast, torch.is_inference_mode_enabled()


def flushes_denormals() -> bool:
    """Return whether `torch.set_flush_denormal` is on. torch has no getter for it, so try a denormal number."""
    return _SMALLEST / 2 == 0.0


def random_states() -> tuple[Any, ...]:
    """Return the states of the process-wide random generators on the CPU, in a form that can be compared."""
    from hasten.data import rng

    return rng.raw({})
