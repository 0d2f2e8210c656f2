"""Run convolutions in channels last, while the script's tensors keep the layout that they have without it.

`torch.nn.functional`'s convolutions are replaced by wrappers that convert the input, for a set of weights only. Their
outputs, and what elementwise layers make of them, are then channels last too. Wherever that could show, wrappers around
other functions of torch first convert the activation back, in place: before a view, since it would have other strides;
before a draw, since the same random numbers would come to other elements. Invariant: a tensor that the script can
inspect, or whose memory has a second name, is contiguous as in a plain run.
"""

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
from hasten.techniques.replaced import ReplacedFunction, plain_of

_LAST = torch.channels_last
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CONVOLUTIONS = ("conv2d", "conv_transpose2d")
# Functions that give memory a second name. In a plain run an activation is contiguous, and these return its own memory;
# in channels last some would copy instead.
_RENAMES = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "contiguous", "as_strided"),
    # Parts and transposes: writes to one show in the other, and random numbers are drawn in the order of their memory.
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "diagonal", "unfold", "unflatten"),
    *("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "squeeze", "unsqueeze"),
    *("expand", "expand_as", "detach"),
)
_RENAMES_OF_TENSORS = ("__getitem__", "__reduce_ex__")  # __reduce_ex__: pickled, as by torch.save
# Functions that draw random numbers in memory order: in another layout the same numbers come to other elements.
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

# Names in a forward's code that reveal an activation's layout. Of _SHOWS only calls count (`self.stride` is a layer's
# number, `x.stride()` a tensor's layout). Names in _PAST lead to operators past the functions that are replaced.
_SHOWS = frozenset({"stride", "is_contiguous", "untyped_storage", "data_ptr", "set_", "storage"})
_PAST = frozenset({"aten", "vmap"})

_tracing = torch._C._get_tracing_state
_transforming = torch._C._are_functorch_transforms_active
_contiguous, _detach = torch.Tensor.contiguous, torch.Tensor.detach  # torch's own, taken before they are replaced


class Layout:
    """The weights whose convolutions run in channels last, and the wrappers around torch's functions.

    There is one object per process, since the functions that it replaces are global; `clear` restores torch's own. A
    script may have kept one of the wrappers: these do nothing while there are no weights. Functions other than
    convolutions are replaced only when a convolution converts an input for the first time. Thus compiled code, which
    never does, and a script's transforms before the first forward, which call views and draws for each sample, use
    torch's own.

    Attributes:
        acts: Whether a convolution has converted an input, so that activations may be in channels last.
    """

    def __init__(self) -> None:
        self.weights: dict[int, weakref.ref[Any]] = {}
        self.give_up: Callable[[str], None] = lambda why: None
        self.acts = False
        self._convolutions: list[ReplacedFunction] = []
        self._others: list[ReplacedFunction] = []

    def add(self, weights: list[Any], give_up: Callable[[str], None]) -> None:
        """Convert the inputs of convolutions with these weights; call `give_up` with the reason once that is unsafe."""
        if not self._convolutions:
            self._convolutions, self._others = _functions_of(self, _PLACES[:1]), _functions_of(self, _PLACES[1:])
        for function in self._convolutions:
            function.put_in_place()
        self.give_up = give_up
        for weight in weights:
            key = id(weight)
            self.weights[key] = weakref.ref(weight, lambda _, key=key: self.weights.pop(key, None))  # type: ignore[misc]

    def begin(self) -> None:
        """Replace the other functions as well: a convolution is about to convert the first activation."""
        self.acts = True
        for function in self._others:
            function.put_in_place()

    def clear(self) -> None:
        """Stop converting, and restore torch's functions."""
        self.weights.clear()
        self.acts = False
        for function in (*self._convolutions, *self._others):
            function.put_back()

    def has(self, weight: Any) -> bool:
        """Return whether convolutions with this weight run in channels last."""
        ref = self.weights.get(id(weight))
        return ref is not None and ref() is weight


LAYOUT = Layout()


def lies_last(tensor: Any) -> bool:
    """Return whether a tensor is in channels last and not contiguous too, as with a single channel it is both."""
    return bool(
        tensor.layout is torch.strided
        and tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=_LAST)
    )


def why_it_shows(model: torch.nn.Module) -> str:
    """Return why a model's own code would notice the layout of its activations; "" if it would not.

    Functions imported by name (`from torch import rand_like`) remain torch's own when the attributes of `torch` are
    replaced, and TorchScript calls operators directly: neither would convert activations back.
    """
    replaced_ids = {
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
                return f"its forward may observe the memory format of tensors (`{shows}`, {where})"
            for name in code.co_names:
                value = function.__globals__.get(name)
                if id(value) in replaced_ids:
                    return f"its forward calls torch's {name} by a name of its own ({where})"
                if isinstance(value, torch.jit.ScriptFunction):
                    return f"its forward calls TorchScript ({name}, {where})"
    return ""


def as_plain(tensor: Any) -> None:
    """Make an activation contiguous, as in a plain run, in place: the same object with the same values and graph.

    In place, so that everybody who holds the tensor still shares one memory. What autograd has saved of the activation
    keeps the former memory.
    """
    if type(tensor) is torch.Tensor and lies_last(tensor) and _is_activation(tensor):
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            tensor.data = _contiguous(_detach(tensor))


def _is_activation(tensor: Any) -> bool:
    """Return whether a tensor's memory may be replaced: it is no view, no weight, not shared with other processes."""
    return not (
        tensor._base is not None
        or (tensor.requires_grad and tensor.is_leaf)
        or (tensor.device.type == "cpu" and tensor.is_shared())
    )


def outputs_as_plain(outputs: Any) -> None:
    """Make the tensors contiguous that a model returns to the script."""
    if LAYOUT.weights and not _is_transformed():
        for tensor in (outputs,) if isinstance(outputs, torch.Tensor) else tensors_in(outputs):
            as_plain(tensor)


def _is_transformed() -> bool:
    """Return whether a compiler, a tracer or a transform of torch.func runs the code: their layouts are left alone."""
    return is_compiling() or _tracing() is not None or _transforming()


def _functions_of(layout: Layout, places: tuple[Any, ...]) -> list[ReplacedFunction]:
    """Return a `ReplacedFunction` for each function in some of `_PLACES`."""
    return [
        ReplacedFunction(owner, name, functools.partial(change, layout))
        for owners, names, change in places
        for owner in owners
        for name in names
        if hasattr(owner, name)
    ]


def _laid_out(layout: Layout, plain: Any) -> Any:
    """Wrap a convolution: convert its input to channels last."""
    has, tensor = layout.has, torch.Tensor

    def convolve(input: Any, weight: Any, *args: Any, **options: Any) -> Any:
        if (
            not is_compiling()  # first, so that the compiler traces nothing of the rest
            and type(input) is tensor
            and has(weight)
            and input.dim() == 4
            and input.dtype in _FLOATS
            and input.layout is torch.strided
            and not _is_transformed()
        ):
            if not layout.acts:
                layout.begin()
            input = _contiguous(input, memory_format=_LAST)  # no copy if it is in channels last already
        return plain(input, weight, *args, **options)

    return convolve


def _renaming(layout: Layout, plain: Any) -> Any:
    """Wrap a function that gives memory a second name: make the tensor contiguous first."""
    tensor = torch.Tensor
    views = plain.__name__ in ("view", "view_as")

    def rename(*args: Any, **options: Any) -> Any:
        self = args[0] if args else options.get("input")
        if (
            type(self) is not tensor
            or self.is_contiguous()
            or is_compiling()
            or not layout.weights
            or _is_transformed()
        ):
            return plain(*args, **options)
        # `x.contiguous(memory_format=torch.channels_last)` wants another layout than a plain run's: no conversion.
        if options.get("memory_format", torch.contiguous_format) is torch.contiguous_format:
            as_plain(self)
        if not views or self.dim() < 3:
            return plain(*args, **options)
        try:
            return plain(*args, **options)
        except RuntimeError:
            # A `view` that fails on strides. The tensor was made from an activation, or from a part of it, and kept its
            # layout; in a plain run it is contiguous, and the view works.
            return plain(_contiguous(self), *args[1:], **options)

    return rename


def _drawing(layout: Layout, plain: Any) -> Any:
    """Wrap a function that draws random numbers: make the tensor contiguous first."""
    tensor = torch.Tensor
    drops = plain.__name__ in _DROPOUTS

    def draw(*args: Any, **options: Any) -> Any:
        if is_compiling() or not layout.weights:
            return plain(*args, **options)
        if args and type(args[0]) is tensor and not args[0].is_contiguous() and not _is_transformed():
            if drops and len(args) > 2 and not args[2]:  # nothing is drawn in eval mode
                return plain(*args, **options)
            as_plain(args[0])
            # Only 4-D tensors can be recognized as channels last. A 3-D or 5-D tensor made from such activations (a sum
            # over a dimension, a stack) may have inherited their order, or have these strides in a plain run too.
            if args[0].dim() in (3, 5) and args[0]._base is None:
                layout.give_up("random numbers are drawn for a tensor whose plain memory format is not known")
        return plain(*args, **options)

    return draw


# Owners, names and wrapper of the functions to replace. Convolutions first: they are replaced at once, the rest later.
_PLACES = (
    ((torch.nn.functional,), _CONVOLUTIONS, _laid_out),
    ((torch.Tensor, torch), _RENAMES, _renaming),
    ((torch.Tensor,), _RENAMES_OF_TENSORS, _renaming),
    ((torch.Tensor, torch), (*_DRAWS, *_DRAWS_IN_PLACE), _drawing),
    ((torch._VF, torch), _DROPOUTS, _drawing),
)
