"""The technique `set_to_none`: drop gradients that a script fills with zeros, where the script cannot tell.

`zero_grad(set_to_none=False)` is wrapped to note which large gradients it has made zeros, and to replace their memory
by pages that take no time to fill (`zero_pages`). `backward` drops those that are zeros still, so that autograd stores
its gradient instead of adding to zeros, and puts zeros back for parameters that got no gradient.
"""

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
from hasten.techniques.replaced import ReplacedFunction

_LARGE = 1 << 20  # elements: smaller gradients are added in the CPU's cache, and allocating them costs as much
_Zeros = tuple[Any, Any, int, int]
"""Weak references to a parameter and to its gradient; the gradient's version when it became zeros; and the address of
its memory if that is untouched pages, else 0."""


class SetToNone(Technique):
    """Drop large gradients that `zero_grad(set_to_none=False)` filled with zeros when the backward begins.

    The backward then stores its own gradient instead of reading zeros and adding to them. The script still sees zeros,
    in memory that is filled only when somebody touches it (on Linux); parameters that get no gradient from the backward
    have zeros again after it. A gradient is dropped only if nothing but its parameter refers to it (no view of a flat
    buffer, no variable) and it still is zeros; none is dropped if there are hooks inside the backward, or custom
    autograd functions. What changes is the sign of some zeros: 0.0 + -0.0 is 0.0. Gradients on a GPU are left alone: to
    check that they still are zeros would wait for the GPU.
    """

    name = "set_to_none"
    effect = Effect.ROUNDING
    relieves = Resource.OPTIMIZER
    sources = ("Lin, tip 14", "Kuhn, tip 10")
    liveness = Liveness.STEP
    acts_on = "a gradient of 2^20 elements or more, on a CPU, that is filled with zeros"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it if the script fills gradients with zeros on a CPU, and all parameters get gradients."""
        if not evidence.flags.zeroed_gradients:
            return Refusal("gradients are set to None already, torch's default")
        if evidence.flags.missing_gradients:
            return Refusal("some parameters got no gradient in some step: zeros and None differ for them")
        if any(model.device == "cuda" for model in evidence.models):
            return Refusal("on a GPU, to see that gradients are zeros still would wait for it")
        return Choices((True,), f"gradients are filled with zeros at {evidence.flags.zeroed_gradients}")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._zeros: list[_Zeros] = []  # gradients that may be dropped
        self._unshared: tuple[int, int, int] = (0, 0, 0)  # `_holders` of a gradient that only its parameter refers to
        self._onlooker = ""  # what can see gradients inside the backward; "" for nothing
        self._functions = 0  # number of autograd functions when they were last inspected
        self._installed = False
        self._replaced: list[ReplacedFunction] = []

    def process(self) -> None:
        """Watch what `zero_grad` fills with zeros, and what can see gradients inside the backward."""
        import torch

        self._installed = True
        sample = torch.nn.Parameter(torch.zeros(1))
        sample.grad = torch.zeros(1)
        self._unshared = _holders(sample.grad)  # measured, since reference counts differ between versions of Python
        gradient_access.watch(self, SetToNone._looked)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._replaced.append(ReplacedFunction(owner, "zero_grad", self._noting))
            self._replaced[-1].put_in_place()

    def restore(self) -> None:
        """Restore torch's own functions."""
        self._installed, self._zeros = False, []
        gradient_access.leave(self)
        while self._replaced:
            self._replaced.pop().put_back()

    def on(self) -> None:
        """Drop gradients that are filled with zeros from now on."""
        super().on()
        if not self._installed:
            self.process()

    def off(self) -> None:
        """Drop no more gradients, not even those that are zeros now."""
        super().off()
        self._zeros = []

    def _looked(self, what: str) -> None:
        self._onlooker = what

    def _noting(self, plain: Any) -> Any:
        """Wrap `zero_grad` to note large gradients that it fills with zeros, and to give them untouched pages."""

        def zero_grad(this: Any, set_to_none: bool = True) -> None:
            if set_to_none or not self.active or self._onlooker:
                plain(this, set_to_none)
                return
            large = [
                parameter
                for parameter in _parameters(this)
                if parameter.numel() >= _LARGE and parameter.grad is not None
            ]
            pages = [(parameter, zeros) for parameter in large if (zeros := self._in_pages(parameter)) is not None]
            for parameter, _ in pages:
                parameter.grad = None  # so that the plain zero_grad has nothing to fill
            try:
                plain(this, set_to_none)
            finally:
                for parameter, zeros in pages:
                    parameter.grad = zeros
            self._note(large, {id(parameter) for parameter, _ in pages})

        return zero_grad

    def _in_pages(self, parameter: Any) -> Any:
        """Return zeros to replace a parameter's gradient; None if the gradient itself must be filled."""
        if not _as_new(parameter, parameter.grad) or _holders(parameter.grad) != self._unshared:
            return None
        return zero_pages.zeros_like(parameter)

    def _note(self, large: Iterable[Any], in_pages: set[int]) -> None:
        """Note the large gradients that are zeros now."""
        self._zeros = [zeros for zeros in self._zeros if zeros[1]() is not None]
        for parameter in large:
            if (gradient := parameter.grad) is not None and gradient.device.type == "cpu":
                address = gradient.data_ptr() if id(parameter) in in_pages else 0
                self._zeros.append((weakref.ref(parameter), weakref.ref(gradient), gradient._version, address))

    def backward(self, call: Call) -> Call:
        """Drop zeros before a backward, and put them back for parameters that got no gradient."""

        def dropping(*args: Any, **kwargs: Any) -> Any:
            if not self._zeros:
                return call(*args, **kwargs)
            noted, self._zeros = self._zeros, []
            if kwargs.get("create_graph") or (len(args) > 3 and args[3]) or self._is_watched():
                return call(*args, **kwargs)
            dropped = [parameter for zeros in noted if (parameter := self._dropped(*zeros)) is not None]
            if dropped and not self.acted:
                self.did("optimizer")
            try:
                return call(*args, **kwargs)
            finally:
                for parameter in dropped:
                    _fill(parameter)

        return dropping

    def _is_watched(self) -> bool:
        """Return whether the script can see gradients inside a backward. Once it can, zeros are never dropped again."""
        import torch

        if not self._onlooker:
            functions = torch.autograd.Function.__subclasses__()
            if len(functions) != self._functions:
                self._functions = len(functions)
                own = (kind.__name__ for kind in functions if not kind.__module__.startswith(("torch.", "hasten.")))
                self._onlooker = next(own, "")
        if self._onlooker:
            self.gave_up(f"{self._onlooker} can see gradients inside the backward")
        return bool(self._onlooker)

    def _dropped(self, parameter: Any, gradient: Any, version: int, address: int) -> Any:
        """Drop a parameter's gradient and return the parameter; None if it may not be zeros, or is shared."""
        parameter = parameter()
        if parameter is None or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return None
        if parameter.grad is None or parameter.grad is not gradient() or parameter.grad._version != version:
            return None
        if not _as_new(parameter, parameter.grad) or _holders(parameter.grad) != self._unshared:
            return None
        if not _is_zero(parameter.grad, address):
            return None
        parameter.grad = None
        return parameter


def _parameters(of: Any) -> Iterable[Any]:
    """Return the parameters of an optimizer or a module."""
    groups = getattr(of, "param_groups", None)
    return of.parameters() if groups is None else (parameter for group in groups for parameter in group["params"])


def _as_new(parameter: Any, gradient: Any) -> bool:
    """Return whether a backward would create a new gradient with this one's dtype, shape and strides."""
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
    """Return whether all elements are zeros still: a write through `.data` or NumPy does not change the version.

    For touched pages, and other memory, this is one pass over the memory, of the three that dropping saves. Bits are
    added as integers, the fastest sum.
    """
    import torch

    if address and gradient.data_ptr() == address and zero_pages.is_untouched(address, gradient.nbytes):
        return True
    flat, size = gradient.view(-1), gradient.element_size()
    if size * flat.numel() % 8 or size * flat.storage_offset() % 8:
        return not bool(flat.any())
    return not bool(flat.view(torch.int64).sum())


def _holders(gradient: Any) -> tuple[int, int, int]:
    """Return the numbers of references to a gradient from Python, from C++, and to its storage.

    Always call it as `_holders(parameter.grad)`: another way to pass the gradient adds a reference to the count.
    """
    import torch

    memory = gradient.untyped_storage()._cdata
    return sys.getrefcount(gradient), gradient._use_count(), torch._C._storage_Use_Count(memory)


def _fill(parameter: Any) -> None:
    """Make a parameter's gradient equal to the sum of zeros and what the backward brought."""
    import torch

    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif parameter.grad.layout is not torch.strided:
        parameter.grad = torch.zeros_like(parameter).add_(parameter.grad)
