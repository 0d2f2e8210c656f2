"""What stands in a module's call under `compile`: compiled code, or the module's own way where that may differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from hasten.techniques.nested import tensors_in

_tracing = torch._C._get_tracing_state
_transforming = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack

Graph = Any  # a node of autograd's graph


class CompiledCall:
    """Called in place of a module; compiles from its second forward with a graph on.

    The first goes the module's own way, and its graph is looked at: compiled code gives gradients of zero where plain
    code gives none (`grad` stays None, and the optimizer leaves the parameter alone), so that a parameter must not
    hang on whether the script uses an output. It is looked at again where the kind of the outputs changes.

    Args:
        model: The module whose call it stands in.
        compiled: What calls it compiled.
        refuse: Told why the module is left alone from now on; it then puts this object away.

    Attributes:
        compiled: See above; None once it is left alone.
    """

    def __init__(self, model: nn.Module, compiled: Callable[..., Any] | None, refuse: Callable[[str], None]) -> None:
        self._model = model
        self.compiled = compiled
        self._refuse = refuse
        self._kind: type | None = None  # of the outputs that were looked at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        model = self._model
        if is_compiling() or self.compiled is None:  # inside of another compiled module, whose code this becomes
            return model._call_impl(*args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")
        if caller is not model and isinstance(caller, nn.Module):
            # A copy of the module's `__dict__` (learn2learn's `clone_module`) has taken this object along.
            return caller._call_impl(*args, **kwargs)
        if _seen_otherwise():
            return model._call_impl(*args, **kwargs)
        if self._kind is None and torch.is_grad_enabled():
            return self._looked_at(model, args, kwargs)
        outputs = self.compiled(*args, **kwargs)
        if type(outputs) is not self._kind:
            self._kind = None  # looked at in the next forward
        return outputs

    def _looked_at(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        outputs = model._call_impl(*args, **kwargs)
        if any(tensor.requires_grad for tensor in tensors_in(outputs)):
            self._kind = type(outputs)
            if why := why_not(model, outputs):
                self.compiled = None
                self._refuse(why)
        return outputs

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing in a copy or a pickle of the module's attributes."""
        return type(None), ()


def _seen_otherwise() -> bool:
    """Whether something looks at a forward's operations one by one, of which compiled code shows it none, or others.

    A tracer (`torch.jit.trace`, TensorBoard's `add_graph`), transforms of torch.func, forward-mode gradients, dispatch
    modes (`FlopCounterMode`).
    """
    return _tracing() is not None or _transforming() or forward_ad._current_level >= 0 or _modes() > 0


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
