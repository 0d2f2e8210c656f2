"""Makes a batch in a worker, for a pass with num_workers=0 (see worker_pass), and reports what making it changed."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from hasten.data.code_references import SAYS, WRITES, words
from hasten.data.opened_files import opened
from hasten.data.round_trip import why_no_round_trip
from hasten.data.sample_fetcher import no_room, share, shared_bytes
from hasten.data.snapshot import Snapshot, random_states

END = "end"  # a task: report what a full comparison finds changed
# Inputs of samples that the training may change in its own process, unseen by snapshots; not those that are much used
# and seldom change during a pass: whether a file exists, and files that native code reads.
_ELSEWHERE = words("environ environb getenv getenvb sqlite3 from_file get_num_threads initial_seed")
_SHM_HINT = "docker run --shm-size=8g enlarges it"


class MadeBatch:
    """A batch that a worker made, or the reason why there is none.

    Args:
        batch: The batch; None if `changed` or `full` is set.
        changed: Why the training must make its batches itself, such as what making this one changed; "": nothing.
        drew: Whether making it drew random numbers.
        files: The files it was read from.
        size: Bytes it takes in /dev/shm; 0 if that is not known, as after an error in torch's collate.
        full: Why /dev/shm has no room for it; "" if it has.
    """

    __slots__ = ("batch", "changed", "drew", "files", "full", "size")

    def __init__(
        self,
        batch: Any,
        changed: str,
        drew: bool,
        files: dict[str, Any] | None = None,
        size: int = 0,
        full: str = "",
    ) -> None:
        self.batch, self.changed, self.drew, self.files = batch, changed, drew, files or {}
        self.size, self.full = size, full

    def pin_memory(self, device: str | None = None) -> MadeBatch:
        """Called by torch's pin_memory thread."""
        return MadeBatch(pin_memory(self.batch, device), self.changed, self.drew, self.files, self.size, self.full)


class BatchMaker:
    """A dataset, in torch's eyes, whose items are whole batches made by the training's own fetcher in a worker."""

    def __init__(self, fetcher: Any, snapshot: Snapshot, seed: int) -> None:
        self._fetcher, self._snapshot, self._seed = fetcher, snapshot, seed
        self._looked = False

    def __getitem__(self, task: Any) -> MadeBatch:
        if task == END:
            return MadeBatch(None, self._snapshot.changed_at_all(), drew=False)
        number, indices = task
        before = seed_batch(self._seed, number)
        size = 0
        try:
            with opened(everywhere=True) as record:
                batch = self._fetcher.fetch(indices)
            changed = self._snapshot.changed() if self._looked else self._snapshot.changed_at_all()
            self._looked = True
            if not changed and self._snapshot.holds(batch):
                changed = "its batches have parts that are the dataset's own"
            elif not changed and (why := why_no_round_trip(batch, by_torch=True)):
                changed = f"its batches {why}"
            size = shared_bytes(batch)
            if not changed:
                # torch would do this in its queue's thread, where an error loses the batch, and the training waits
                # forever.
                share(batch)
        except RuntimeError as error:  # from `share`, or from torch's collate, which stacks into shared memory too
            if not no_room(error):
                raise
            need = f"a batch of {size / 2**20:.1f} MB" if size else "a batch"
            return MadeBatch(None, "", False, size=size, full=f"/dev/shm has no room for {need} ({_SHM_HINT})")
        return MadeBatch(None if changed else batch, changed, random_states() != before, record.files, size)


def seed_batch(seed: int, number: int) -> tuple[Any, ...]:
    """Seed the process-wide generators for a batch, the same in every worker, and return their states."""
    mixed = (seed * 1_000_003 + number) % 2**63
    random.seed(mixed)
    torch.default_generator.manual_seed(mixed)  # not the GPU's generators: samples are made on the CPU
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.Random(mixed).getrandbits(32))
    return random_states()


def says(snapshot: Snapshot) -> str:
    """Return why the code that makes samples may print or write something, or see what no snapshot does; else ""."""
    if named := sorted(snapshot.names & (SAYS | WRITES)):
        return f"samples' code names `{named[0]}`: it may say or write something of its own"
    named = sorted(snapshot.names & _ELSEWHERE)
    return f"samples' code names `{named[0]}`, which the training may change unseen during a pass" if named else ""
