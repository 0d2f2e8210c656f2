"""Averages gradients over ranks after each backward, in place, whoever owns the parameters."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hasten.errors import HastenError
from hasten.parallel.flat import copy_back, pieces
from hasten.parallel.meeting import About, Meeting

_BUCKET = 1 << 25  # bytes sent in one piece


class Averaging:
    """The gradients of parameters that were added here, averaged over the ranks.

    `.grad` of every rank is, after each backward, what one process would have computed from the samples of all
    ranks. So whatever reads it there (clipping, a GradScaler, a print) sees that, and a gradient that is accumulated
    over several backwards stays right: what was averaged before is the same on all ranks, and so is its mean.

    DistributedDataParallel is another way to the same mean. It wants to wrap the model, to be told which backward is
    the last one before a step, and to weigh all ranks the same.
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
        """Average these from now on; in the same order on all ranks. Returns those that are new."""
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
        """Whether a tensor was added."""
        return tensor in self._numbers

    def begins(self) -> None:
        """A backward begins."""
        self._touched.clear()
        for parameter in [parameter for parameter in self._frozen if parameter.requires_grad]:  # thawed meanwhile
            del self._frozen[parameter]
            self._listen(parameter)

    def ends(self, at: int, samples: float) -> int:
        """A backward is over: average what it has touched on any rank.

        Args:
            at: How many batches this rank was given so far.
            samples: Of how many samples this rank's gradient is the mean; 0.0: it counts for nothing.

        Returns:
            How many parameters have a gradient of it, on any rank.

        Raises:
            HastenError: A gradient is sparse, or the ranks have parted.
        """
        touched, self._touched = self._touched, {}
        numbers = sorted(touched)
        met = self._meeting.meet(About.BACKWARD, at=at, share=samples, pattern=_hash(numbers))
        world = self._meeting.world
        if not met.same:
            numbers = self._all_touched(numbers)
        parameters = [self._of(number) for number in numbers]
        weight = samples / met.total if met.total else 1.0 / world.size
        for bucket in pieces(parameters, _BUCKET):
            self._average(bucket, weight)
        self.averaged = parameters
        return len(parameters)

    def _listen(self, parameter: torch.Tensor) -> None:
        number, touched = self._numbers[parameter], weakref.ref(self)

        def note(leaf: torch.Tensor) -> None:
            averaging = touched()
            if averaging is not None:
                averaging._touched[number] = leaf

        parameter.register_post_accumulate_grad_hook(note)

    def _all_touched(self, numbers: list[int]) -> list[int]:
        """Return the parameters that any rank has a gradient of: ranks may use different parts of a model."""
        most = int(self._meeting.world.reduce(torch.tensor(self._count), "max"))
        flags = torch.zeros(most, dtype=torch.int32)
        flags[numbers] = 1
        return [int(number) for number in self._meeting.world.reduce(flags, "max").nonzero().flatten()]

    def _of(self, number: int) -> torch.Tensor:
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
        import torch.distributed as dist

        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is None:  # others have one
                    parameter.grad = torch.zeros_like(parameter)
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            wide = torch.promote_types(grads[0].dtype, torch.float32)  # half types are added up in float32
            flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads]).mul_(weight)
            dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
            copy_back(flat, grads)


def _hash(numbers: list[int]) -> int:
    """40 bits that say which numbers these are."""
    text = ",".join(map(str, numbers)).encode()
    return zlib.crc32(text) & 0xFFFFF | (zlib.crc32(text[::-1], 1) & 0xFFFFF) << 20
