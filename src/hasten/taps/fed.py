"""Track which batches feed the next backward of a script that runs on several devices.

Only batches that are trained on matter for averaging gradients. A pass that ends without a backward in it was a
validation or a look at the data, and is forgotten.
"""

from __future__ import annotations

import os
from typing import Any

from hasten import messages
from hasten.parallel.batch_shares import LoaderState, Pass, SharedBatches


class UnsharedPass:
    """A pass through a loader whose batches cannot be shared out among ranks.

    Attributes:
        reason: Why not.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason


class FedBatches:
    """The batches that loaders gave to this rank.

    Attributes:
        count: Number of batches so far, from all loaders.
        samples: This rank's samples in the batch that is trained on.
        all_samples: All ranks' samples in the batch that is trained on.
        unannounced: Loaders that are shared out and were not announced to the user yet. A loader that the script
            rebuilds at the same line, say for each epoch, is announced once.
    """

    def __init__(self) -> None:
        self.count = 0
        self.samples, self.all_samples = 1.0, 0
        self.unannounced: list[LoaderState] = []
        self._announced: set[str] = set()  # `file:line` of loaders
        self._since: dict[Pass | UnsharedPass, int] = {}  # pass -> batches given since the last backward

    def count_batch(self, iterator: Any) -> None:
        """Count a batch that a loader just gave."""
        self.count += 1
        current = _pass_of(iterator)
        self._since[current] = self._since.get(current, 0) + 1
        if isinstance(current, UnsharedPass):
            return
        current.gives()
        if current.shared and current.state.where not in self._announced:
            self._announced.add(current.state.where)
            self.unannounced.append(current.state)

    def pass_ended(self, iterator: Any) -> None:
        """Forget a finished pass: its last batches do not feed the next backward. Warn if it trained nothing."""
        ended = _pass_of(iterator)
        self._since.pop(ended, None)
        if isinstance(ended, Pass) and ended.shared and not ended.proven and os.environ["RANK"] == "0":
            messages.tell(
                f"hasten: the pass over the shuffling loader at {ended.state.where} trained nothing, which was known "
                f"only after its first batches were shared out ({ended.shared}): what rank 0 computed of these is of "
                "its own share. Call model.eval() before such a loop, or put torch.no_grad() around it"
            )

    def backward(self) -> str:
        """Register the start of a backward; return why its batches cannot be shared out, or ""."""
        for fed, times in self._since.items():
            # Guess: a pass that gave several batches since the last backward, beside another pass, is a validation
            # that the script left early (`for batch in val_loader: ...; if done: break`).
            if times > 1 and len(self._since) > 1:
                continue
            if isinstance(fed, UnsharedPass):
                return fed.reason
            fed.backward()
            if fed.uneven_ahead(int(os.environ["WORLD_SIZE"])):
                return (
                    f"the loop over the DataLoader at {fed.state.where} fetches a batch ahead of the one that it "
                    "trains on, and ranks have unequal shares of these; set drop_last=True, and a batch size that the "
                    "number of ranks divides"
                )
            self.samples, self.all_samples = fed.latest
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


def _pass_of(iterator: Any) -> Pass | UnsharedPass:
    """Return the pass of a loader's iterator; unknown kinds of iterators count as not shared out."""
    batches = iterator.__dict__.get("_index_sampler")
    if isinstance(batches, SharedBatches) and batches.current is not None:
        return batches.current
    unshared: UnsharedPass | None = iterator.__dict__.get("_hasten_unshared")
    if unshared is None:
        unshared = iterator.__dict__["_hasten_unshared"] = UnsharedPass(f"a {type(iterator).__name__} gives them")
    return unshared
