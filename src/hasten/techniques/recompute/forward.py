"""A forward that keeps no activations: its backward recomputes them, bit by bit the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_iter

from hasten import messages
from hasten.techniques import float32_draws
from hasten.techniques.recompute.costs import Meter
from hasten.techniques.recompute.outside_state import CannotRepeatError, Known, Then

_MARKED_ON_GPU = 8  # first forwards of a module whose tensors are compared on a GPU, which waits for it; then 1 of ...
_EVERY = 64
_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Not the names in torch.Tensor: under channels_last these lay a tensor out as without before a script sees it.
_detach, _view, _permute = torch._C.TensorBase.detach, torch._C.TensorBase.view, torch._C.TensorBase.permute

# Called with True before a forward is run again, and behind it with what it returned: the taps on modules set
# theirs, so that the modules inside are not taken for outermost ones.
tell_inside: list[Callable[[bool], bool]] = []


class Repeatable:
    """A module's forwards, each of which keeps what cannot be computed again, and drops the rest.

    Args:
        technique: The name of the technique, for messages.
        left_alone: Told why a forward keeps its activations.
        asked: Told when a backward reaches a forward of the module.
        or_else: What else may be done where a forward cannot be repeated, behind "Take ... out of the plan".
        waits: The first forwards keep all until their end, when it is known whether they can be repeated; behind so
            many, what can be computed again is dropped at once. None: all wait.
        with_hooks: Whether the module's own hooks are a part of the forward.
        meter: Told what a forward drops and how long it takes to compute that again; None: nobody asks.
    """

    def __init__(
        self,
        technique: str,
        left_alone: Callable[[str], None],
        asked: Callable[[], None],
        or_else: str = ".",
        waits: int | None = None,
        with_hooks: bool = False,
        meter: Meter | None = None,
    ) -> None:
        self.with_hooks = with_hooks
        self.meter = meter
        self.technique, self.or_else, self.waits = technique, or_else, waits
        self.left_alone = left_alone
        self.asked = asked
        self.known: Known | None = None
        self.calls = 0

    @property
    def is_pure(self) -> bool:
        """Whether forwards so far drew from torch's generators alone and changed no buffers but BatchNorm's."""
        known = self.known
        if known is None or known.refusal or known.changing is None:
            return False
        return not (known.changing or known.drawn.python or known.drawn.numpy)

    def run(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward; plain where it could not be repeated."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or torch._C._is_tracing():
            return forward(*args, **kwargs)  # somebody else decides what is kept
        if torch._C._are_functorch_transforms_active():
            return forward(*args, **kwargs)  # tensors without memory, of a graph that is none of autograd's
        if torch._C._len_torch_dispatch_stack() or _sees_functions():
            return forward(*args, **kwargs)  # a mode of the script's sees, or changes, each operation
        try:
            if self.known is None:
                self.known = Known(module, self.with_hooks)
            then = Then(self.known, module, (args, kwargs))
        except CannotRepeatError as error:
            self.left_alone(str(error))
            return forward(*args, **kwargs)
        self.calls += 1
        return _KeptForward(self, module, forward, args, kwargs, then).run()


class _Kept:
    """Stands in the graph for a tensor: the tensor itself, or nothing."""

    __slots__ = ("number", "tensor", "version")

    def __init__(self, number: int, tensor: Any) -> None:
        self.number = number
        self.tensor = tensor
        self.version = tensor._version


class _Enough(BaseException):  # no error; a script's `except Exception` must not stop it
    """All that was dropped has been computed again."""


class _KeptForward:
    """One forward, and what its graph needs to have it run again."""

    def __init__(self, owner: Repeatable, module: Any, forward: Any, args: Any, kwargs: Any, then: Then) -> None:
        self.owner, self.module, self.forward = owner, module, forward
        self.args, self.kwargs, self.then = args, kwargs, then
        self.casts = _casts()
        self.kept: list[_Kept] = []
        self.count = 0
        self.dropped: dict[int, tuple[Any, Any]] = {}  # number of a tensor that is not kept -> its shape and type
        self.marks: dict[int, tuple[tuple[int, ...], Any]] = {}  # strides and sums of those
        self.marks_gpu = owner.calls <= _MARKED_ON_GPU or owner.calls % _EVERY == 0
        self.fresh: dict[int, Any] = {}
        self.waits = owner.waits is None or owner.calls <= owner.waits
        self.over = False
        self.spoilt = ""  # why it cannot be repeated, found out too late

    def run(self) -> Any:
        """Run it the first time."""
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                output = self.forward(*self.args, **self.kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self.then.put_back()  # torch.func's transforms refuse them: from the start, without
            self.owner.left_alone("it uses torch.func inside")
            return self.forward(*self.args, **self.kwargs)
        self.over = True
        reason = self.then.after() or self.spoilt
        if not reason and any(kept.tensor._version != kept.version for kept in self.kept):
            reason = "its forward changes what the backward needs"
        if reason:
            self.spoilt = reason
            self.owner.left_alone(reason)
        else:
            tensors = [kept.tensor for kept in self.kept] if self.owner.meter is not None else []
            for kept in self.kept:
                self._drop(kept)
            if self.owner.meter is not None:
                self._measure(self.owner.meter, tensors, output)
            self.kept = []
        return output

    def _measure(self, meter: Meter, tensors: list[Any], output: Any) -> None:
        """Tell how much of what the graph asked for was let go; what the block returns lives on as an input."""
        gone = [tensor for kept, tensor in zip(self.kept, tensors, strict=True) if kept.tensor is None]
        plain = (one for one in tree_iter(output) if type(one) is torch.Tensor and one.layout is torch.strided)
        meter.forward(gone, self.then.storages | {one.untyped_storage().data_ptr() for one in plain})

    # -- what autograd calls ----------------------------------------------------------------------------

    def _pack(self, tensor: Any) -> _Kept:
        # Detached: an output that a graph keeps would keep the graph in turn.
        kept = _Kept(self.count, _detach(tensor))
        self.count += 1
        if self.waits:
            self.kept.append(kept)
        else:
            self._drop(kept)
        return kept

    def _unpack(self, kept: _Kept) -> Any:
        if self.over:
            self.owner.asked()
        else:
            self.spoilt = "its forward asks for gradients"
        if kept.tensor is not None:
            _check_version(kept)
            return kept.tensor
        if kept.number not in self.fresh:
            if self.owner.meter is None:
                self._run_again()
            else:
                with self.owner.meter.again():
                    self._run_again()
        return self.fresh.pop(kept.number)

    # -- dropping, and computing again ------------------------------------------------------------------

    def _drop(self, kept: _Kept) -> None:
        """Let go of what the forward made; what exists anyway (weights, inputs) stays."""
        tensor = kept.tensor
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.numel() < 2:
            return
        if tensor.device.type == "meta" or tensor.untyped_storage().data_ptr() in self.then.storages:
            return
        self.dropped[kept.number] = tensor.shape, tensor.dtype
        if not tensor.is_cuda or self.marks_gpu:
            self.marks[kept.number] = tensor.stride(), _mark(tensor)
        kept.tensor = None

    def _run_again(self) -> None:
        """Compute all that was dropped, with everything as it was then.

        Raises:
            RuntimeError: It cannot be, or other numbers came out.
        """
        if self.spoilt:
            raise self._error(self.spoilt)
        if name := self.then.changed():
            raise self._error(f"{name} was changed between the forward and its backward")
        try:
            now = self.then.again(self.module, (self.args, self.kwargs))
        except CannotRepeatError as error:
            raise self._error(str(error)) from error
        before = [tell(True) for tell in tell_inside]
        self.count = 0
        self.fresh = {}
        try:
            self.then.put_back()
            with torch.enable_grad(), self.casts(), saved_tensors_hooks(self._take, _give):
                self.forward(*self.args, **self.kwargs)
        except _Enough:
            pass
        except CannotRepeatError as error:
            raise self._error(str(error)) from error
        finally:
            moved = self.then.moved_unseen()
            now.put_back()
            for tell, inside in zip(tell_inside, before, strict=True):
                tell(inside)
        if moved or len(self.fresh) != len(self.dropped):
            raise self._error("its forward took another course when it ran again")
        self._compare()

    def _take(self, tensor: Any) -> Any:
        number, self.count = self.count, self.count + 1
        tensor = _detach(tensor)
        if (expected := self.dropped.get(number)) is not None:
            if expected != (tensor.shape, tensor.dtype):
                raise self._error("tensors of other shapes or types came out when its forward ran again")
            self.fresh[number] = tensor
            if len(self.fresh) == len(self.dropped):
                raise _Enough
        return tensor

    def _compare(self) -> None:
        """What none of the above sees (a patched function, memory written behind torch's back) shows here."""
        fresh = ((mark, _lying_as(strides, self.fresh[number])) for number, (strides, mark) in self.marks.items())
        if not all(_agree(mark, _mark(tensor)) for mark, tensor in fresh):
            raise self._error("other numbers came out when its forward ran again")

    def _error(self, reason: str) -> RuntimeError:
        self.fresh = {}
        name, kind = self.owner.technique, type(self.module).__name__
        message = (
            f"hasten: {name}: the activations of {kind} cannot be computed again: {reason}. No gradient was made of "
            f"it. Take {name} out of the plan" + self.owner.or_else
        )
        messages.tell(message)  # a script that skips batches by their errors would hide it
        return RuntimeError(message)


def _sees_functions() -> bool:
    """Whether a function mode is on, but for that of `torch.set_default_device`."""
    count = torch._C._len_torch_function_stack()
    return any(type(torch._C._get_function_stack_at(place)) is not DeviceContext for place in range(count))


def _give(tensor: Any) -> Any:
    return tensor


def _check_version(kept: _Kept) -> None:
    tensor = kept.tensor
    if tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {kept.version} "
            "instead"
        )


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    """A sum that tells whether a tensor is the same: of its bits on a CPU, of its numbers on a GPU.

    (There the order of additions may differ from run to run.) Images are read as they lie: channel by channel, a sum
    of them channels last takes five to thirty times as long, and a validation by it four times.
    """
    if tensor.is_cuda:
        wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
        return torch.stack((wide.sum(), wide.abs().sum()))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = _permute(tensor, (0, 2, 3, 1))
    if tensor.is_contiguous() and _in_words(tensor):
        return _view(tensor, torch.int64).sum()  # four times as fast
    return _view(tensor, _BYTES[tensor.element_size()]).sum()


def _lying_as(strides: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with these strides, by which its sum goes: `channels_last` may have been switched in between."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _in_words(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    return size * tensor.shape[-1] % 8 == 0 and size * tensor.storage_offset() % 8 == 0


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point():
        same = (one - other).abs() <= 1e-5 * one[1].abs()
        return bool((same | (one.isnan() & other.isnan())).all())
    return torch.equal(one, other)


def _casts() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Autocast, and the type in which random numbers are drawn, as they stand now: to be entered again."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    states = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    cached = torch.is_autocast_cache_enabled()
    draws = float32_draws.as_now()

    @contextlib.contextmanager
    def casts() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in states:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cached))
            stack.enter_context(draws())
            yield

    return casts
