"""Memoize a function of an index for as long as everything that its results depend on is unchanged.

A `Snapshot` of the dataset (attributes, globals, closures, code) is compared before samples are taken from the store,
and the files that were opened for a sample are checked. Some kept samples are made again and compared, for ever, since
a dependency may be invisible. Whatever cannot be kept safely ends the memo, with a reason.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

from hasten.data import SampleStore
from hasten.data.determinism import why_it_draws, why_not_deterministic
from hasten.data.disk_store import DiskStore
from hasten.data.library_state import settings_of_libraries, state_of_libraries
from hasten.data.object_cache import ObjectCache, copy_of
from hasten.data.opened_files import changed_file, hear_again, opened
from hasten.data.round_trip import why_no_round_trip
from hasten.data.sample_store import pack
from hasten.data.snapshot import Snapshot, ambient, flushes_denormals, random_states

_AUDITED, _LOT = 16, 200  # kept samples that are made again and compared: the first 16, then one in 200 at random
_WHOLE_LOOKS = 2  # number of first samples after which everything is compared, not only what is cheap
_MISSING = SampleStore.MISSING
_auditing = 0  # depth of audits under way: inside one, what the sample is made of (a decoded file) is audited too
DRAWS = "samples draw random numbers"
# A generator of its own, so that the training's random numbers stay the same. A global rather than an attribute, since
# snapshots of the dataset must not contain its state.
_lot = random.Random()


class StaleSample(Exception):  # noqa: N818 - a signal, not an error
    """Signal that a kept sample differs, or may differ, from one made now: make the batch without the store."""


class Store(Protocol):
    """Storage of samples: `SampleStore` in memory, `DiskStore` on disk."""

    spoilt: bool
    paused: bool

    @property
    def closed(self) -> bool:
        """Whether the store is spoilt or paused."""

    def get(self, key: Any) -> Any:
        """Return the sample stored for a key, or `SampleStore.MISSING`."""

    def put(self, key: Any, sample: Any) -> bool:
        """Store a sample. Return False if that is not possible."""


class Memoized:
    """Results of a function, kept while they cannot have changed.

    Args:
        store: Storage, shared with forked workers.
        roots: Objects that the function depends on, by name; see `Snapshot`.
        give_up: Called with the reason when nothing is kept any more.
    """

    _replaces = False  # whether a sample whose file has changed replaces the stored one

    def __init__(self, store: Store, roots: dict[str, Any], give_up: Callable[[str], None]) -> None:
        self._store = store
        self._roots = roots
        self._give_up = give_up
        self._hits = self._misses = 0
        self._unseen = False  # whether a sample was taken from the store without an audit
        self._pid = os.getpid()
        self._ended = False
        self._ready = ObjectCache()
        self._start()
        if why := self._why_not():
            self.end(why)

    def is_over(self) -> bool:
        """Return whether the memo was given up or is paused, in this process or in a worker."""
        return self._ended or self._store.closed

    @property
    def may_draw(self) -> bool:
        """Whether samples may draw random numbers, by the names in their code. The first that does ends the memo."""
        return bool(why_it_draws(self._snapshot))

    @property
    def paused(self) -> bool:
        """Whether the memo is unused for now, in workers too."""
        return self._store.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._store.paused = paused

    def files(self) -> DiskStore | None:
        """Return the store that a copy in another process can share; None if there is none."""
        return None

    def end(self, why: str) -> None:
        """Give up the memo: keep nothing from here on."""
        if not self._ended:
            self._ended = True
            self._store.spoilt = True
            self._ready.clear()
            self._give_up(why)

    def look(self, rows: Any = (), whole: bool = False) -> bool:
        """Compare what samples depend on, and forget all samples if it has changed. Return whether `get` may be called.

        Args:
            rows: Indices of the samples wanted; of long lists only these elements are compared.
            whole: Compare everything, however long that takes.
        """
        if self.is_over():
            return False
        if self._changed_at_all() if whole else self._snapshot.changed(rows):
            late = self._snapshot.late
            self._start()
            if late:  # samples taken from the store since the change cannot be taken back
                late += " changed during a pass, seen late: samples of this pass may not be what they would have been"
            if why := late or self._why_not():
                self.end(why)
        return not self._ended

    def end_of_pass(self) -> None:
        """Compare everything once more: a change that `look` has missed until now came while samples were taken."""
        if not self._unseen or self._pid != os.getpid() or self.is_over():
            return
        if change := self._snapshot.changed_at_all():
            self.end(f"{change} changed during a pass, seen at its end: samples of this pass may be stale")

    def get(self, key: Any, make: Callable[[Any], Any]) -> Any:
        """Return the value kept for a key, or make it.

        Raises:
            Stale: An audit found a kept value that differs; `end` was called with the reason.
        """
        surroundings = self._surroundings()
        ready_key = surroundings, type(key), key
        sample = self._ready.find(ready_key)
        is_ready = sample is not None
        if not is_ready:
            stored = self._store.get((*surroundings, key))
            if stored is _MISSING or changed_file(stored[0]):
                return self._make(key, make, keep=stored is _MISSING or self._replaces)
            files, sample = stored
            hear_again(files.items())
        self._hits += 1
        if _auditing or self._hits <= _AUDITED or _lot.random() * self._one_in() < 1:
            return self._made_again(key, make, sample)
        self._unseen = True
        if is_ready or self._ready.add(ready_key, files, sample):
            return copy_of(sample)
        return sample

    def _made_again(self, key: Any, make: Callable[[Any], Any], stored: Any) -> Any:
        """Make a kept sample again, with everything that it is made of, and compare the two."""
        global _auditing
        _auditing += 1
        try:
            fresh = self._make(key, make, keep=False)
        finally:
            _auditing -= 1
        if pack(fresh) != pack(stored):
            why = "the same index gave another sample than before"
            if self._unseen or self._pid != os.getpid():  # unaudited samples were taken here, or maybe by other workers
                why += ": samples taken from the cache until now may not be what they would have been"
            self.end(why)
            raise StaleSample
        return fresh

    def _one_in(self) -> int:
        """Return the audit interval: one in so many samples taken is made again."""
        return _LOT

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled copy in another process has no memo

    def _start(self) -> None:
        self._snapshot = Snapshot(self._roots)
        self._libraries = state_of_libraries()
        self._ready.clear()
        self._state = self._new_state()

    def _changed_at_all(self) -> str:
        if change := self._snapshot.changed_at_all():
            return change
        return "a setting of a library" if state_of_libraries() != self._libraries else ""

    def _new_state(self) -> str:
        """Return a unique name for the present state of what samples depend on."""
        return f"{time.time_ns()}-{_lot.getrandbits(64)}-{os.getpid()}"

    def _surroundings(self) -> tuple[Any, ...]:
        """Return the ambient settings that decide, beside the key, which sample would be made."""
        return self._state, ambient(), flushes_denormals(), settings_of_libraries()

    def _keep(self, key: Any, value: Any) -> None:
        self._store.put((*self._surroundings(), key), value)

    def _why_not(self) -> str:
        return why_not_deterministic(self._snapshot)

    def _make(self, key: Any, make: Callable[[Any], Any], keep: bool) -> Any:
        random_before = random_states()
        with opened() as activity:
            sample = make(key)
        self._misses += 1
        compare_all = self._misses <= _WHOLE_LOOKS
        if random_states() != random_before:
            self.end(DRAWS)
        elif activity.doing:
            self.end(f"making a sample {activity.doing}")
        elif self._snapshot.changed_at_all() if compare_all else self._snapshot.changed_small():
            self.end("making a sample changes what the dataset holds")
        elif self._snapshot.holds(sample):
            self.end("samples are parts of the dataset itself")
        elif why := why_no_round_trip(sample):
            self.end(f"samples {why}")
        elif keep and activity.settled():
            self._keep(key, (activity.files, sample))
        return sample
