"""Convolutions that compute channels last, while the script's tensors stay what they are without."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling

from hasten.data.code_references import codes_of
from hasten.techniques.compute.untraceable import methods_in, own_functions
from hasten.techniques.nested import tensors_in
from hasten.techniques.replaced import Replaced, plain_of

_LAST = torch.channels_last
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CONVOLUTIONS = ("conv2d", "conv_transpose2d")
# They give memory a second name. In a plain run an activation is contiguous, and this is the activation's own memory.
_RENAMES = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "contiguous", "as_strided"),
    # Parts and turned ones: what is written to one shows in the other, and random numbers are drawn in its order.
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "diagonal", "unfold", "unflatten"),
    *("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "squeeze", "unsqueeze"),
    *("expand", "expand_as", "detach"),
)
_RENAMES_OF_TENSORS = ("__getitem__", "__reduce_ex__")  # the last: pickled, as torch.save does
# They fill memory in its order: in another order, the same random numbers come to other elements.
_DRAWS = ("rand_like", "randn_like", "randint_like", "bernoulli", "poisson", "normal", "rrelu", "rrelu_")
_DRAWS_IN_PLACE = (
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
    "geometric_",
    "log_normal_",
    "cauchy_",
)
_DROPOUTS = ("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "native_dropout")

# In a forward these show how an activation lies: methods that are called (`self.stride` is a number of a layer's), and
# names by which operators are reached past the functions that are replaced.
_SHOWS = frozenset({"stride", "is_contiguous", "untyped_storage", "data_ptr", "set_", "storage"})
_PAST = frozenset({"aten", "vmap"})

_tracing = torch._C._get_tracing_state
_transforming = torch._C._are_functorch_transforms_active
_contiguous, _detach = torch.Tensor.contiguous, torch.Tensor.detach


class Layout:
    """The weights whose convolutions compute channels last.

    There is one in a process, since the functions that it replaces are the process's; torch's own are put back when
    it is cleared. Who has got hold of one of ours keeps it: they do nothing while there are no weights. Functions other
    than convolutions are replaced once a convolution lays something out: in compiled code none does, and a script's
    transforms, which call views and draws for each sample, are left to torch.

    Attributes:
        acts: Whether a convolution has laid out its input, so that activations may lie channels last.
    """

    def __init__(self) -> None:
        self.weights: dict[int, weakref.ref[Any]] = {}
        self.let_go: Callable[[str], None] = lambda why: None
        self.acts = False
        self._convolutions: list[Replaced] = []
        self._others: list[Replaced] = []

    def add(self, weights: list[Any], let_go: Callable[[str], None]) -> None:
        """Lay out what the convolutions with these weights read; `let_go` is told why, should that become unsafe."""
        if not self._convolutions:
            self._convolutions, self._others = _functions_of(self, _PLACES[:1]), _functions_of(self, _PLACES[1:])
        for function in self._convolutions:
            function.put_in_place()
        self.let_go = let_go
        for weight in weights:
            key = id(weight)
            self.weights[key] = weakref.ref(weight, lambda _, key=key: self.weights.pop(key, None))  # type: ignore[misc]

    def begin(self) -> None:
        """Mind the layout of activations from here on: a convolution is about to lay out the first."""
        self.acts = True
        for function in self._others:
            function.put_in_place()

    def clear(self) -> None:
        """Leave all convolutions alone from here on."""
        self.weights.clear()
        self.acts = False
        for function in (*self._convolutions, *self._others):
            function.put_back()

    def has(self, weight: Any) -> bool:
        """Whether a convolution's weight is one of them."""
        held = self.weights.get(id(weight))
        return held is not None and held() is weight


LAYOUT = Layout()


def lies_last(tensor: Any) -> bool:
    """Whether a tensor lies channels last, and not at the same time channels first."""
    return bool(
        tensor.layout is torch.strided
        and tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=_LAST)
    )


def why_it_shows(model: torch.nn.Module) -> str:
    """Return why a model's own code would see, or draw by, how its activations lie; "" if it does not.

    Functions that it holds by names of its own (`from torch import rand_like`) are torch's still when others are
    replaced; TorchScript calls operators by itself.
    """
    held = {
        id(plain_of(getattr(owner, name)))
        for owners, names, _ in _PLACES[1:]
        for owner in owners
        for name in names
        if hasattr(owner, name)
    }
    for function in own_functions(model):
        for code in codes_of(function.__code__):
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            if shows := min((methods_in(code) & _SHOWS) | (_PAST & set(code.co_names)), default=""):
                return f"its forward may tell how tensors lie in memory (`{shows}`, {where})"
            for name in code.co_names:
                value = function.__globals__.get(name)
                if id(value) in held:
                    return f"its forward calls torch's {name} by a name of its own ({where})"
                if isinstance(value, torch.jit.ScriptFunction):
                    return f"its forward calls TorchScript ({name}, {where})"
    return ""


def as_plain(tensor: Any) -> None:
    """Lay an activation out as a plain run has it: the same object with the same values and graph, channels first.

    It is done in place, so that all who hold it still see one memory. What autograd has saved of it keeps its own.
    """
    if type(tensor) is torch.Tensor and lies_last(tensor) and _is_activation(tensor):
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.data = _contiguous(_detach(tensor))


def _is_activation(tensor: Any) -> bool:
    """Whether nobody else relies on where a tensor lies: no view, no weight, not shared with other processes."""
    return not (
        tensor._base is not None
        or (tensor.requires_grad and tensor.is_leaf)
        or (tensor.device.type == "cpu" and tensor.is_shared())
    )


def outputs_as_plain(outputs: Any) -> None:
    """Lay out as a plain run has them what a model gives to the script."""
    if LAYOUT.weights and not _aside():
        for tensor in (outputs,) if isinstance(outputs, torch.Tensor) else tensors_in(outputs):
            as_plain(tensor)


def _aside() -> bool:
    """Whether what runs is read by a compiler or changed by a transform, whose own layouts are left alone."""
    return is_compiling() or _tracing() is not None or _transforming()


def _functions_of(layout: Layout, places: tuple[Any, ...]) -> list[Replaced]:
    return [
        Replaced(owner, name, functools.partial(change, layout))
        for owners, names, change in places
        for owner in owners
        for name in names
        if hasattr(owner, name)
    ]


def _laid_out(layout: Layout, plain: Any) -> Any:
    has, tensor = layout.has, torch.Tensor

    def convolve(input: Any, weight: Any, *args: Any, **options: Any) -> Any:
        if (
            not is_compiling()  # first: the compiler then reads no further
            and type(input) is tensor
            and has(weight)
            and input.dim() == 4
            and input.dtype in _FLOATS
            and input.layout is torch.strided
            and not _aside()
        ):
            if not layout.acts:
                layout.begin()
            input = _contiguous(input, memory_format=_LAST)  # as it is, where it lies so already
        return plain(input, weight, *args, **options)

    return convolve


def _renaming(layout: Layout, plain: Any) -> Any:
    tensor = torch.Tensor
    views = plain.__name__ in ("view", "view_as")

    def rename(*args: Any, **options: Any) -> Any:
        self = args[0] if args else options.get("input")
        if type(self) is not tensor or self.is_contiguous() or is_compiling() or not layout.weights or _aside():
            return plain(*args, **options)
        # What asks for a memory format, or for another number type, means the tensor as it lies.
        if options.get("memory_format", torch.contiguous_format) is torch.contiguous_format:
            as_plain(self)
        if not views or self.dim() < 3:
            return plain(*args, **options)
        try:
            return plain(*args, **options)
        except RuntimeError:  # made from an activation, or a part of it: contiguous in a plain run, so no error there
            return plain(_contiguous(self), *args[1:], **options)

    return rename


def _drawing(layout: Layout, plain: Any) -> Any:
    tensor = torch.Tensor
    drops = plain.__name__ in _DROPOUTS

    def draw(*args: Any, **options: Any) -> Any:
        if is_compiling() or not layout.weights:
            return plain(*args, **options)
        if args and type(args[0]) is tensor and not args[0].is_contiguous() and not _aside():
            if drops and len(args) > 2 and not args[2]:  # nothing is dropped in eval mode
                return plain(*args, **options)
            as_plain(args[0])
            if args[0].dim() in (3, 5) and args[0]._base is None:
                layout.let_go("random numbers are drawn for a tensor of which nobody can say how it lies without")
        return plain(*args, **options)

    return draw


_PLACES = (  # convolutions first
    ((torch.nn.functional,), _CONVOLUTIONS, _laid_out),
    ((torch.Tensor, torch), _RENAMES, _renaming),
    ((torch.Tensor,), _RENAMES_OF_TENSORS, _renaming),
    ((torch.Tensor, torch), (*_DRAWS, *_DRAWS_IN_PLACE), _drawing),
    ((torch._VF, torch), _DROPOUTS, _drawing),
)
