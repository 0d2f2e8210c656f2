"""Which batches feed the backward that comes, of a script that is carried to several devices."""

from __future__ import annotations

import os
from typing import Any

from hasten import messages
from hasten.parallel.batch_shares import LoaderState, Pass, SharedBatches


class Unshared:
    """A pass through a loader whose batches cannot be shared out, and why."""

    def __init__(self, why: str) -> None:
        self.why = why


class Fed:
    """The batches that a rank was given.

    Attributes:
        given: Batches so far, of all loaders.
        samples: Of the batch trained on: this rank's.
        all_samples: Of the batch trained on: all ranks'.
        untold: Loaders that are shared out, of which nothing was said yet; a script may build one for each epoch.
    """

    def __init__(self) -> None:
        self.given = 0
        self.samples, self.all_samples = 1.0, 0
        self.untold: list[LoaderState] = []
        self._told: set[str] = set()
        self._since: dict[Pass | Unshared, int] = {}  # passes that gave a batch since the last backward -> how many

    def gave(self, iterator: Any) -> None:
        """A loader gave its next batch."""
        self.given += 1
        one = _pass_of(iterator)
        self._since[one] = self._since.get(one, 0) + 1
        if isinstance(one, Unshared):
            return
        one.gives()
        if one.shared and one.state.where not in self._told:
            self._told.add(one.state.where)
            self.untold.append(one.state)

    def over(self, iterator: Any) -> None:
        """A pass is over: what it gave was looked at, and did not feed the backward that comes."""
        one = _pass_of(iterator)
        self._since.pop(one, None)
        if isinstance(one, Pass) and one.shared and not one.proven and os.environ["RANK"] == "0":
            messages.tell(
                f"hasten: the pass over the shuffling loader at {one.state.where} trained nothing, which was known "
                f"only after its first batches were shared out ({one.shared}): what rank 0 computed of these is of its "
                "own share. Call model.eval() before such a loop, or put torch.no_grad() around it"
            )

    def backward(self) -> str:
        """Note that a backward begins; return why its batches cannot be shared out, or ""."""
        for one, times in self._since.items():
            if times > 1 and len(self._since) > 1:  # batches that were looked at, by a validation that was cut short
                continue
            if isinstance(one, Unshared):
                return one.why
            one.backward()
            if one.uneven_ahead(int(os.environ["WORLD_SIZE"])):
                return (
                    f"the loop over the DataLoader at {one.state.where} fetches a batch ahead of the one that it "
                    "trains on, and ranks have unequal shares of these; set drop_last=True, and a batch size that the "
                    "number of ranks divides"
                )
            self.samples, self.all_samples = one.latest
        self._since.clear()
        return ""


def why_not_shared(loader: Any) -> str:
    """Return why a loader's batches cannot be shared out, or ""."""
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset"
    if loader.batch_sampler is None:
        return "the DataLoader has batch_size=None"
    if type(loader).__module__.startswith(("torchdata.", "hasten.")):
        return f"{type(loader).__module__}.{type(loader).__name__} has an order of its own"
    if not getattr(loader, "in_order", True):
        return "the DataLoader has in_order=False"
    return ""


def _pass_of(iterator: Any) -> Pass | Unshared:
    batches = iterator.__dict__.get("_index_sampler")
    if isinstance(batches, SharedBatches) and batches.current is not None:
        return batches.current
    known: Unshared | None = iterator.__dict__.get("_hasten_unshared")
    if known is None:
        known = iterator.__dict__["_hasten_unshared"] = Unshared(f"a {type(iterator).__name__} gives them")
    return known
