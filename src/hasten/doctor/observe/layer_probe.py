"""Hook every layer for a few steps to record sizes, input shapes, times, softmaxes, and which layers norms follow.

The hooks are torch's global module hooks, so nothing is added to the modules themselves, which the script may copy or
save in the probed steps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hasten.doctor.observe.inputs import excerpt_of, first_tensor
from hasten.evidence import Layer
from hasten.evidence.facts import caller

_SIZES = (
    *("in_features", "out_features", "in_channels", "out_channels", "groups", "num_embeddings", "embedding_dim"),
    *("input_size", "hidden_size", "num_layers", "num_heads", "embed_dim", "num_features", "num_groups", "nf", "nx"),
)
_LAST_OF = ("kernel_size", "stride", "padding", "dilation")  # a number or a tuple with one per dimension: its last


@dataclass
class _LayerStats:
    """Observations of one layer, in all the probed steps."""

    path: str
    module: Any
    shape: tuple[int, ...] = ()
    dtype: str = ""
    where: str = ""
    normed_by: str = ""
    channels_last: bool = False
    calls: int = 0
    seconds: float = 0.0
    running: list[float] = field(default_factory=list)  # start of each call that is going on (a layer may recurse)

    def layer(self, steps: int) -> Layer:
        """Return the layer, with calls and seconds per step."""
        module = self.module
        return Layer(
            path=self.path,
            kind=type(module).__name__,
            sizes=sizes_of(module),
            bias=has_bias(module),
            shape=self.shape,
            dtype=self.dtype,
            normed_by=self.normed_by,
            calls=self.calls / steps,
            seconds=self.seconds / steps,
            where=self.where,
            channels_last=self.channels_last,
        )


class LayerProbe:
    """Observes the layers of some models while they train.

    Args:
        models: The outermost modules.
        timed: Measure the time of each layer's forward. This is meaningful only on the CPU: a GPU runs it later.
        failed: Called with an exception raised in a hook, which does not reach the script.

    Attributes:
        inputs: Per training forward of an outermost module: the shape of its first tensor, and a part of it.
        softmaxes: Shape of a softmax -> `file:line` of the call, and the path of the module around it.
    """

    def __init__(self, models: Sequence[Any], timed: bool, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._paths = paths_of(models)
        self._layers = {id(module) for model in models for module in model.modules() if is_layer(module)}
        self._roots = {id(model) for model in models}
        self._timed = timed
        self._thread = threading.get_ident()
        self._order: list[_LayerStats] = []  # in order of the first call
        self._stats: dict[int, _LayerStats] = {}
        self._outputs: dict[int, tuple[Any, _LayerStats]] = {}  # id of an output -> (weak reference to it, its layer)
        self._inside: list[int] = []  # ids of the modules whose forward is running
        self._undo = contextlib.ExitStack()
        self.inputs: list[tuple[tuple[int, ...], Any]] = []
        self.softmaxes: dict[tuple[int, ...], tuple[str, str]] = {}

    def begin(self) -> None:
        """Set the hooks."""
        import torch
        from torch.nn.modules import module

        self._undo.callback(module.register_module_forward_pre_hook(self._on_forward_begin).remove)
        handle = module.register_module_forward_hook(self._on_forward_end, with_kwargs=True)
        # torch does not remove this entry with the hook, and later warns that compiled modules have hooks.
        self._undo.callback(getattr(module, "_global_forward_hooks_with_kwargs", {}).pop, handle.id, None)
        self._undo.callback(handle.remove)
        for owner in (torch.nn.functional, torch, torch.Tensor):
            self._watch_softmax(owner)

    def end(self) -> None:
        """Remove the hooks. Safe to call again."""
        self._undo.close()
        self._outputs.clear()
        self._inside.clear()

    def layers(self, steps: int) -> tuple[Layer, ...]:
        """Return the layers in order of their first call, with figures per step.

        Args:
            steps: How many steps were observed.
        """
        return tuple(stats.layer(steps) for stats in self._order)

    # -- hooks -----------------------------------------------------------------------------------------

    def _on_forward_begin(self, module: Any, args: tuple[Any, ...]) -> None:
        """Note that a module's forward begins. This is the global pre-forward hook."""
        if id(module) not in self._paths or threading.get_ident() != self._thread or _is_compiling():
            return
        try:
            self._inside.append(id(module))
            if id(module) in self._layers:
                self._begin_layer(module, args)
        except Exception as error:  # an unusual module, such as one whose attributes raise: the script goes on
            self._on_error(error)

    def _on_forward_end(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note that a module's forward has ended. This is the global forward hook."""
        now = perf_counter()
        if id(module) not in self._inside or threading.get_ident() != self._thread or _is_compiling():
            return
        try:
            while self._inside and self._inside.pop() != id(module):
                pass  # a module whose forward raised, and the script caught it: this hook was not called for it
            inputs = (*args, *kwargs.values())
            if id(module) in self._stats:
                self._end_layer(module, inputs, output, now)
            if id(module) in self._roots and module.training and (tensor := first_tensor(inputs)) is not None:
                self.inputs.append((tuple(tensor.shape), excerpt_of(tensor)))
        except Exception as error:  # as in `_on_forward_begin`
            self._on_error(error)

    def _begin_layer(self, module: Any, args: tuple[Any, ...]) -> None:
        stats = self._stats.get(id(module))
        if stats is None:
            stats = self._stats[id(module)] = _LayerStats(self._paths[id(module)], module)
            self._order.append(stats)
            stats.where = caller()
            self._record_input(stats, args)
        self._link(stats, args)
        stats.running.append(perf_counter())

    def _end_layer(self, module: Any, args: tuple[Any, ...], output: Any, now: float) -> None:
        stats = self._stats[id(module)]
        if not stats.running:
            return
        if not stats.shape:  # the pre-forward hook is not given keyword arguments
            self._record_input(stats, args)
        stats.calls += 1
        start = stats.running.pop()
        if self._timed:
            stats.seconds += now - start
        if stats.normed_by == "" and has_bias(module) and _is_affine(module):
            self._outputs[id(output)] = (weakref.ref(output), stats)

    def _record_input(self, stats: _LayerStats, args: tuple[Any, ...]) -> None:
        """Record shape, dtype and memory format of a layer's first input tensor."""
        tensor = first_tensor(args)
        if tensor is not None:
            stats.shape = tuple(int(size) for size in tensor.shape)
            stats.dtype = str(tensor.dtype).removeprefix("torch.")
            stats.channels_last = is_channels_last(tensor)

    def _link(self, stats: _LayerStats, args: tuple[Any, ...]) -> None:
        """If this layer subtracts the channel means of another layer's output, record that with the other layer."""
        if not args or not subtracts_means(stats.module):
            return
        producer = self._outputs.get(id(args[0]))
        if producer is not None and producer[0]() is args[0]:
            producer[1].normed_by = f"{stats.path} ({type(stats.module).__name__})"

    def _watch_softmax(self, owner: Any) -> None:
        """Replace `owner.softmax` by a wrapper that records shapes, until `end`."""
        plain, is_own = owner.softmax, "softmax" in vars(owner)

        @functools.wraps(plain)
        def softmax(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            if threading.get_ident() == self._thread and not _is_compiling():
                path = self._paths[self._inside[-1]] if self._inside else ""
                self.softmaxes.setdefault(tuple(result.shape), (caller(), path))
            return result

        def restore() -> None:
            if owner.softmax is softmax and is_own:
                owner.softmax = plain
            elif owner.softmax is softmax:
                del owner.softmax

        owner.softmax = softmax
        self._undo.callback(restore)


def paths_of(models: Sequence[Any]) -> dict[int, str]:
    """Return each module's path by its id; with several models, the path starts with the model's class name."""
    paths: dict[int, str] = {}
    names: dict[str, int] = {}
    for model in models:
        kind = type(model).__name__
        names[kind] = names.get(kind, 0) + 1
        title = kind if names[kind] == 1 else f"{kind}#{names[kind]}"
        for path, module in model.named_modules():
            paths.setdefault(id(module), f"{title}.{path}" if path and len(models) > 1 else path or title)
    return paths


def structure(models: Sequence[Any]) -> tuple[Layer, ...]:
    """Return the layers without running them, for compiled models, on which no hooks may be set.

    Which norm follows a layer is known only within `nn.Sequential`.
    """
    from torch.nn import Sequential

    paths = paths_of(models)
    stats: dict[int, _LayerStats] = {}
    for model in models:
        for module in model.modules():
            if is_layer(module):
                stats.setdefault(id(module), _LayerStats(paths[id(module)], module))
        for chain in (module for module in model.modules() if isinstance(module, Sequential)):
            for first, second in zip(list(chain)[:-1], list(chain)[1:], strict=True):
                if id(first) in stats and has_bias(first) and _is_affine(first) and subtracts_means(second):
                    stats[id(first)].normed_by = f"{paths[id(second)]} ({type(second).__name__})"
    return tuple(layer.layer(1) for layer in stats.values())


def is_layer(module: Any) -> bool:
    """Return whether a module is a layer: it has no children, or computes with its children's weights itself."""
    return type(module).__name__ == "MultiheadAttention" or not any(True for _ in module.children())


def sizes_of(module: Any) -> dict[str, int]:
    """Return a layer's sizes by attribute name."""
    sizes = {name: value for name in _SIZES if isinstance(value := getattr(module, name, None), int)}
    for name in _LAST_OF:
        value = getattr(module, name, None)
        last = value[-1] if isinstance(value, tuple) and value else value
        if isinstance(last, int):
            sizes[name] = last
    return sizes


def has_bias(module: Any) -> bool:
    """Return whether a layer adds a bias (`bias` is a bool in an RNN; attention has `in_proj_bias`)."""
    bias = getattr(module, "bias", None)
    return bias is True or hasattr(bias, "shape") or hasattr(getattr(module, "in_proj_bias", None), "shape")


def subtracts_means(module: Any) -> bool:
    """Return whether a layer subtracts the mean of each channel, so that a bias just before it has no effect.

    True for BatchNorm that uses the batch's statistics, InstanceNorm, and GroupNorm with one channel per group. Not for
    LayerNorm, which subtracts a mean over the channels.
    """
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    if isinstance(module, nn.GroupNorm):
        return module.num_groups == module.num_channels
    if isinstance(module, _BatchNorm | _InstanceNorm):
        from_batch = isinstance(module, _BatchNorm) and module.training
        return from_batch or not module.track_running_stats or (isinstance(module, _InstanceNorm) and module.training)
    return False


def is_channels_last(tensor: Any) -> bool:
    """Return whether a 4-D tensor is in channels_last memory format, and not contiguous as well (as with 1 channel)."""
    import torch

    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return bool(tensor.is_contiguous(memory_format=torch.channels_last))


def _is_affine(module: Any) -> bool:
    """Return whether a layer is linear or convolutional."""
    from torch import nn
    from torch.nn.modules.conv import _ConvNd

    return isinstance(module, nn.Linear | _ConvNd)


def _is_compiling() -> bool:
    from torch.compiler import is_compiling

    return is_compiling()
