"""Checks what a fused kernel is handed: it reads a parameter, its gradient and its states as flat memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NO_BUFFER = "momentum that only begins"
_NARROW = (torch.bfloat16, torch.float16)
_NUMBERS = (torch.float32, torch.float64, *_NARROW)
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_LOOK_AGAIN = 64  # updates after which parameters that were left to the ordinary path are looked at again

_stride, _pointer, _numel = torch.Tensor.stride, torch.Tensor.data_ptr, torch.Tensor.numel


@dataclass(frozen=True, slots=True)
class Fit:
    """Which parameters of an update a fused kernel may be handed.

    Attributes:
        chosen: Their indices; None means all.
        restride: Indices of gradients whose strides differ in dimensions of size 1 only: the same memory, but a
            GPU's kernels ask for equal strides.
        steps_elsewhere: Counters that the kernel cannot read: in another number type, or on the CPU beside a GPU.
    """

    chosen: list[int] | None
    restride: list[int]
    steps_elsewhere: bool


class Guard:
    """Say, update by update, which parameters of one group a fused kernel may be handed.

    The kernels walk over parameter, gradient and states in the order of their memory, and take it that all have the
    same strides and no gaps. What does not (a gradient set by hand, a state of a checkpoint, a column of a larger
    tensor) would be updated with the numbers of its neighbors, so it goes the ordinary way. A look at all of it is
    expensive; in most updates everything lies where it lay in the one before, and only that is compared.

    Args:
        devices: Types of the devices that have the kernel.
        kernel: Its name.

    Attributes:
        reasons: Why parameters were left to the ordinary way.
    """

    __slots__ = (
        *("_alike", "_devices", "_dtypes", "_fit", "_kernel", "_looks_left", "_numels", "_pointers", "_strides"),
        "reasons",
    )

    def __init__(self, devices: set[str], kernel: str) -> None:
        self._devices, self._kernel = devices, kernel
        self.reasons: set[str] = set()
        self._fit: Fit | None = None
        self._looks_left = 0
        self._alike: Any = None

    def fit(self, params: list[Any], grads: list[Any], states: list[list[Any]], steps: list[Any]) -> Fit:
        """Return which parameters may be fused in this update.

        Args:
            params: Parameters with a gradient.
            grads: Their gradients.
            states: Lists of tensors as large as their parameters, one for each; or empty lists.
            steps: The numbers of updates made, one for each parameter; or an empty list.
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
        except (RuntimeError, TypeError):  # a sparse gradient has no strides, a state that is None no pointer
            return False

    def _look(self, params: list[Any], grads: list[Any], states: list[list[Any]], steps: list[Any]) -> Fit:
        columns = (params, *states, *((steps,) if steps else ()))
        shared = _sharing([one for column in columns for one in column])
        chosen, restride = [], []
        begins = False
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
            if why and why != NO_BUFFER:
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
        try:
            self._pointers = [_pointer(one) for column in columns for one in column]
        except (RuntimeError, TypeError):  # of a kind that has no memory of its own: looked at each time
            return False
        params, grads = [columns[0][at] for at in chosen], [grads[at] for at in chosen]
        self._alike = _guards_of([*params, *grads])
        self._strides = [*map(_stride, params), *map(_stride, grads)]
        self._numels, self._dtypes = list(map(_numel, params)), [param.dtype for param in params]
        return True


def _guards_of(tensors: list[Any]) -> Any:
    """torch's own comparison, in C++, of class, kind, dtype, device, sizes and strides with those of these tensors.

    None where this torch has none: then it is done tensor by tensor here, which takes twice as long.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(one.size()) for one in tensors]
        strides: Any = [list(one.stride()) for one in tensors]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return guards if guards.check(*tensors) else None
    except (ImportError, TypeError, AttributeError, RuntimeError):
        return None


def _why_not(param: Any, grad: Any, states: list[Any], step: Any) -> str:
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
            return "gradients or states that lie otherwise in memory than their parameter"
        if tensor.is_neg():
            return "gradients or states with a sign that is still to be applied"
    return ""


def _steps(tensor: Any) -> list[int]:
    """The strides that are ever used."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _dense(tensor: Any) -> bool:
    """Whether the elements fill one piece of memory, in whatever order, each with a place of its own."""
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
    """Return the ids of tensors whose memory overlaps that of another, or that are there twice."""
    spans = sorted((str(one.device), *_span(one), id(one)) for one in tensors if _has_memory(one))
    shared: set[int] = set()
    furthest = ("", 0, 0, 0)
    for span in spans:
        if span[0] == furthest[0] and span[1] < furthest[2]:
            shared |= {span[3], furthest[3]}
        if span[0] != furthest[0] or span[2] > furthest[2]:
            furthest = span
    return shared


def _has_memory(tensor: Any) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.numel() > 0


def _span(tensor: Any) -> tuple[int, int]:
    """Where in memory a tensor begins and ends, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
