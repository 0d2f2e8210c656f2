"""Decide which parameters a fused kernel may update: it reads a parameter, its gradient and its states as flat memory.

`Guard.fit` inspects everything once, and remembers addresses, strides and dtypes. Later updates only compare with
those, by torch's C++ guards if it has them; a difference leads to a new inspection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NO_BUFFER = "momentum that only begins"
_NARROW = (torch.bfloat16, torch.float16)
_NUMBERS = (torch.float32, torch.float64, *_NARROW)
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_LOOK_AGAIN = 64  # number of updates after which parameters that were left to the ordinary update are inspected again

_stride, _pointer, _numel = torch.Tensor.stride, torch.Tensor.data_ptr, torch.Tensor.numel


@dataclass(frozen=True, slots=True)
class Fit:
    """The parameters of an update that a fused kernel may take.

    Attributes:
        chosen: Their indices; None means all.
        restride: Indices of gradients whose strides differ from their parameter's in dimensions of size 1 only: the
            same memory, but a GPU's kernels require equal strides.
        steps_elsewhere: Whether the kernel cannot read the step counters: they have another dtype, or are on the CPU
            while the parameters are on a GPU.
    """

    chosen: list[int] | None
    restride: list[int]
    steps_elsewhere: bool


class Guard:
    """Decide, update by update, which parameters of one group a fused kernel may take.

    The kernels walk over parameter, gradient and states in memory order, and assume that all have the same strides and
    no gaps. Tensors that have not (a gradient set by hand, a state from a checkpoint, a column of a larger tensor)
    would be updated with their neighbors' numbers, so they get the ordinary update. A full inspection is expensive; in
    most updates nothing has changed since the one before, and only that is verified.

    Args:
        devices: Types of the devices that have the kernel.
        kernel: Name of the kernel.

    Attributes:
        reasons: Why parameters were left to the ordinary update. The caller reports and clears them.
    """

    __slots__ = (
        *("_alike", "_devices", "_dtypes", "_fit", "_kernel", "_looks_left", "_numels", "_pointers", "_strides"),
        "reasons",
    )

    def __init__(self, devices: set[str], kernel: str) -> None:
        self._devices, self._kernel = devices, kernel
        self.reasons: set[str] = set()
        self._fit: Fit | None = None
        self._looks_left = 0  # updates until parameters that are not fused are inspected again
        self._alike: Any = None  # torch's C++ guards for the chosen tensors; None if it has none

    def fit(self, params: list[Any], grads: list[Any], states: list[list[Any]], steps: list[Any]) -> Fit:
        """Return the parameters that may be fused in this update.

        Args:
            params: Parameters with a gradient.
            grads: Their gradients.
            states: Lists of tensors of the parameters' sizes, one list per state; a list may be empty.
            steps: Step counters, one per parameter; or an empty list.
        """
        fit = self._fit
        if fit is not None and self._as_before(fit.chosen, params, grads, states, steps):
            if fit.chosen is not None:
                self._looks_left -= 1
                if not self._looks_left:
                    self._fit = None
            return fit
        return self._look(params, grads, [state for state in states if state], steps)

    def _as_before(
        self, chosen: list[int] | None, params: list[Any], grads: list[Any], states: list[list[Any]], steps: list[Any]
    ) -> bool:
        """Return whether addresses, strides, sizes and dtypes are those of the last inspection.

        Gradients may be new memory each step, so their addresses are not compared.
        """
        try:
            pointers = list(map(_pointer, params))
            for state in states:
                pointers += map(_pointer, state)
            pointers += map(_pointer, steps)
            if pointers != self._pointers:
                return False
            if chosen is not None:
                params, grads = [params[at] for at in chosen], [grads[at] for at in chosen]
            if self._alike is not None:
                return bool(self._alike.check(*params, *grads))
            strides = list(map(_stride, params))
            strides += map(_stride, grads)
            return (
                strides == self._strides
                and self._numels == list(map(_numel, grads))
                and self._dtypes == [grad.dtype for grad in grads]
                and _PLAIN.issuperset(map(type, grads))
            )
        except (RuntimeError, TypeError):  # a sparse gradient has no strides, a state that is None no address
            return False

    def _look(self, params: list[Any], grads: list[Any], states: list[list[Any]], steps: list[Any]) -> Fit:
        """Inspect everything, and remember it for `_as_before`."""
        columns = (params, *states, *((steps,) if steps else ()))
        shared = _sharing([tensor for column in columns for tensor in column])
        chosen, restride = [], []
        begins = False  # whether SGD's momentum buffers are created by this update
        for at, param in enumerate(params):
            if any(id(column[at]) in shared for column in columns):
                why = "parameters or states that share memory"
            elif param.device.type not in self._devices:
                why = f"parameters on {param.device.type}"
            elif self._kernel == "_fused_sgd_" and param.device.type == "cpu" and param.dtype in _NARROW:
                why = "parameters in 16 bits on a CPU"  # it skips most of them (pytorch/pytorch#191763, torch <= 2.13)
            else:
                why = _why_not(param, grads[at], [state[at] for state in states], steps[at] if steps else None)
            begins = begins or why == NO_BUFFER
            if why and why != NO_BUFFER:  # a missing buffer is no reason to report: the next update has it
                self.reasons.add(why)
            if not why:
                chosen.append(at)
                if grads[at].stride() != param.stride():
                    restride.append(at)
        elsewhere = any(
            steps[at].dtype is not torch.float32 or steps[at].device != params[at].device for at in chosen if steps
        )
        fit = Fit(None if len(chosen) == len(params) else chosen, restride, elsewhere)
        self._fit, self._looks_left = fit, _LOOK_AGAIN
        if begins or not self._remember(columns, grads, chosen):
            self._fit = None
        return fit

    def _remember(self, columns: tuple[list[Any], ...], grads: list[Any], chosen: list[int]) -> bool:
        """Store what `_as_before` compares with. Return False if a tensor has no address to compare."""
        try:
            self._pointers = [_pointer(tensor) for column in columns for tensor in column]
        except (RuntimeError, TypeError):  # a kind of tensor that has no memory of its own: inspected each time
            return False
        params, grads = [columns[0][at] for at in chosen], [grads[at] for at in chosen]
        self._alike = _guards_of([*params, *grads])
        self._strides = [*map(_stride, params), *map(_stride, grads)]
        self._numels, self._dtypes = list(map(_numel, params)), [param.dtype for param in params]
        return True


def _guards_of(tensors: list[Any]) -> Any:
    """Return torch's C++ check that other tensors have these tensors' class, kind, dtype, device, sizes and strides.

    Return None if this version of torch has none. Then the comparison is made in Python, which takes twice as long.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(tensor.size()) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards if guards.check(*tensors) else None
    except (ImportError, TypeError, AttributeError, RuntimeError):
        return None


def _why_not(param: Any, grad: Any, states: list[Any], step: Any) -> str:
    """Return why a fused kernel may not update a parameter; "" if it may."""
    if any(state is None for state in states):
        return NO_BUFFER
    tensors = [param, grad, *states]
    if not _PLAIN.issuperset(map(type, tensors)) or (step is not None and type(step) not in _PLAIN):
        return "tensors of other classes"
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "sparse gradients"
    if param.dtype not in _NUMBERS:
        return f"parameters of {param.dtype}"
    if not param.numel() or not _dense(param):
        return "parameters with gaps in their memory"
    for tensor in (grad, *states):
        if (tensor.dtype, tensor.device, tensor.shape) != (param.dtype, param.device, param.shape):
            return "gradients or states of another type than their parameter"
        if tensor.stride() != param.stride() and (tensor is not grad or _steps(grad) != _steps(param)):
            return "gradients or states with other strides than their parameter"
        if tensor.is_neg():
            return "gradients or states with a sign that is still to be applied"
    return ""


def _steps(tensor: Any) -> list[int]:
    """Return the strides of dimensions larger than 1: the others never move through memory."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _dense(tensor: Any) -> bool:
    """Return whether the elements fill one piece of memory without gaps or overlap, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _sharing(tensors: list[Any]) -> set[int]:
    """Return the ids of tensors whose memory overlaps another's, or that occur twice."""
    spans = sorted((str(tensor.device), *_span(tensor), id(tensor)) for tensor in tensors if _has_memory(tensor))
    shared: set[int] = set()
    furthest = ("", 0, 0, 0)  # of the spans so far on this device, the one with the highest end
    for span in spans:
        if span[0] == furthest[0] and span[1] < furthest[2]:
            shared |= {span[3], furthest[3]}
        if span[0] != furthest[0] or span[2] > furthest[2]:
            furthest = span
    return shared


def _has_memory(tensor: Any) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.numel() > 0


def _span(tensor: Any) -> tuple[int, int]:
    """Return the addresses at which a tensor begins and ends, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
