"""The call of a module under `compile`: compiled code, or the module's own way where that may differ."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointFunction

from hasten.techniques.nested import tensors_in

_tracing = torch._C._get_tracing_state
_transforming = torch._C._are_functorch_transforms_active
_fx = torch.fx._symbolic_trace
_modes = torch._C._len_torch_dispatch_stack

Graph = Any  # a node of autograd's graph


class _Here(threading.local):
    """This thread.

    Attributes:
        compiles: Whether it is the one that has set torch's compiler up, whose settings are a thread's own.
        told: Whether it was said that it is not.
    """

    compiles = False
    told = False


class CompiledCall:
    """Called in place of a module; compiles from its second forward with a graph on.

    The first goes the module's own way, and its graph is looked at: compiled code gives gradients of zero where plain
    code gives none (`grad` stays None, and the optimizer leaves the parameter alone), so that a parameter must not
    hang on whether the script uses an output. It is looked at again where the kind of the outputs changes, and behind
    each graph that was compiled since: a branch taken for the first time may give outputs of other parameters.

    Args:
        model: The module whose call it stands in.
        compiled: What calls it compiled.
        refuse: Told why the module is left alone from now on; it then puts this object away.
        aside: Told why single calls are left alone.

    Attributes:
        compiled: See above; None once it is left alone.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: Callable[..., Any] | None,
        refuse: Callable[[str], None],
        aside: Callable[[str], None],
    ) -> None:
        self._model = model
        self.compiled = compiled
        self._refuse, self._aside = refuse, aside
        self._here = _Here()
        self._here.compiles = True
        self._looked: set[type] = set()  # kinds of outputs whose graph was looked at
        self._due = True  # whether the next forward with a graph is one to look at
        # Without a graph torch packs padded sequences, and gives zeros for padding; compiled code does not.
        self._keeps_padding = any(isinstance(part, nn.TransformerEncoder) for part in model.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        model = self._model
        if is_compiling() or self.compiled is None:  # inside of another compiled module, whose code this becomes
            return model._call_impl(*args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")
        if caller is not model and isinstance(caller, nn.Module):
            # A copy of the module's `__dict__` (learn2learn's `clone_module`) has taken this object along.
            return caller._call_impl(*args, **kwargs)
        if not self._here.compiles:
            return self._in_another_thread(args, kwargs)
        if _seen_otherwise() or any(map(_is_of_another_class, args)) or any(map(_is_of_another_class, kwargs.values())):
            return model._call_impl(*args, **kwargs)
        if self._due and any(parameter.requires_grad for parameter in model.parameters()):
            return self._looked_at(model, args, kwargs)
        if self._keeps_padding and not model.training and not torch.is_grad_enabled():
            return model._call_impl(*args, **kwargs)
        graphs = counters["stats"]["unique_graphs"]
        outputs = self.compiled(*args, **kwargs)
        is_new = type(outputs) not in self._looked or counters["stats"]["unique_graphs"] != graphs
        if is_new and torch.is_grad_enabled():
            self._due = True
        return outputs

    def _in_another_thread(self, args: Any, kwargs: Any) -> Any:
        """Call the module as it is: torch's settings are another thread's, and while one compiles no other can."""
        if not self._here.told:
            self._here.told = True
            self._aside("forwards in other threads than that of the first are not compiled")
        return self._model._call_impl(*args, **kwargs)

    def _looked_at(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        with _reentrant_checkpoints() as seen:
            outputs = model._call_impl(*args, **kwargs)
        if any(tensor.requires_grad for tensor in tensors_in(outputs)):
            self._looked.add(type(outputs))
            self._due = False
            if why := _REENTRANT if seen else why_not(model, outputs):
                self.compiled = None
                self._refuse(why)
        return outputs

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing in a copy or a pickle of the module's attributes."""
        return type(None), ()


def _seen_otherwise() -> bool:
    """Whether something looks at a forward's operations one by one, of which compiled code shows it none, or others.

    A tracer (`torch.jit.trace`, TensorBoard's `add_graph`), transforms of torch.func, forward-mode gradients, dispatch
    modes (`FlopCounterMode`). And parametrizations that are kept for a while, which compiled code computes again. Where
    another thread compiles or runs `torch.fx.symbolic_trace`, torch has compiled code called in none.
    """
    return (
        _tracing() is not None
        or _fx._is_fx_tracing_flag
        or _transforming()
        or forward_ad._current_level >= 0
        or _modes() > 0
        or parametrize._cache_enabled > 0
    )


def _is_of_another_class(value: Any) -> bool:
    """Whether it is a tensor of a subclass that compiled code does not take (torchvision's `tv_tensors.Image`)."""
    return (
        isinstance(value, Tensor)
        and type(value) not in (Tensor, nn.Parameter)
        and not is_traceable_wrapper_subclass(value)
    )


_REENTRANT = (
    "parts of it are computed again by torch's checkpoint with use_reentrant=True: compiled code gives gradients where "
    "that gives none, and updates statistics once where that does twice"
)


@contextlib.contextmanager
def _reentrant_checkpoints() -> Iterator[list[bool]]:
    """Note within it whether a forward uses torch's reentrant checkpoint, which need not show in its graph."""
    seen: list[bool] = []
    plain: Any = CheckpointFunction.apply
    own = vars(CheckpointFunction).get("apply")

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(True)
        return plain(*args, **kwargs)

    CheckpointFunction.apply = noting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del CheckpointFunction.apply  # what torch's autograd.Function has is found again
        if own is not None:
            CheckpointFunction.apply = own  # type: ignore[method-assign]


def why_not(model: nn.Module, outputs: Any) -> str:
    """Return why a model is not to be compiled, by what a forward of it with a graph has given; "" if it may be."""
    returned = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    kept = [tensor for tensor in _kept_by(model) if tensor.grad_fn is not None]
    reached = [_parameters_behind(tensor.grad_fn) for tensor in (*returned, *kept)]
    if not reached:
        return ""
    every = frozenset[int]().union(*reached)
    of_returned = reached[: len(returned)]
    # A loss in the output is what is differentiated (Hugging Face's models return their logits and caches beside it).
    has_loss = any(
        tensor.numel() == 1 and behind == every for tensor, behind in zip(returned, of_returned, strict=True)
    )
    if has_loss or all(behind == every for behind in of_returned):
        return ""
    return (
        "its outputs depend on different parameters: where a step leaves an output out, compiled code gives its "
        "parameters gradients of zero in place of none"
    )


def _kept_by(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a model keeps in attributes of its own."""
    for part in model.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from tensors_in(value)


def _parameters_behind(graph: Graph) -> frozenset[int]:
    """Return the ids of the leaves that a gradient at this node reaches."""
    leaves, seen, queue = set(), {graph}, [graph]
    while queue:
        node = queue.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                queue.append(inner)
    return frozenset(leaves)
