"""The call of a module under `compile`: decide, call by call, between compiled code and the plain forward.

Compiled code may differ from plain code in three ways: it hides single operations (tracers, dispatch modes), it does
not know some inputs (tensor subclasses), and its gradients of unused parameters are zero instead of None. The first two
are tested at each call. For the third, some forwards run plain, and the autograd graphs of their outputs are compared.
"""

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
from torch.fx._symbolic_trace import is_fx_tracing
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointFunction

from hasten.techniques.nested import tensors_in

_tracing = torch._C._get_tracing_state
_transforming = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack

Graph = Any  # a node of autograd's graph


class _ThreadState(threading.local):
    """What a `CompiledCall` knows about the calling thread.

    Attributes:
        compiles: Whether this is the thread that set up torch's compiler, whose settings hold for one thread only.
        reported: Whether the user was told that this thread's calls are not compiled.
    """

    compiles = False
    reported = False


class CompiledCall:
    """Stand-in for a module's `_call_impl`; uses compiled code from the second forward with a graph on.

    The first forward runs plain, and its autograd graph is inspected. Compiled code gives gradients of zero where plain
    code gives none (`grad` stays None, and the optimizer leaves the parameter alone), so all outputs must depend on the
    same parameters: else the gradients would depend on whether the script uses an output. The graph is inspected again
    when the type of the outputs changes, and after each new compilation: a branch taken for the first time may return
    outputs of other parameters.

    Only calls of the thread that made this object use compiled code: other threads have the compiler's default settings
    (see `Compile._look_at_all`), and no thread may call compiled code while another compiles.

    Args:
        model: The module whose calls it takes.
        compiled: Calls the module's compiled code.
        refuse: Called with the reason when the module must run plain for good; it then removes this object.
        decline: Called with the reason when single calls run plain.

    Attributes:
        compiled: See above; None once the module runs plain for good.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: Callable[..., Any] | None,
        refuse: Callable[[str], None],
        decline: Callable[[str], None],
    ) -> None:
        self._model = model
        self.compiled = compiled
        self._refuse, self._decline = refuse, decline
        self._thread = _ThreadState()
        self._thread.compiles = True
        self._inspected: set[type] = set()  # types of outputs whose graphs were inspected
        self._must_inspect = True  # whether the next forward with a graph is to be inspected
        # Without a graph, nn.TransformerEncoder's fast path packs padded sequences and returns zeros for padding;
        # compiled code does not.
        self._keeps_padding = any(isinstance(submodule, nn.TransformerEncoder) for submodule in model.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        model = self._model
        if is_compiling() or self.compiled is None:  # is_compiling: traced as a part of another compiled module
            return model._call_impl(*args, **kwargs)
        caller = sys._getframe(1).f_locals.get("self")
        if caller is not model and isinstance(caller, nn.Module):
            # A copy of the module's `__dict__` (learn2learn's `clone_module`) has taken this object along.
            return caller._call_impl(*args, **kwargs)
        if not self._thread.compiles:
            return self._call_plain_in_thread(args, kwargs)
        if _is_observed() or any(map(_is_unsupported, args)) or any(map(_is_unsupported, kwargs.values())):
            return model._call_impl(*args, **kwargs)
        if self._must_inspect and any(parameter.requires_grad for parameter in model.parameters()):
            return self._inspect(model, args, kwargs)
        if self._keeps_padding and not model.training and not torch.is_grad_enabled():
            return model._call_impl(*args, **kwargs)
        graphs = counters["stats"]["unique_graphs"]
        outputs = self.compiled(*args, **kwargs)
        # Dynamo's counter grows when this call compiled another graph, such as for another branch or shape.
        is_new = type(outputs) not in self._inspected or counters["stats"]["unique_graphs"] != graphs
        if is_new and torch.is_grad_enabled():
            self._must_inspect = True
        return outputs

    def _call_plain_in_thread(self, args: Any, kwargs: Any) -> Any:
        """Run a forward plain in another thread than the one that compiles, and tell the user once per thread."""
        if not self._thread.reported:
            self._thread.reported = True
            self._decline("forwards in threads other than that of the first forward are not compiled")
        return self._model._call_impl(*args, **kwargs)

    def _inspect(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a forward plain, and refuse the module if compiled code would give other gradients."""
        with _reentrant_checkpoints() as reentrant:
            outputs = model._call_impl(*args, **kwargs)
        if any(tensor.requires_grad for tensor in tensors_in(outputs)):
            self._inspected.add(type(outputs))
            self._must_inspect = False
            if why := _REENTRANT if reentrant else why_not(model, outputs):
                self.compiled = None
                self._refuse(why)
        return outputs

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy or a pickle of the module's attributes."""
        return type(None), ()


def _is_observed() -> bool:
    """Return whether something observes single operations, of which compiled code shows it none, or others.

    That is a tracer (`torch.jit.trace`, TensorBoard's `add_graph`), a transform of torch.func, forward-mode
    differentiation or a dispatch mode (`FlopCounterMode`). True also while parametrizations are cached
    (`parametrize.cached`), since compiled code would compute them again; and while `torch.fx.symbolic_trace` runs or
    another thread compiles, when torch refuses to call compiled code.
    """
    return (
        _tracing() is not None
        or is_fx_tracing()
        or _transforming()
        or forward_ad._current_level >= 0
        or _modes() > 0
        or parametrize._cache_enabled > 0
    )


def _is_unsupported(value: Any) -> bool:
    """Return whether a value is a tensor subclass unknown to compiled code (torchvision's `tv_tensors.Image`)."""
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
    """Record whether a forward uses torch's reentrant checkpoint; its graph need not show that.

    Yields:
        A list that is not empty once a reentrant checkpoint was used.
    """
    uses: list[bool] = []
    plain: Any = CheckpointFunction.apply
    own = vars(CheckpointFunction).get("apply")  # not None if somebody else has replaced it on this class

    def noting(*args: Any, **kwargs: Any) -> Any:
        uses.append(True)
        return plain(*args, **kwargs)

    CheckpointFunction.apply = noting  # type: ignore[method-assign]
    try:
        yield uses
    finally:
        del CheckpointFunction.apply  # the lookup finds the inherited autograd.Function.apply again
        if own is not None:
            CheckpointFunction.apply = own  # type: ignore[method-assign]


def why_not(model: nn.Module, outputs: Any) -> str:
    """Return why a model must not be compiled, judged by the outputs of a plain forward with a graph; "" if it may be.

    It must not if some output does not depend on every parameter that the outputs, and tensors kept in the model's
    attributes, depend on together; unless one of the outputs is a loss.
    """
    returned = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    kept = [tensor for tensor in _kept_by(model) if tensor.grad_fn is not None]
    reached = [_parameters_behind(tensor.grad_fn) for tensor in (*returned, *kept)]
    if not reached:
        return ""
    all_reached = frozenset[int]().union(*reached)
    by_returned = reached[: len(returned)]
    # A scalar output that reaches everything is a loss, which the script differentiates (Hugging Face's models return
    # their logits and caches beside it).
    has_loss = any(
        tensor.numel() == 1 and leaves == all_reached for tensor, leaves in zip(returned, by_returned, strict=True)
    )
    if has_loss or all(leaves == all_reached for leaves in by_returned):
        return ""
    return (
        "its outputs depend on different parameters: where a step leaves an output out, compiled code gives its "
        "parameters gradients of zero in place of none"
    )


def _kept_by(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in attributes of a model's modules, other than parameters and buffers."""
    for part in model.modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from tensors_in(value)


def _parameters_behind(graph: Graph) -> frozenset[int]:
    """Return the ids of the leaf tensors that a gradient at this graph node reaches."""
    leaves, visited, queue = set(), {graph}, [graph]
    while queue:
        node = queue.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.add(id(leaf))
        for inner, _ in node.next_functions:
            if inner is not None and inner not in visited:
                visited.add(inner)
                queue.append(inner)
    return frozenset(leaves)
