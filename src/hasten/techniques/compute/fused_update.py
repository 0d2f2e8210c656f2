"""Fused kernels in place of an optimizer's ordinary update, within its step only."""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from hasten.techniques.compute.fused_guard import Fit, Guard

_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}


class _Gathered(threading.local):
    """The parameters that a step has just gathered for its update, and who decides about them."""

    params: Any = None
    updates: Any = None


_gathered = _Gathered()
_fusing: dict[ModuleType, weakref.WeakSet[Any]] = {}  # optimizers, by the module whose function updates them
_ours: dict[ModuleType, Any] = {}  # the functions that stand there for torch's own


def fuse_updates(optimizer: Any, leaves: Callable[[str], None]) -> None:
    """Hand the updates of an optimizer to fused kernels, where its tensors allow it.

    Options, groups and states stay what they are without: a checkpoint of it is like any other.

    Args:
        optimizer: One of torch's own Adam, AdamW, SGD and Adagrad.
        leaves: Called once with each reason why parameters are left to the ordinary update.
    """
    kind, this = type(optimizer), weakref.ref(optimizer)
    module = sys.modules[torch.optim.Adam.__module__ if issubclass(kind, torch.optim.Adam) else kind.__module__]
    name = _name(module)
    kernel = f"_fused_{kind.__name__.lower()}_"
    updates: dict[int, Updates] = {}
    told: set[str] = set()

    def leaves_once(why: str) -> None:
        if why not in told:
            told.add(why)
            leaves(why)

    def gather(group: dict[str, Any], params: list[Any], *lists: Any) -> Any:
        owner: Any = this()
        if not group["fused"] and group["fused"] is owner.defaults["fused"]:  # a group may have a wish of its own
            if len(updates) > 4 * len(owner.param_groups) + 8:  # each checkpoint that is loaded brings new groups
                updates.clear()
            if id(group) not in updates:
                updates[id(group)] = Updates(kernel, leaves_once)
            _gathered.params, _gathered.updates = params, updates[id(group)]
        return kind._init_group(owner, group, params, *lists)

    if not hasattr(getattr(module, name), "hands_on"):
        _ours[module] = _handing_on(getattr(module, name))
        setattr(module, name, _ours[module])
    gather.fuses = True  # type: ignore[attr-defined]
    optimizer._init_group = gather  # neither pickled nor copied with the optimizer
    _fusing.setdefault(module, weakref.WeakSet()).add(optimizer)


def leave_updates(optimizers: Iterable[Any]) -> None:
    """Undo `fuse_updates`, and put torch's functions back where no other optimizer that is fused needs ours."""
    for optimizer in optimizers:
        if hasattr(vars(optimizer).get("_init_group"), "fuses"):
            del optimizer._init_group
        for fusing in _fusing.values():
            fusing.discard(optimizer)
    for module, fusing in _fusing.items():
        name = _name(module)
        function = getattr(module, name)
        if not fusing and function is _ours[module]:  # somebody else's wrapper around it stays
            setattr(module, name, function.__wrapped__)


def _name(module: ModuleType) -> str:
    """The name of the function in it that updates a group: `adam` in `torch.optim.adam`."""
    return module.__name__.rpartition(".")[2]


def _handing_on(plain: Any) -> Any:
    """torch's update of one group (`torch.optim.adam.adam` and the like), fused where the step asked for it."""

    @functools.wraps(plain)
    def update(params: list[Any], *lists: Any, **options: Any) -> None:
        # Others call these functions too, with lists of their own. Compiled steps make kernels of their own.
        if torch.compiler.is_compiling() or _gathered.params is not params:
            plain(params, *lists, **options)
            return
        updates, _gathered.params, _gathered.updates = _gathered.updates, None, None
        updates.make(plain, (params, *lists), options)

    update.hands_on = True  # type: ignore[attr-defined]
    return update


class Updates:
    """The updates of one group of parameters.

    Args:
        kernel: The name of the fused kernel.
        leaves: Called with each reason why parameters are left to the ordinary update.
    """

    def __init__(self, kernel: str, leaves: Callable[[str], None]) -> None:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        self._guard = Guard({device for device, key in _KEYS.items() if has_kernel(f"aten::{kernel}", key)}, kernel)
        self._counts = kernel != "_fused_sgd_"
        self._tensor_lr = kernel != "_fused_adagrad_"
        self._leaves = leaves
        self._counters: list[Any] = []  # the steps' own
        self._versions: list[int] = []
        self._copies: list[Any] = []  # those that the kernel reads

    def make(self, plain: Any, lists: tuple[list[Any], ...], options: dict[str, Any]) -> None:
        """Make one update: `plain(*lists, **options)`, fused as far as it can be."""
        if not self._can_fuse(options):
            plain(*lists, **options)
            return
        params, grads, *states = lists
        fit = self._guard.fit(
            params, grads, states[:-1] if self._counts else states, states[-1] if self._counts else []
        )
        if self._guard.reasons:
            for why in sorted(self._guard.reasons):
                self._leaves(why)
            self._guard.reasons.clear()
        fused = {**options, "foreach": False, "fused": True}
        for name in ("has_sparse_grad", "has_complex"):  # what is so is not among those that are fit
            if name in fused:
                fused[name] = False
        if fit.chosen is None and not fit.restride and not fit.steps_elsewhere:
            plain(*lists, **fused)
        else:
            self._make_in_parts(plain, lists, fit, options, fused)

    def _can_fuse(self, options: dict[str, Any]) -> bool:
        """Whether the kernels know all options: those that a script may change between two updates."""
        if options.get("fused") or options.get("differentiable"):
            return False
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                if name != "lr" or value.requires_grad or not self._tensor_lr:
                    self._leaves(f"an option {name} that is a tensor")
                    return False
        return True

    def _make_in_parts(
        self, plain: Any, lists: tuple[list[Any], ...], fit: Fit, options: dict[str, Any], fused: dict[str, Any]
    ) -> None:
        count = len(lists[0])
        chosen = list(range(count)) if fit.chosen is None else fit.chosen
        if not chosen:
            plain(*lists, **options)
            return
        rest = sorted(set(range(count)).difference(chosen))
        parts = [[column[at] for at in chosen] if column else column for column in lists]
        for at, index in enumerate(chosen):
            if index in fit.restride:
                parts[1][at] = parts[1][at].as_strided(parts[0][at].shape, parts[0][at].stride())
        counters = parts[-1] if fit.steps_elsewhere else []
        if counters:
            parts[-1] = self._readable(counters, parts[0])
        plain(*parts, **fused)
        if counters:
            torch._foreach_add_(counters, 1)
            self._versions = [counter._version for counter in counters]
        if rest:
            others = [[column[at] for at in rest] if column else column for column in lists]
            plain(*others, **options)
            for column, part in zip(lists[2:], others[2:], strict=True):  # SGD's momentum begins in these lists
                for at, value in zip(rest, part, strict=False):
                    column[at] = value

    def _readable(self, counters: list[Any], params: list[Any]) -> list[Any]:
        """Copies of the counters where and as the kernel reads them; it counts them up with each update."""
        same = len(counters) == len(self._counters) and all(map(operator.is_, counters, self._counters))
        if not same or [counter._version for counter in counters] != self._versions:
            self._counters = counters
            self._copies = [
                counter.to(device=param.device, dtype=torch.float32, copy=True)
                for counter, param in zip(counters, params, strict=True)
            ]
        return self._copies
