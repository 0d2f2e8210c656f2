"""Memoizes a function of an index as long as all that its results depend on is unchanged."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any, Protocol

from hasten.data import SampleStore
from hasten.data.determinism import why_it_draws, why_not_deterministic
from hasten.data.disk_store import DiskStore
from hasten.data.object_cache import ObjectCache, copy_of
from hasten.data.opened_files import changed_file, hear_again, opened
from hasten.data.round_trip import why_no_round_trip
from hasten.data.sample_store import pack
from hasten.data.snapshot import Snapshot, ambient, flushes_denormals, random_states

_AUDITED, _LOT = 16, 200  # kept samples that are made again and compared: the first, and one in so many by lot
_WHOLE_LOOKS = 2  # samples after whose making everything is looked at
_MISSING = SampleStore.MISSING
_auditing = 0  # samples that are made again now; then what they are made of is, too (a decoded file)
DRAWS = "samples draw random numbers"
_lot = random.Random()  # of its own: the training's numbers stay. No attribute, else states of the dataset hold it


class Stale(Exception):  # noqa: N818 - no error: it says that a batch is to be made without the store
    """Something kept is not, or may not be, what would be made now."""


class Store(Protocol):
    """Where samples lie: `SampleStore` in memory, `DiskStore` on disk."""

    spoilt: bool
    paused: bool

    @property
    def closed(self) -> bool:
        """Whether it is spoilt or paused."""

    def get(self, key: Any) -> Any:
        """Return the sample of a key, or `SampleStore.MISSING`."""

    def put(self, key: Any, sample: Any) -> bool:
        """Keep a sample; False where that cannot be."""


class Memoized:
    """A store of what a function gives, for as long as that cannot have changed.

    Args:
        store: Shared with forked workers.
        roots: What the function depends on; see `Snapshot`.
        let_go: Told why nothing is kept any more.
    """

    _replaces = False  # whether a sample of which a file has changed takes the place of the former one

    def __init__(self, store: Store, roots: dict[str, Any], let_go: Callable[[str], None]) -> None:
        self._store = store
        self._roots = roots
        self._let_go = let_go
        self._hits = self._made = 0
        self._unseen = False  # whether a sample was taken without being made again to compare
        self._pid = os.getpid()
        self._over = False
        self._ready = ObjectCache()
        self._began()
        if why := self._why_not():
            self.end(why)

    def is_over(self) -> bool:
        """Whether it was given up or is paused, here or in a worker."""
        return self._over or self._store.closed

    @property
    def may_draw(self) -> bool:
        """Whether samples may draw random numbers, by the names in their code; the first that does ends it anyway."""
        return bool(why_it_draws(self._snapshot))

    @property
    def paused(self) -> bool:
        """Whether it is left alone for now, in workers too."""
        return self._store.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._store.paused = paused

    def files(self) -> DiskStore | None:
        """Return the store that a copy in another process may share, if any."""
        return None

    def end(self, why: str) -> None:
        """Keep nothing from here on."""
        if not self._over:
            self._over = True
            self._store.spoilt = True
            self._ready.clear()
            self._let_go(why)

    def look(self, rows: Any = (), whole: bool = False) -> bool:
        """Forget all where what samples depend on has changed since they were made; return whether `get` may be called.

        Args:
            rows: Indices of samples: long lists are looked at there.
            whole: Look at everything, however long it takes.
        """
        if self.is_over():
            return False
        if self._snapshot.changed_at_all() if whole else self._snapshot.changed(rows):
            late = self._snapshot.late
            self._began()
            if late:  # what was taken from the store in the meantime cannot be taken back
                late += " changed during a pass, seen late: samples of this pass may not be what they would have been"
            if why := late or self._why_not():
                self.end(why)
        return not self._over

    def get(self, key: Any, make: Callable[[Any], Any]) -> Any:
        """Return the value kept for a key, or make it now.

        Raises:
            Stale: A later comparison found that it cannot be kept; `end` was told why.
        """
        surroundings = self._surroundings()
        place = surroundings, type(key), key
        sample = self._ready.find(place)
        is_ready = sample is not None
        if not is_ready:
            found = self._store.get((*surroundings, key))
            if found is _MISSING or changed_file(found[0]):
                return self._make(key, make, keep=found is _MISSING or self._replaces)
            files, sample = found
            hear_again(files.items())
        self._hits += 1
        if _auditing or self._hits <= _AUDITED or _lot.random() * self._one_in() < 1:
            return self._made_again(key, make, sample)
        self._unseen = True
        if is_ready or self._ready.add(place, files, sample):
            return copy_of(sample)
        return sample

    def _made_again(self, key: Any, make: Callable[[Any], Any], kept: Any) -> Any:
        """Return a sample that is made although it is kept, with all that it is made of: both must be the same."""
        global _auditing
        _auditing += 1
        try:
            made = self._make(key, make, keep=False)
        finally:
            _auditing -= 1
        if pack(made) != pack(kept):
            why = "the same index gave another sample than before"
            if self._unseen or self._pid != os.getpid():  # taken here, or by another worker
                why += ": samples taken from the cache until now may not be what they would have been"
            self.end(why)
            raise Stale
        return made

    def _one_in(self) -> int:
        """Return after how many samples taken one is made again, to check it."""
        return _LOT

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy in another process shares nothing

    def _began(self) -> None:
        self._snapshot = Snapshot(self._roots)
        self._ready.clear()
        self._state = self._new_state()

    def _new_state(self) -> str:
        """A name for the state of things now, which no other process gives to another."""
        return f"{time.time_ns()}-{_lot.getrandbits(64)}-{os.getpid()}"

    def _surroundings(self) -> tuple[Any, ...]:
        """Return what decides, beside the key, which sample is made now."""
        return self._state, ambient(), flushes_denormals()

    def _keep(self, key: Any, value: Any) -> None:
        self._store.put((*self._surroundings(), key), value)

    def _why_not(self) -> str:
        return why_not_deterministic(self._snapshot)

    def _make(self, key: Any, make: Callable[[Any], Any], keep: bool) -> Any:
        before = random_states()
        with opened() as heard:
            sample = make(key)
        self._made += 1
        whole = self._made <= _WHOLE_LOOKS
        if random_states() != before:
            self.end(DRAWS)
        elif heard.doing:
            self.end(f"making a sample {heard.doing}")
        elif self._snapshot.changed_at_all() if whole else self._snapshot.changed_small():
            self.end("making a sample changes what the dataset holds")
        elif self._snapshot.holds(sample):
            self.end("samples are parts of the dataset itself")
        elif why := why_no_round_trip(sample):
            self.end(f"samples {why}")
        elif keep and heard.settled():
            self._keep(key, (heard.files, sample))
        return sample
