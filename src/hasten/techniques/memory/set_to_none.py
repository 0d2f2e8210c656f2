"""Gradients dropped instead of filled with zeros."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques import gradient_access
from hasten.techniques.base import Call, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.memory import zero_pages
from hasten.techniques.replaced import Replaced

_LARGE = 1 << 20  # elements: smaller ones are added in the cache, and to allocate them all costs as much
_Zeros = tuple[Any, Any, int, int]
"""A parameter and its gradient, by weak references; of that gradient, when it became zeros: the version, and where
its memory begins if that is pages which nobody has touched, else 0."""


class SetToNone(Technique):
    """Large gradients that `zero_grad(set_to_none=False)` filled with zeros are dropped as the backward begins.

    The backward then hands its own gradient over instead of reading and adding to zeros. To the script gradients are
    zeros as before, in memory that is filled only when somebody touches it (on Linux); those that the backward leaves
    without one are zeros again behind it. A gradient is dropped only where nothing but its parameter holds it (no view
    of a flat buffer, no variable) and it still is zeros; with hooks inside the backward, or functions of the script's
    own, none is. What changes is the sign of some zeros: 0.0 + -0.0 is 0.0. Gradients on a GPU are left alone: to see
    that they are zeros still would wait for it.
    """

    name = "set_to_none"
    effect = Effect.ROUNDING
    relieves = Resource.OPTIMIZER
    sources = ("Lin, tip 14", "Kuhn, tip 10")
    liveness = Liveness.STEP
    acts_on = "a gradient of 2^20 elements or more, on a CPU, that is filled with zeros"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On where the script asks for zeros."""
        if not evidence.flags.zeroed_gradients:
            return Refusal("gradients are set to None already, torch's default")
        if evidence.flags.missing_gradients:
            return Refusal("some parameters got no gradient in some step: zeros and None differ for them")
        if any(model.device == "cuda" for model in evidence.models):
            return Refusal("on a GPU, to see that gradients are zeros still would wait for it")
        return Choices((True,), f"gradients are filled with zeros at {evidence.flags.zeroed_gradients}")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._zeros: list[_Zeros] = []
        self._alone: tuple[int, int, int] = (0, 0, 0)  # holders of a gradient that its parameter alone holds
        self._onlooker = ""
        self._functions = 0
        self._installed = False
        self._replaced: list[Replaced] = []

    def process(self) -> None:
        """Note what `zero_grad` fills with zeros, and who looks into the backward."""
        import torch

        self._installed = True
        sample = torch.nn.Parameter(torch.zeros(1))
        sample.grad = torch.zeros(1)
        self._alone = _holders(sample.grad)
        gradient_access.watch(self, SetToNone._looked)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._replaced.append(Replaced(owner, "zero_grad", self._noting))
            self._replaced[-1].put_in_place()

    def restore(self) -> None:
        """Put torch's own functions back."""
        self._installed, self._zeros = False, []
        gradient_access.leave(self)
        while self._replaced:
            self._replaced.pop().put_back()

    def on(self) -> None:
        """Drop the gradients that are filled with zeros from here on."""
        super().on()
        if not self._installed:
            self.process()

    def off(self) -> None:
        """Drop none, nor those that are zeros now."""
        super().off()
        self._zeros = []

    def _looked(self, what: str) -> None:
        self._onlooker = what

    def _noting(self, plain: Any) -> Any:
        def zero_grad(this: Any, set_to_none: bool = True) -> None:
            if set_to_none or not self.active or self._onlooker:
                plain(this, set_to_none)
                return
            large = [one for one in _parameters(this) if one.numel() >= _LARGE and one.grad is not None]
            pages = [(one, zeros) for one in large if (zeros := self._in_pages(one)) is not None]
            for parameter, _ in pages:
                parameter.grad = None  # nothing to fill
            try:
                plain(this, set_to_none)
            finally:
                for parameter, zeros in pages:
                    parameter.grad = zeros
            self._note(large, {id(parameter) for parameter, _ in pages})

        return zero_grad

    def _in_pages(self, parameter: Any) -> Any:
        """Return zeros to take the place of a parameter's gradient; None where it has to be filled itself."""
        if not _as_new(parameter, parameter.grad) or _holders(parameter.grad) != self._alone:
            return None
        return zero_pages.zeros_like(parameter)

    def _note(self, large: Iterable[Any], in_pages: set[int]) -> None:
        """Note the large gradients that are zeros now."""
        self._zeros = [one for one in self._zeros if one[1]() is not None]
        for parameter in large:
            if (gradient := parameter.grad) is not None and gradient.device.type == "cpu":
                address = gradient.data_ptr() if id(parameter) in in_pages else 0
                self._zeros.append((weakref.ref(parameter), weakref.ref(gradient), gradient._version, address))

    def backward(self, call: Call) -> Call:
        """Drop zeros before it, and put them back where it brought no gradient."""

        def dropping(*args: Any, **kwargs: Any) -> Any:
            if not self._zeros:
                return call(*args, **kwargs)
            noted, self._zeros = self._zeros, []
            if kwargs.get("create_graph") or (len(args) > 3 and args[3]) or self._is_watched():
                return call(*args, **kwargs)
            dropped = [parameter for one in noted if (parameter := self._dropped(*one)) is not None]
            if dropped and not self.acted:
                self.did("optimizer")
            try:
                return call(*args, **kwargs)
            finally:
                for parameter in dropped:
                    _fill(parameter)

        return dropping

    def _is_watched(self) -> bool:
        """Whether the script can see gradients inside a backward; once it does, zeros stay for good."""
        import torch

        if not self._onlooker:
            functions = torch.autograd.Function.__subclasses__()
            if len(functions) != self._functions:
                self._functions = len(functions)
                own = (one.__name__ for one in functions if not one.__module__.startswith(("torch.", "hasten.")))
                self._onlooker = next(own, "")
        if self._onlooker:
            self.let_go(f"{self._onlooker} can see gradients inside the backward")
        return bool(self._onlooker)

    def _dropped(self, parameter: Any, gradient: Any, version: int, address: int) -> Any:
        """Drop a parameter's gradient and return the parameter; None where it may be no zeros, or others hold it."""
        parameter = parameter()
        if parameter is None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return None
        if parameter.grad is None or parameter.grad is not gradient() or parameter.grad._version != version:
            return None
        if not _as_new(parameter, parameter.grad) or _holders(parameter.grad) != self._alone:
            return None
        if not _is_zero(parameter.grad, address):
            return None
        parameter.grad = None
        return parameter


def _parameters(of: Any) -> Iterable[Any]:
    groups = getattr(of, "param_groups", None)
    return of.parameters() if groups is None else (parameter for group in groups for parameter in group["params"])


def _as_new(parameter: Any, gradient: Any) -> bool:
    """Whether a backward would lay out a new gradient like this one."""
    import torch

    return bool(
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.device.type == "cpu"
        and (gradient.dtype, gradient.shape) == (parameter.dtype, parameter.shape)
        and gradient.is_contiguous()
        and parameter.is_contiguous()
        and not gradient.requires_grad
        and not torch.is_inference(gradient)
    )


def _is_zero(gradient: Any, address: int) -> bool:
    """Whether all elements are zeros still: what is written through `.data` or NumPy leaves no trace in the version.

    Of pages that were touched, and elsewhere, this is one pass over the memory, of the three that dropping saves. Bits
    are added up as integers, the fastest sum.
    """
    import torch

    if address and gradient.data_ptr() == address and zero_pages.is_untouched(address, gradient.nbytes):
        return True
    flat, size = gradient.view(-1), gradient.element_size()
    if size * flat.numel() % 8 or size * flat.storage_offset() % 8:
        return not bool(flat.any())
    return not bool(flat.view(torch.int64).sum())


def _holders(gradient: Any) -> tuple[int, int, int]:
    """How many hold a gradient, from Python and from C++, and its memory; called in one way only."""
    import torch

    memory = gradient.untyped_storage()._cdata
    return sys.getrefcount(gradient), gradient._use_count(), torch._C._storage_Use_Count(memory)


def _fill(parameter: Any) -> None:
    """Make a parameter's gradient what it would have become by adding to zeros."""
    import torch

    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif parameter.grad.layout is not torch.strided:
        parameter.grad = torch.zeros_like(parameter).add_(parameter.grad)
