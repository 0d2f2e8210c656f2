"""Saves and restores the position of a pass through any training loader, to resume in the middle of an epoch."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hasten.data import rng
from hasten.data.loader_facts import (
    changes,
    dataset_of,
    doubts,
    facts_of,
    has_own_place,
    is_iterable,
    is_persistent,
    is_stateful,
    workers_of,
)
from hasten.data.watched_workers import WorkerWatch, advance, kind_of_workers, watch_of, watching
from hasten.errors import HastenError
from hasten.messages import warn

_log = logging.getLogger("hasten")


class Position:
    """The position of passes through a loader. It costs nothing per batch: the state is made on request.

    A pass is resumed in one of five ways, the first that fits the loader:

    - own: a hasten.data.DataLoader. Its own small state works with other numbers of workers and ranks.
    - skip: a DataLoader over a map-style dataset. The sampler is advanced without fetching samples; workers restart
      with the RNG states they had after their last consumed batch.
    - loader: a loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader over an iterable
      dataset, or any object): its own state, and the RNG states of its workers.
    - dataset: a DataLoader without workers over an iterable dataset with `state_dict` and `load_state_dict`.
    - replay: anything else. Batches are drawn and dropped, which takes as long as making them.

    No state holds attributes that a dataset changes in itself, unless they are random generators or a counter named
    `epoch`, or the dataset has a `state_dict` (without workers, or in a StatefulDataLoader). A DistributedSampler
    depends on `set_epoch`: call it before `resume`, as before `begin`.

    Args:
        loader: A DataLoader, or any iterable.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._begun: dict[str, Any] | None = None  # RNG states when the open pass began; None between passes
        self._reused = False  # whether the open pass uses persistent workers of an earlier pass
        self._watch: WorkerWatch | None = None
        self._fetcher: Any = None
        self._method = "replay"
        self._before = 0  # batches of the open pass consumed before it was resumed (way "own" only)
        self._waiting: dict[str, Any] | None = None  # a loaded state whose workers the next `begin` has to start

    def begin(self) -> Iterator[Any]:
        """Begin a pass and return `iter(loader)`, with the same random draws and, without workers, torch's iterator."""
        loader = self.loader
        if has_own_place(loader):
            self._begun, self._method, self._before = {}, "own", 0
            return iter(loader)
        self._begun = self._now()
        running = loader._iterator if is_persistent(loader) else None
        waiting, self._waiting = self._waiting, None
        self._reused = running is not None or waiting is not None
        if running is not None:
            watch = watch_of(running)
        elif waiting is not None:
            watch = self._plan(waiting, 0, self._begun)
        else:
            watch = WorkerWatch(depth=_depth(loader))
        if running is not None and watch is not None:
            running.hasten_settle()
            watch.next_pass()
        self._begun["workers"] = {} if watch is None else watch.at(0)[0]
        with watching(loader, watch or WorkerWatch()):
            iterator: Iterator[Any] = iter(loader)
        self._choose_method(iterator)
        return iterator

    def first(self) -> None:
        """Record the RNG states right before the first batch, which is when a sampler may draw its seed.

        Call it if something has drawn random numbers since `begin`.
        """
        if self._begun is not None and self._method != "own" and not workers_of(self.loader):
            self._begun["first"] = rng.state()

    def end(self) -> None:
        """End the pass, exhausted or abandoned. A state saved from now on makes the next pass begin."""
        self._begun = None
        self._fetcher = None
        if not is_persistent(self.loader):
            self._watch = None

    def state_dict(self, batches: int) -> dict[str, Any]:
        """Return the position of the pass.

        Args:
            batches: How many batches of the open pass the training has consumed; ignored between passes.

        Returns:
            Plain values and tensors: some 20 KB, as much again for each worker that draws random numbers, plus the
            loader's or dataset's own `state_dict` if that is used. It never holds the order of a dataset.
        """
        state: dict[str, Any] = {"open": self._begun is not None, "batches": 0, "facts": facts_of(self.loader)}
        if has_own_place(self.loader):
            place = self.loader.state_dict() if self._begun is None else self.loader.state_after(batches - self._before)
            return {**state, "batches": batches if state["open"] else 0, "way": "own", "loader": place}
        state["own"] = rng.states_of(rng.find(self.loader))
        dataset = dataset_of(self.loader)
        if is_stateful(dataset) and not workers_of(self.loader) and not is_iterable(self.loader):
            state["dataset"] = copy.deepcopy(dataset.state_dict())
        return {**state, **(self._between() if self._begun is None else self._within(batches))}

    def _between(self) -> dict[str, Any]:
        """Return the entries that only a state between two passes has."""
        state: dict[str, Any] = {}
        if not isinstance(self.loader, DataLoader) and is_stateful(self.loader):
            state["loader"] = copy.deepcopy(self.loader.state_dict())
        running = self.loader._iterator if is_persistent(self.loader) else None
        if running is not None:
            if (watch := watch_of(running)) is not None:
                running.hasten_settle()
                state["workers"] = _workers_state(watch, *watch.at(batches=2**62))
            else:
                state["workers"] = None
        elif self._waiting is not None:
            state["workers"] = self._waiting["workers"]
        return state

    def _within(self, batches: int) -> dict[str, Any]:
        """Return the entries that only a state in the middle of a pass has."""
        assert self._begun is not None
        state = {"batches": batches, "way": self._method, "digest": rng.digest(), "reused": self._reused}
        state["begun"] = {name: self._begun[name] for name in ("rng", "own", "first") if name in self._begun}
        as_of = batches
        if self._method == "loader":
            loader_state = copy.deepcopy(self.loader.state_dict())
            if isinstance(self.loader, DataLoader):
                # torchdata restarts from its last snapshot and replays the batches since, so take the workers' RNG
                # states as of that snapshot.
                as_of = batches - loader_state.get("_steps_since_snapshot", 0)
                # For a persistent worker that has not given a batch of this pass yet, torchdata still has the state in
                # which it ended the previous pass.
                state["early"] = self._reused and is_iterable(self.loader) and as_of < workers_of(self.loader)
            if isinstance(self.loader, DataLoader) and not _holds_data_state(loader_state):
                state["way"] = "replay"  # torchdata would replay too, but with RNG states that we don't control
            else:
                state["loader"] = loader_state
        elif self._method == "dataset":
            dataset, inner = dataset_of(self.loader), self._fetcher.dataset_iter
            own_state = is_stateful(dataset) and inner is not dataset
            state["dataset"] = copy.deepcopy(dataset.state_dict()) if own_state else None
            state["dataset_iter"] = copy.deepcopy(inner.state_dict()) if is_stateful(inner) else None
        if self._watch is not None:
            known = (self._begun["workers"], []) if state["way"] == "replay" else self._watch.at(as_of)
            state["workers"] = _workers_state(self._watch, *known)
        elif workers_of(self.loader):
            state["workers"] = None
        return state

    def batches_over(self, state: dict[str, Any]) -> int:
        """Return how many batches of the open pass were consumed, in batches of this loader.

        A hasten.data.DataLoader can resume with another number of ranks or batch size than the state was saved with:
        3 batches of 8 samples are 6 batches of 4.
        """
        if not state["open"] or state.get("way") != "own" or not has_own_place(self.loader):
            return int(state["batches"])
        return len(self.loader) - int(self.loader.batch_sampler.count(state["loader"]["samples"]))

    def resume(self, state: dict[str, Any]) -> Iterator[Any] | None:
        """Resume where `state_dict` was called; the caller restores the process-wide generators afterwards.

        It changes the process-wide generators, hence `rng.restore` after it. Whatever cannot be exact, because the
        loader has changed or was read in an unusual way, is a warning.

        Returns:
            The iterator over the batches after those consumed; None for a state between passes, after which the next
            `begin` begins as it would have without the interruption.
        """
        loader = self.loader
        if has_own_place(loader) or state.get("way") == "own":
            return self._resume_own(state)
        _warn(changes(state, facts_of(loader)))
        if is_persistent(loader):
            loader._iterator = None  # this process's persistent workers do not have the saved states
        if not state["open"]:
            self._resume_between(state)
            return None
        batches, begun = state["batches"], state["begun"]
        method = self._method_now(state)
        if method == "skip" and workers_of(loader) and is_stateful(dataset_of(loader)):
            _warn(
                ["what the dataset keeps in its workers is not saved: it starts afresh (a StatefulDataLoader saves it)"]
            )
        if method == "replay" and state["way"] != "replay":
            _warn([f"the loader cannot go on by its own state any more; {batches} batches are drawn again instead"])
        rng.restore(begun["rng"])
        rng.set_states(rng.find(loader), begun["own"])
        plan = self._plan(state, batches if method == "skip" else 0, begun if state["reused"] else None)
        self._begun = {**begun, "workers": dict(plan.start)}
        self._reused = state["reused"]
        iterator = self._restart(state, method, plan)
        _warn(doubts(state, plan))
        self._set_own(state["own"])
        return iterator

    def _restart(self, state: dict[str, Any], method: str, plan: WorkerWatch) -> Iterator[Any]:
        """Begin the pass again and move it to the state's position; set `plan.short` and `plan.drew`."""
        loader, batches = self.loader, state["batches"]
        if method == "loader":
            loader.load_state_dict(copy.deepcopy(state["loader"]))
        elif method == "dataset" and state["dataset"] is not None:
            dataset_of(loader).load_state_dict(copy.deepcopy(state["dataset"]))
        with watching(loader, plan):
            iterator: Iterator[Any] = iter(loader)
        self._choose_method(iterator)
        if method == "dataset" and state["dataset_iter"] is not None:
            self._fetcher.dataset_iter.load_state_dict(copy.deepcopy(state["dataset_iter"]))
        elif method == "skip" and not workers_of(loader):
            self._skip(iterator, state, plan)
        elif method == "replay":
            plan.short, plan.drew = _replay(iterator, batches)
        if isinstance(iterator, _BaseDataLoaderIter) and method in ("skip", "dataset"):
            iterator._num_yielded = batches  # numbers the workers' recorded states, and tells read_ahead what is left
        return iterator

    def _skip(self, iterator: Iterator[Any], state: dict[str, Any], plan: WorkerWatch) -> None:
        """Skip the consumed batches without making them."""
        if state["reused"]:  # persistent workers drew no base seed for this pass, but this new iterator did
            _put_back(self.loader, state["begun"])
        if "first" in state["begun"]:
            rng.restore(state["begun"]["first"])
        plan.short, plan.drew = advance(iterator, state["batches"])
        if "dataset" in state and is_stateful(dataset := dataset_of(self.loader)):
            dataset.load_state_dict(copy.deepcopy(state["dataset"]))

    def _resume_own(self, state: dict[str, Any]) -> Iterator[Any] | None:
        """Resume by the loader's own state (way "own").

        Raises:
            HastenError: Only one of the saved loader and this loader is a hasten.data.DataLoader.
        """
        if state.get("way") != "own" or not has_own_place(self.loader):
            raise HastenError(
                f"where the training data stood was saved by a {state['facts'].get('loader')}, and this is a "
                f"{type(self.loader).__name__}: only a hasten.data.DataLoader reads and writes its own states",
                "resume with the loader of before, or from a checkpoint made between epochs",
            )
        self._begun, self._method = None, "own"
        self.loader.load_state_dict(state["loader"])
        if not state["open"]:
            return None
        self._begun, self._before = {}, state["batches"]
        iterator: Iterator[Any] = iter(self.loader)
        return iterator

    def _resume_between(self, state: dict[str, Any]) -> None:
        """Resume between two passes, so that the next pass begins as it would have."""
        loader = self.loader
        self.end()
        self._set_own(state["own"])
        if "dataset" in state and is_stateful(dataset_of(loader)):
            dataset_of(loader).load_state_dict(copy.deepcopy(state["dataset"]))
        if "loader" in state and is_stateful(loader):
            loader.load_state_dict(copy.deepcopy(state["loader"]))
        if is_stateful(dataset_of(loader)) and is_persistent(loader) and not is_iterable(loader):
            _warn(["what the dataset keeps in workers that stay is not saved between passes: it starts afresh"])
        self._waiting = state if state.get("workers") and is_persistent(loader) else None

    def _now(self) -> dict[str, Any]:
        """Return the states of the process-wide generators and of the loader's own."""
        return {"rng": rng.state(), "own": rng.states_of(rng.find(self.loader))}

    def _set_own(self, states: dict[str, Any]) -> None:
        """Restore the loader's own generators; warn of those that no longer match."""
        if strange := rng.set_states(rng.find(self.loader), states):
            _warn([f"random generators of the loader are not there as when the state was saved: {', '.join(strange)}"])

    def _plan(self, state: dict[str, Any], skip: int, before: dict[str, Any] | None) -> WorkerWatch:
        """Return how workers have to start: with which RNG states, skipping how many batches.

        Args:
            state: The loaded state.
            skip: Batches to skip.
            before: For a later pass of persistent workers, the RNG states when it began; else None.
        """
        before_reset = None
        # Starting workers draws a base seed, which the uninterrupted pass with persistent workers did not draw: put the
        # generators back once the workers run.
        if before is not None:
            before_reset = functools.partial(_put_back, self.loader, before)
        workers = state.get("workers")
        if not workers or workers["number"] != workers_of(self.loader):
            return WorkerWatch(skip=skip, before_reset=before_reset, depth=_depth(self.loader))
        states = {int(worker): rng.to_raw(worker_state) for worker, worker_state in workers["states"].items()}
        return WorkerWatch(states, workers["base_seed"], skip, before_reset, _depth(self.loader))

    def _choose_method(self, iterator: Any) -> None:
        """Choose the way in which the pass that has just begun can be resumed."""
        loader = self.loader
        is_torch_iterator = isinstance(loader, DataLoader) and isinstance(iterator, _BaseDataLoaderIter)
        self._watch = watch_of(iterator) if is_torch_iterator else None
        self._fetcher = getattr(iterator, "_dataset_fetcher", None) if is_torch_iterator else None
        known = is_torch_iterator and (not workers_of(loader) or self._watch is not None)
        if (
            known
            and not is_iterable(loader)
            and not (workers_of(loader) and is_stateful(loader.dataset) and is_stateful(loader))
        ):
            self._method = "skip"
        elif is_stateful(loader) and (known or not isinstance(loader, DataLoader)):
            self._method = "loader"
        elif known and self._fetcher is not None and not isinstance(loader.dataset, IterDataPipe):
            stateful = is_stateful(loader.dataset) or is_stateful(self._fetcher.dataset_iter)
            self._method = "dataset" if stateful else "replay"
        else:
            self._method = "replay"

    def _method_now(self, state: dict[str, Any]) -> str:
        """Return the way in which the state was saved if this loader still supports it, else "replay"."""
        way, loader = str(state["way"]), self.loader
        same_workers = state["facts"].get("num_workers", 0) == workers_of(loader)
        possible = {
            "skip": isinstance(loader, DataLoader)
            and not is_iterable(loader)
            and (not workers_of(loader) or kind_of_workers(loader) is not None),
            "loader": is_stateful(loader) and (same_workers or not isinstance(loader, DataLoader)),
            "dataset": isinstance(loader, DataLoader) and same_workers,
        }
        return way if possible.get(way) else "replay"


def _replay(iterator: Iterator[Any], batches: int) -> tuple[bool, bool]:
    """Draw and drop batches; return the same as `advance`."""
    if batches:
        _log.info("drawing %d batches again, to go on in the middle of a pass", batches)
    drawn = sum(1 for _ in itertools.islice(iterator, 1))
    first = rng.digest()
    drawn += sum(1 for _ in itertools.islice(iterator, max(batches - 1, 0)))
    return drawn < batches, first != rng.digest()


def _put_back(loader: Any, before: dict[str, Any]) -> None:
    rng.restore(before["rng"])
    rng.set_states(rng.find(loader), before["own"])


def _workers_state(watch: WorkerWatch, states: dict[int, Any], lost_workers: list[int]) -> dict[str, Any]:
    plain = {str(worker): rng.from_raw(state) for worker, state in states.items()}
    return {"base_seed": watch.base_seed, "states": plain, "lost": lost_workers, "number": watch.number}


def _depth(loader: Any) -> int:
    """Return how many RNG states to keep for each worker: enough for StatefulDataLoader's last snapshot."""
    every = getattr(loader, "snapshot_every_n_steps", None) or 1
    return 8 + int(every) // max(workers_of(loader), 1)


def _holds_data_state(loader_state: Any) -> bool:
    """Return whether a StatefulDataLoader's state contains a state of its dataset, or of the dataset's iterator."""
    if not isinstance(loader_state, dict):
        return False
    has_state = any(loader_state.get(name) is not None for name in ("dataset_state", "dataset_iter_state"))
    return has_state or any(_holds_data_state(inner) for inner in loader_state.values())


def _warn(messages: list[str]) -> None:
    for message in messages:
        warn(f"resume: {message}", stacklevel=3)
