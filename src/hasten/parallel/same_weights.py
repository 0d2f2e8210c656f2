"""Keep weights and buffers on all ranks of a script equal to rank 0's, and detect ranks whose weights diverge."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hasten.errors import HastenError
from hasten.parallel.flat import copy_back, pieces
from hasten.parallel.meeting import Meeting

_PIECE = 1 << 25  # bytes per broadcast
_APART = 1e-4  # relative difference of the weights' sums that counts as divergence: far beyond rounding


class SameWeights:
    """Broadcasts rank 0's new weights and changed buffers, and checks that the ranks' weights do not diverge.

    Args:
        meeting: The ranks.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._world = meeting.world
        self._late: list[torch.Tensor] = []
        self._watched: list[weakref.ref[nn.Module]] = []
        self._versions: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def watch(self, module: nn.Module) -> None:
        """Keep this module's buffers equal from now on. Call it in the same order on all ranks."""
        self._watched.append(weakref.ref(module))

    def late(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast these tensors at the next `agree`."""
        self._late += tensors

    def agree(self, trained: Sequence[torch.Tensor]) -> None:
        """Broadcast new tensors and changed buffers, and compare trained parameters over the ranks; a collective.

        Args:
            trained: Parameters trained last, the same on all ranks.

        Raises:
            HastenError: The ranks' weights differ by more than rounding.
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
        """Broadcast rank 0's values of these tensors, in place; lazy and non-strided tensors are skipped."""
        dense = [one for one in tensors if not nn.parameter.is_lazy(one) and one.layout is torch.strided]
        each_once = {id(tensor): tensor.detach() for tensor in dense}
        for piece in pieces(each_once.values(), _PIECE):
            self._send(piece)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Broadcast tensors of one dtype and device as one message."""
        import torch.distributed as dist

        with torch.no_grad():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            # As bytes: gloo does not send every dtype (uint16 and float8, for example).
            dist.broadcast((torch.view_as_real(flat) if flat.is_complex() else flat).view(torch.uint8), 0)
            if not self._world.is_zero:
                copy_back(flat, tensors)

    def _spread_buffers(self) -> None:
        """Broadcast rank 0's buffers that changed since the last call (BatchNorm statistics, say), as DDP does.

        A buffer's version counter, which torch increments at each in-place change, tells whether it changed.
        """
        changed = {}
        for number, reference in enumerate(self._watched):
            module = reference()
            for place, buffer in enumerate(module.buffers() if module is not None else ()):
                if self._versions.get(buffer) != buffer._version:
                    changed[number, place] = buffer.detach().cpu() if self._world.is_zero else None
        from_zero = self._world.broadcast(changed)
        for number, reference in enumerate(self._watched):
            module = reference()
            for place, buffer in enumerate(module.buffers() if module is not None else ()):
                if (number, place) in from_zero and not self._world.is_zero:
                    with torch.no_grad():
                        buffer.copy_(from_zero[number, place])
                self._versions[buffer] = buffer._version

    def _apart(self, trained: Sequence[torch.Tensor]) -> float:
        """Return the relative difference of the ranks' sums of absolute weights; 0.0 if within rounding."""
        with torch.no_grad():
            total = sum(float(one.detach().abs().sum(dtype=torch.float64)) for one in trained)
        smallest = float(self._world.reduce(torch.tensor(total, dtype=torch.float64), "min"))
        largest = float(self._world.reduce(torch.tensor(total, dtype=torch.float64), "max"))
        apart = abs(largest - smallest) / max(abs(largest), 1e-30)
        return apart if apart > _APART else 0.0
