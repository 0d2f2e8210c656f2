"""Run forwards that keep no activations, and recompute them in the backward, bit by bit the same.

Saved-tensor hooks number the tensors that autograd saves, and drop those that the forward made itself. Before the
forward, `ForwardState` saves all state that it may read (`outside_state.py`). When the backward asks for a dropped
tensor, that state is restored, the forward runs again under other hooks, which collect the tensors by their numbers,
and the present state is restored. Sums of the tensors before and after are compared (on a GPU, in some forwards only):
a difference ends in an error, never in a wrong gradient.
"""

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
from hasten.techniques.recompute.costs import BlockMeter
from hasten.techniques.recompute.outside_state import CannotRepeatError, ForwardState, ModuleKnowledge

# On a GPU, comparing sums waits for the GPU. So it is done for a module's first 8 forwards, then for one in 64.
_MARKED_ON_GPU = 8
_MARKED_EVERY = 64
_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# The base class's methods, not torch.Tensor's: channels_last replaces those, to make a tensor contiguous first.
_detach, _view, _permute = torch._C.TensorBase.detach, torch._C.TensorBase.view, torch._C.TensorBase.permute

# Each is called with True before a forward is repeated, and with the value that it returned after the repetition. The
# taps on modules add theirs, so that modules inside the block are not mistaken for outermost ones.
tell_inside: list[Callable[[bool], bool]] = []


class Repeatable:
    """The repeatable forwards of a module: each drops the activations that can be recomputed, and keeps the rest.

    Args:
        technique: Name of the technique, for messages.
        left_alone: Called with the reason when a forward keeps its activations.
        on_backward: Called when a backward reaches a forward of the module.
        or_else: What else a user can do if a forward cannot be repeated; it follows "Take ... out of the plan".
        waits: Number of first forwards that keep all activations until their end, when it is known whether they can be
            repeated; later forwards drop activations at once. None: all wait.
        with_hooks: Whether the module's own hooks are a part of the forward.
        meter: Measures how much each forward drops and how long recomputing takes; None measures nothing.
    """

    def __init__(
        self,
        technique: str,
        left_alone: Callable[[str], None],
        on_backward: Callable[[], None],
        or_else: str = ".",
        waits: int | None = None,
        with_hooks: bool = False,
        meter: BlockMeter | None = None,
    ) -> None:
        self.with_hooks = with_hooks
        self.meter = meter
        self.technique, self.or_else, self.waits = technique, or_else, waits
        self.left_alone = left_alone
        self.on_backward = on_backward
        self.knowledge: ModuleKnowledge | None = None
        self.calls = 0

    @property
    def is_pure(self) -> bool:
        """Whether all forwards so far drew from torch's generators only, and changed no buffers but BatchNorm's."""
        knowledge = self.knowledge
        if knowledge is None or knowledge.refusal or knowledge.changing is None:
            return False
        return not (knowledge.changing or knowledge.generator_use.python or knowledge.generator_use.numpy)

    def run(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, plainly if it cannot be repeated."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or torch._C._is_tracing():
            return forward(*args, **kwargs)  # another saved-tensor hook, or a tracer, decides what is kept
        if torch._C._are_functorch_transforms_active():
            return forward(*args, **kwargs)  # torch.func's tensors have no memory, and its graph is not autograd's
        if torch._C._len_torch_dispatch_stack() or _sees_functions():
            return forward(*args, **kwargs)  # a mode of the script sees, or changes, each operation
        try:
            if self.knowledge is None:
                self.knowledge = ModuleKnowledge(module, self.with_hooks)
            start_state = ForwardState(self.knowledge, module, (args, kwargs))
        except CannotRepeatError as error:
            self.left_alone(str(error))
            return forward(*args, **kwargs)
        self.calls += 1
        return _RepeatableForward(self, module, forward, args, kwargs, start_state).run()


class _SavedTensor:
    """Stand-in for a saved tensor in the graph: it holds the tensor, or None once that is dropped."""

    __slots__ = ("number", "tensor", "version")

    def __init__(self, number: int, tensor: Any) -> None:
        self.number = number
        self.tensor = tensor
        self.version = tensor._version


# A BaseException, so that a script's `except Exception` does not catch it.
class _AllRecomputed(BaseException):
    """Signal that ends a repetition: all dropped tensors have been recomputed."""


class _RepeatableForward:
    """One forward, with everything that its graph needs to repeat it.

    Attributes:
        waiting: Saved tensors, while the forward waits for its end.
        count: Number of the next tensor that autograd saves.
        dropped: Number of a dropped tensor -> its shape and dtype.
        marks: Number of a dropped tensor -> its strides and its sum, to compare.
        recomputed: Number of a dropped tensor -> the recomputed tensor, until the graph takes it.
        ended: Whether the forward has ended.
        spoilt: Why the forward cannot be repeated, found out after tensors were dropped; "" if it can.
    """

    def __init__(
        self, owner: Repeatable, module: Any, forward: Any, args: Any, kwargs: Any, start_state: ForwardState
    ) -> None:
        self.owner, self.module, self.forward = owner, module, forward
        self.args, self.kwargs, self.start_state = args, kwargs, start_state
        self.casts = _casts()
        self.waiting: list[_SavedTensor] = []
        self.count = 0
        self.dropped: dict[int, tuple[Any, Any]] = {}
        self.marks: dict[int, tuple[tuple[int, ...], Any]] = {}
        self.marks_gpu = owner.calls <= _MARKED_ON_GPU or owner.calls % _MARKED_EVERY == 0
        self.recomputed: dict[int, Any] = {}
        self.waits = owner.waits is None or owner.calls <= owner.waits
        self.ended = False
        self.spoilt = ""

    def run(self) -> Any:
        """Run the forward the first time, and drop what can be recomputed."""
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                output = self.forward(*self.args, **self.kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            # torch.func's transforms refuse saved-tensor hooks: restore the state and start again, without hooks.
            self.start_state.put_back()
            self.owner.left_alone("it uses torch.func inside")
            return self.forward(*self.args, **self.kwargs)
        self.ended = True
        reason = self.start_state.after() or self.spoilt
        if not reason and any(saved.tensor._version != saved.version for saved in self.waiting):
            reason = "its forward changes what the backward needs"
        if reason:
            self.spoilt = reason
            self.owner.left_alone(reason)
        else:
            tensors = [saved.tensor for saved in self.waiting] if self.owner.meter is not None else []
            for saved in self.waiting:
                self._drop(saved)
            if self.owner.meter is not None:
                self._measure(self.owner.meter, tensors, output)
            self.waiting = []
        return output

    def _measure(self, meter: BlockMeter, tensors: list[Any], output: Any) -> None:
        """Tell the meter which tensors were dropped. The block's outputs do not count: they live on as inputs."""
        dropped = [tensor for saved, tensor in zip(self.waiting, tensors, strict=True) if saved.tensor is None]
        plain = (leaf for leaf in tree_iter(output) if type(leaf) is torch.Tensor and leaf.layout is torch.strided)
        meter.forward(dropped, self.start_state.storages | {leaf.untyped_storage().data_ptr() for leaf in plain})

    # -- what autograd calls ----------------------------------------------------------------------------

    def _pack(self, tensor: Any) -> _SavedTensor:
        """Take a tensor that autograd saves, and drop it now or at the end of the forward."""
        # Detached, because an output that is saved in its own graph would keep that graph alive.
        saved = _SavedTensor(self.count, _detach(tensor))
        self.count += 1
        if self.waits:
            self.waiting.append(saved)
        else:
            self._drop(saved)
        return saved

    def _unpack(self, saved: _SavedTensor) -> Any:
        """Return a saved tensor to the backward. The first that was dropped makes the forward run again."""
        if self.ended:
            self.owner.on_backward()
        else:  # a backward inside the forward, as of `torch.autograd.grad` for a penalty
            self.spoilt = "its forward asks for gradients"
        if saved.tensor is not None:
            _check_version(saved)
            return saved.tensor
        if saved.number not in self.recomputed:
            if self.owner.meter is None:
                self._run_again()
            else:
                with self.owner.meter.again():
                    self._run_again()
        return self.recomputed.pop(saved.number)

    # -- dropping, and recomputing ----------------------------------------------------------------------

    def _drop(self, saved: _SavedTensor) -> None:
        """Drop a tensor that the forward made. Weights and inputs exist anyway, so they are kept."""
        tensor = saved.tensor
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.numel() < 2:
            return
        if tensor.device.type == "meta" or tensor.untyped_storage().data_ptr() in self.start_state.storages:
            return
        self.dropped[saved.number] = tensor.shape, tensor.dtype
        if not tensor.is_cuda or self.marks_gpu:
            self.marks[saved.number] = tensor.stride(), _mark(tensor)
        saved.tensor = None

    def _run_again(self) -> None:
        """Recompute all dropped tensors, with all state as it was in the forward.

        Raises:
            RuntimeError: The forward cannot be repeated, or gave other numbers.
        """
        if self.spoilt:
            raise self._error(self.spoilt)
        if name := self.start_state.changed():
            raise self._error(f"{name} was changed between the forward and its backward")
        try:
            present = self.start_state.again(self.module, (self.args, self.kwargs))
        except CannotRepeatError as error:
            raise self._error(str(error)) from error
        inside_before = [tell(True) for tell in tell_inside]
        self.count = 0
        self.recomputed = {}
        try:
            self.start_state.put_back()
            with torch.enable_grad(), self.casts(), saved_tensors_hooks(self._take, _give):
                self.forward(*self.args, **self.kwargs)
        except _AllRecomputed:
            pass
        except CannotRepeatError as error:
            raise self._error(str(error)) from error
        finally:
            moved = self.start_state.moved_unseen()
            present.put_back()
            for tell, inside in zip(tell_inside, inside_before, strict=True):
                tell(inside)
        if moved or len(self.recomputed) != len(self.dropped):
            raise self._error("its forward took another course when it ran again")
        self._compare()

    def _take(self, tensor: Any) -> Any:
        """Collect a recomputed tensor, by the order in which autograd saves; the last one ends the repetition."""
        number, self.count = self.count, self.count + 1
        tensor = _detach(tensor)
        if (expected := self.dropped.get(number)) is not None:
            if expected != (tensor.shape, tensor.dtype):
                raise self._error("tensors of other shapes or types came out when its forward ran again")
            self.recomputed[number] = tensor
            if len(self.recomputed) == len(self.dropped):
                raise _AllRecomputed
        return tensor

    def _compare(self) -> None:
        """Compare the recomputed tensors' sums with those of the forward.

        This catches changes that no other test sees: a patched function, memory written without torch's knowledge.

        Raises:
            RuntimeError: They differ.
        """
        recomputed = (
            (mark, _lying_as(strides, self.recomputed[number])) for number, (strides, mark) in self.marks.items()
        )
        if not all(_agree(mark, _mark(tensor)) for mark, tensor in recomputed):
            raise self._error("other numbers came out when its forward ran again")

    def _error(self, reason: str) -> RuntimeError:
        """Return the error of a backward that cannot be computed, after telling the user."""
        self.recomputed = {}
        name, kind = self.owner.technique, type(self.module).__name__
        message = (
            f"hasten: {name}: the activations of {kind} cannot be computed again: {reason}. No gradient was made of "
            f"it. Take {name} out of the plan" + self.owner.or_else
        )
        messages.tell(message)  # a script that skips batches by their errors would hide it
        return RuntimeError(message)


def _sees_functions() -> bool:
    """Return whether a function mode is on, other than that of `torch.set_default_device`."""
    count = torch._C._len_torch_function_stack()
    return any(type(torch._C._get_function_stack_at(place)) is not DeviceContext for place in range(count))


def _give(tensor: Any) -> Any:
    return tensor


def _check_version(saved: _SavedTensor) -> None:
    """Raise torch's error for a saved tensor that was changed in place; autograd does not check hooks' tensors."""
    tensor = saved.tensor
    if tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {saved.version} "
            "instead"
        )


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum that tells whether a tensor is the same: of its bits on a CPU, of its values on a GPU.

    On a GPU the order of additions, and thus the last bits, may differ from run to run. Images are summed in memory
    order: channel by channel, a sum of images in channels last takes five to thirty times as long, and made a
    validation take four times as long.
    """
    if tensor.is_cuda:
        wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
        return torch.stack((wide.sum(), wide.abs().sum()))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = _permute(tensor, (0, 2, 3, 1))
    if tensor.is_contiguous() and _in_words(tensor):
        # Four times as fast as with the element's own width. Flat, since strides of dimensions of size 1 may be odd.
        return _view(_view(tensor, -1), torch.int64).sum()
    return _view(tensor, _BYTES[tensor.element_size()]).sum()


def _lying_as(strides: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the given strides, since sums depend on them.

    They differ if the technique `channels_last` was switched between the forward and the repetition.
    """
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _in_words(tensor: torch.Tensor) -> bool:
    """Return whether a contiguous tensor's memory can be viewed as 64-bit words."""
    size = tensor.element_size()
    return size * tensor.numel() % 8 == 0 and size * tensor.storage_offset() % 8 == 0


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two marks agree: bit sums exactly, sums of values (on a GPU) to 1e-5 of the absolute sum."""
    if one.is_floating_point():
        same = (one - other).abs() <= 1e-5 * one[1].abs()
        return bool((same | (one.isnan() & other.isnan())).all())
    return torch.equal(one, other)


def _casts() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a context that restores the present autocast settings and the dtype in which random numbers are drawn."""
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
