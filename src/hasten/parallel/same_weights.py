"""Keeps weights and buffers the same on all ranks of a carried script: rank 0's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hasten.errors import HastenError
from hasten.parallel.flat import copy_back, pieces
from hasten.parallel.meeting import Meeting

_PIECE = 1 << 25  # bytes sent at once
_APART = 1e-4  # relative difference of sums at which weights are not the same: far beyond rounding


class SameWeights:
    """Spreads rank 0's weights when they are new, its buffers where they have changed, and looks whether ranks part."""

    def __init__(self, meeting: Meeting) -> None:
        self._world = meeting.world
        self._late: list[torch.Tensor] = []
        self._watched: list[weakref.ref[nn.Module]] = []
        self._versions: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def watch(self, module: nn.Module) -> None:
        """Keep this module's buffers the same from now on; in the same order on all ranks."""
        self._watched.append(weakref.ref(module))

    def late(self, tensors: Iterable[torch.Tensor]) -> None:
        """Spread these when the ranks meet next."""
        self._late += tensors

    def agree(self, trained: Sequence[torch.Tensor]) -> None:
        """All ranks are here: spread what is new, and look whether what was trained is still the same.

        Args:
            trained: What was trained last, the same parameters on all ranks.

        Raises:
            HastenError: The weights of two ranks differ by more than rounding.
        """
        late, self._late = self._late, []
        self.spread(late)
        self._spread_buffers()
        if trained and (apart := self._apart(trained)):
            raise HastenError(
                f"The ranks have parted: their weights differ by {apart:.1e}.",
                "Something changed them on one rank and not on the others: a random number of the system's, a rate "
                "that follows the loss of a rank's own share, a file that only one of them has.",
                code=1,
            )

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Rank 0's values of these, on all ranks."""
        dense = [one for one in tensors if not nn.parameter.is_lazy(one) and one.layout is torch.strided]
        each_once = {id(tensor): tensor.detach() for tensor in dense}
        for piece in pieces(each_once.values(), _PIECE):
            self._send(piece)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        import torch.distributed as dist

        with torch.no_grad():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast((torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8), 0)
            if not self._world.is_zero:
                copy_back(flat, tensors)

    def _spread_buffers(self) -> None:
        """Spread rank 0's buffers (the statistics of BatchNorm, say), as DistributedDataParallel does."""
        changed = {}
        for number, held in enumerate(self._watched):
            module = held()
            for place, buffer in enumerate(module.buffers() if module is not None else ()):
                if self._versions.get(buffer) != buffer._version:
                    changed[number, place] = buffer.detach().cpu() if self._world.is_zero else None
        theirs = self._world.broadcast(changed)
        for number, held in enumerate(self._watched):
            module = held()
            for place, buffer in enumerate(module.buffers() if module is not None else ()):
                if (number, place) in theirs and not self._world.is_zero:
                    with torch.no_grad():
                        buffer.copy_(theirs[number, place])
                self._versions[buffer] = buffer._version

    def _apart(self, trained: Sequence[torch.Tensor]) -> float:
        """Return how far the ranks' weights lie apart, relative to their size; 0.0 within rounding."""
        with torch.no_grad():
            total = sum(float(one.detach().abs().sum(dtype=torch.float64)) for one in trained)
        least = float(self._world.reduce(torch.tensor(total, dtype=torch.float64), "min"))
        most = float(self._world.reduce(torch.tensor(total, dtype=torch.float64), "max"))
        apart = abs(most - least) / max(abs(most), 1e-30)
        return apart if apart > _APART else 0.0
