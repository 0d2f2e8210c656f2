"""Facts about a loader, and the warnings about changes that make a resumed pass inexact."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from hasten.data import rng
from hasten.data.watched_workers import WorkerWatch


def workers_of(loader: Any) -> int:
    return int(loader.num_workers) if isinstance(loader, DataLoader) else 0


def is_persistent(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0


def is_iterable(loader: Any) -> bool:
    return isinstance(dataset_of(loader), IterableDataset)


def dataset_of(loader: Any) -> Any:
    return loader.dataset if isinstance(loader, DataLoader) else None


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def has_own_place(loader: Any) -> bool:
    """Return whether the loader is a hasten.data.DataLoader, whose own state can hold the position of any pass."""
    return hasattr(type(loader), "state_after") and is_stateful(loader)


def facts_of(loader: Any) -> dict[str, Any]:
    """Return the facts about a loader that must not change if a resumed pass is to be exact."""
    facts: dict[str, Any] = {"loader": type(loader).__name__}
    if isinstance(loader, DataLoader):
        batch_size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
        facts["num_workers"] = loader.num_workers
        facts["batch_size"] = batch_size if isinstance(batch_size, int) else None
        facts["persistent_workers"] = is_persistent(loader)
        facts["in_order"] = bool(loader.in_order)
        if not is_iterable(loader):
            facts["sampler"] = type(loader.sampler).__name__
            facts["samples"] = len(cast(Any, loader.dataset)) if hasattr(type(loader.dataset), "__len__") else None
    return facts


def changes(state: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return warnings: what changed since the state was saved, and how the resumed pass differs for it."""
    then, batches = state["facts"], state["batches"]
    notes = []
    for name, spoilt in (
        ("loader", "a loader of another class may give other batches"),
        (
            "batch_size",
            f"the pass goes on after {batches} batches of the new size: samples may be left out, or come again",
        ),
        ("samples", "a dataset of another length is put in another order: samples may be left out, or come again"),
        (
            "persistent_workers",
            "workers that stay draw no new seed for each pass: later passes have other random numbers",
        ),
        ("sampler", "another sampler gives another order: samples may be left out, or come again"),
    ):
        mid_pass_only = name not in ("loader", "persistent_workers")
        if name in then and name in now and then[name] != now[name] and not (mid_pass_only and not state["open"]):
            notes.append(f"{name} was {then.get(name)} and is {now.get(name)}: {spoilt}")
    if then.get("num_workers", 0) != now.get("num_workers", 0) and _workers_mattered(state):
        notes.append(
            f"num_workers was {then.get('num_workers', 0)} and is {now.get('num_workers', 0)}: "
            "random numbers drawn in the dataset are not those an uninterrupted training would have drawn"
        )
    if state["open"] and then.get("in_order") is False and then.get("num_workers"):
        notes.append("in_order=False: which batches were consumed is not known; the first ones are taken to be")
    return notes


def _workers_mattered(state: dict[str, Any]) -> bool:
    """Return whether workers drew random numbers, or may have."""
    workers = state.get("workers")
    return not workers or bool(workers["states"]) or state.get("way") not in ("skip", None)


def doubts(state: dict[str, Any], plan: WorkerWatch) -> list[str]:
    """Return warnings about what went wrong while the pass was restored."""
    notes, batches = [], state["batches"]
    if plan.short:
        notes.append(f"the pass has fewer than the {batches} batches that were consumed of it: it ends here")
    if plan.drew and rng.digest() != state["digest"]:
        notes.append(
            "the loader draws from the process-wide random generators throughout the pass, between the training's own "
            "draws: what it remembers of earlier draws (a shuffle buffer, an order) may differ. Give it a generator"
        )
    if "workers" in state and state["workers"] is None and state["reused"]:
        notes.append("workers that stay were started before hasten saw the loader: their random states are not known")
    elif state.get("workers") and state["workers"]["lost"]:
        notes.append("batches were read far ahead of the training: some workers' random states are not known")
    if state.get("early") and state["way"] == "loader":
        notes.append(
            "it was saved before each worker had given a batch of this pass, and workers stay from pass to pass: what "
            "StatefulDataLoader knows of the others is how they ended the pass before, so their batches may be missing"
        )
    return notes
