"""Average gradients over ranks after each backward, in place, for models and optimizers that a script builds itself.

Each parameter gets a number, in the same order on all ranks, and a hook that notes when its gradient changes. After a
backward, the ranks first compare which parameters it reached (`Meeting.meet`); only if those differ do they exchange
the full list. Then the gradients are averaged in buckets, each rank weighted by its number of samples.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hasten.errors import HastenError
from hasten.parallel.flat import copy_back, pieces
from hasten.parallel.meeting import Meeting, MeetingTopic

_BUCKET = 1 << 25  # bytes per all-reduce


class Averaging:
    """Averages the gradients of registered parameters over the ranks.

    After each backward, `.grad` on every rank is what one process would have computed from the samples of all ranks.
    So everything that reads it (clipping, a GradScaler, a print) sees the right values. Accumulation over several
    backwards stays correct: the part averaged before is equal on all ranks, so averaging it again does not change it.

    DistributedDataParallel computes the same mean, but it must wrap the model, must know which backward is the last
    before a step, and weights all ranks equally.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._by_number: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._frozen: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._count = 0
        self._touched: dict[int, torch.Tensor] = {}
        self.averaged: list[torch.Tensor] = []

    def add(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Register parameters, in the same order on all ranks. Return those that are new."""
        new = []
        for parameter in parameters:
            if parameter in self._numbers:
                continue
            self._numbers[parameter] = self._count
            self._by_number[self._count] = parameter
            self._count += 1
            new.append(parameter)
            if parameter.is_leaf and parameter.requires_grad:
                self._listen(parameter)
            else:
                self._frozen[parameter] = True
        return new

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was registered."""
        return tensor in self._numbers

    def begins(self) -> None:
        """Prepare for a backward. Call it right before each one."""
        self._touched.clear()
        for parameter in [parameter for parameter in self._frozen if parameter.requires_grad]:  # unfrozen since
            del self._frozen[parameter]
            self._listen(parameter)

    def ends(self, at: int, samples: float) -> int:
        """Average the gradients that a finished backward changed on any rank; a collective.

        Args:
            at: Number of batches this rank has received so far.
            samples: Number of samples that this rank's gradient is the mean of; 0.0 leaves this rank out of the mean.

        Returns:
            Number of parameters whose gradient the backward changed on any rank.

        Raises:
            HastenError: A gradient is sparse, or the ranks do different things.
        """
        touched, self._touched = self._touched, {}
        numbers = sorted(touched)
        meeting = self._meeting.meet(MeetingTopic.BACKWARD, at=at, share=samples, pattern=_hash(numbers))
        world = self._meeting.world
        if not meeting.same:
            numbers = self._all_touched(numbers)
        parameters = [self._of(number) for number in numbers]
        weight = samples / meeting.total if meeting.total else 1.0 / world.size
        for bucket in pieces(parameters, _BUCKET):
            self._average(bucket, weight)
        self.averaged = parameters
        return len(parameters)

    def _listen(self, parameter: torch.Tensor) -> None:
        """Add a hook that notes when a backward changes the parameter's gradient."""
        # A weak reference: a hook must not keep this object, and through it the other parameters, alive.
        number, owner = self._numbers[parameter], weakref.ref(self)

        def note(leaf: torch.Tensor) -> None:
            averaging = owner()
            if averaging is not None:
                averaging._touched[number] = leaf

        parameter.register_post_accumulate_grad_hook(note)

    def _all_touched(self, numbers: list[int]) -> list[int]:
        """Return the numbers of parameters reached on any rank: ranks may use different parts of a model."""
        count = int(self._meeting.world.reduce(torch.tensor(self._count), "max"))
        flags = torch.zeros(count, dtype=torch.int32)
        flags[numbers] = 1
        return [int(number) for number in self._meeting.world.reduce(flags, "max").nonzero().flatten()]

    def _of(self, number: int) -> torch.Tensor:
        """Return the parameter with this number.

        Raises:
            HastenError: This rank has no such parameter, or its gradient is sparse.
        """
        parameter = self._by_number.get(number)
        if parameter is None:
            raise HastenError(
                f"The ranks have parted: rank {self._meeting.world.rank} lacks a parameter that another one trains.",
                "All ranks must build the same models and optimizers.",
                code=1,
            )
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise HastenError(
                f"The gradient of a parameter of shape {tuple(parameter.shape)} is sparse: hasten cannot average it.",
                "Use nn.Embedding(..., sparse=False), or run the script on one device.",
            )
        return parameter

    def _average(self, parameters: list[torch.Tensor], weight: float) -> None:
        """Replace the gradients of parameters by the sum over ranks of weight * gradient, in one all-reduce."""
        import torch.distributed as dist

        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is None:  # other ranks have a gradient: take part in their all-reduce with zeros
                    parameter.grad = torch.zeros_like(parameter)
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            wide = torch.promote_types(grads[0].dtype, torch.float32)  # 16-bit gradients are summed in float32
            flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads]).mul_(weight)
            dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
            copy_back(flat, grads)


def _hash(numbers: list[int]) -> int:
    """Return a 40-bit hash of the numbers."""
    text = ",".join(map(str, numbers)).encode()
    return zlib.crc32(text) & 0xFFFFF | (zlib.crc32(text[::-1], 1) & 0xFFFFF) << 20
