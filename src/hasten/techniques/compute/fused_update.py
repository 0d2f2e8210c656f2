"""Run an optimizer's updates in fused kernels, without changing its options or state.

`optimizer.step` of torch's own optimizers works group by group: `_init_group` gathers the group's tensors into lists,
then a function of the module (`torch.optim.adam.adam`) updates them. Both are wrapped here: the first notes which lists
the step has just gathered, and the second recognizes them and calls the plain function with `fused=True`. Calls from
anywhere else pass through. The parameters that a fused kernel may take are chosen by a `Guard`.
"""

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
    """The parameters that the thread's current step has just gathered, and the `Updates` of their group."""

    params: Any = None
    updates: Any = None


_gathered = _Gathered()
_fusing: dict[ModuleType, weakref.WeakSet[Any]] = {}  # fused optimizers, by the module whose function updates them
_wrappers: dict[ModuleType, Any] = {}  # our wrapper of each module's function


def fuse_updates(optimizer: Any, leaves: Callable[[str], None]) -> None:
    """Hand the updates of an optimizer to fused kernels, for all tensors that these can read.

    Options, groups and states are the same as without, and so are checkpoints.

    Args:
        optimizer: One of torch's own Adam, AdamW, SGD and Adagrad.
        leaves: Called once with each reason why parameters are left to the ordinary update.
    """
    kind, optimizer_ref = type(optimizer), weakref.ref(optimizer)
    # AdamW is a subclass of Adam, and its groups are updated by Adam's function.
    module = sys.modules[torch.optim.Adam.__module__ if issubclass(kind, torch.optim.Adam) else kind.__module__]
    name = _name(module)
    kernel = f"_fused_{kind.__name__.lower()}_"
    updates: dict[int, Updates] = {}
    reported: set[str] = set()

    def leaves_once(why: str) -> None:
        if why not in reported:
            reported.add(why)
            leaves(why)

    def gather(group: dict[str, Any], params: list[Any], *lists: Any) -> Any:
        owner: Any = optimizer_ref()
        # A group that differs from the defaults was set by the script: `{"params": ..., "fused": False}`.
        if not group["fused"] and group["fused"] is owner.defaults["fused"]:
            # `load_state_dict` replaces the groups by new dicts, so entries of former groups pile up.
            if len(updates) > 4 * len(owner.param_groups) + 8:
                updates.clear()
            if id(group) not in updates:
                updates[id(group)] = Updates(kernel, leaves_once)
            _gathered.params, _gathered.updates = params, updates[id(group)]
        return kind._init_group(owner, group, params, *lists)

    if not hasattr(getattr(module, name), "hands_on"):
        _wrappers[module] = _handing_on(getattr(module, name))
        setattr(module, name, _wrappers[module])
    gather.fuses = True  # type: ignore[attr-defined]
    optimizer._init_group = gather  # `Optimizer.__getstate__` leaves it out of pickles and copies
    _fusing.setdefault(module, weakref.WeakSet()).add(optimizer)


def leave_updates(optimizers: Iterable[Any]) -> None:
    """Undo `fuse_updates`, and restore torch's functions in modules without any other fused optimizer."""
    for optimizer in optimizers:
        if hasattr(vars(optimizer).get("_init_group"), "fuses"):
            del optimizer._init_group
        for fusing in _fusing.values():
            fusing.discard(optimizer)
    for module, fusing in _fusing.items():
        name = _name(module)
        function = getattr(module, name)
        if not fusing and function is _wrappers[module]:  # else somebody has wrapped ours since: leave their wrapper
            setattr(module, name, function.__wrapped__)


def _name(module: ModuleType) -> str:
    """Return the name of a module's function that updates a group: `adam` in `torch.optim.adam`."""
    return module.__name__.rpartition(".")[2]


def _handing_on(plain: Any) -> Any:
    """Wrap torch's update of one group (`torch.optim.adam.adam`): fused for lists that a fused step has gathered."""

    @functools.wraps(plain)
    def update(params: list[Any], *lists: Any, **options: Any) -> None:
        # Other code calls these functions too, with its own lists. A step under torch.compile is fused by the compiler.
        if torch.compiler.is_compiling() or _gathered.params is not params:
            plain(params, *lists, **options)
            return
        updates, _gathered.params, _gathered.updates = _gathered.updates, None, None
        updates.make(plain, (params, *lists), options)

    update.hands_on = True  # type: ignore[attr-defined]
    return update


class Updates:
    """The updates of one parameter group.

    Args:
        kernel: Name of the fused kernel.
        leaves: Called with each reason why parameters are left to the ordinary update.
    """

    def __init__(self, kernel: str, leaves: Callable[[str], None]) -> None:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        self._guard = Guard({device for device, key in _KEYS.items() if has_kernel(f"aten::{kernel}", key)}, kernel)
        self._counts = kernel != "_fused_sgd_"  # whether the optimizer has step counters
        self._tensor_lr = kernel != "_fused_adagrad_"  # whether the kernel takes a learning rate that is a tensor
        self._leaves = leaves
        self._counters: list[Any] = []  # the optimizer's step counters
        self._versions: list[int] = []  # their versions after the last update, to notice changes by others
        self._copies: list[Any] = []  # copies of them that the kernel can read

    def make(self, plain: Any, lists: tuple[list[Any], ...], options: dict[str, Any]) -> None:
        """Make one update, `plain(*lists, **options)`, fused for as many parameters as possible."""
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
        for name in ("has_sparse_grad", "has_complex"):  # the guard has chosen no sparse gradient, no complex parameter
            if name in fused:
                fused[name] = False
        if fit.chosen is None and not fit.restride and not fit.steps_elsewhere:
            plain(*lists, **fused)
        else:
            self._make_in_parts(plain, lists, fit, options, fused)

    def _can_fuse(self, options: dict[str, Any]) -> bool:
        """Return whether the kernel supports the options, which a script may change between two updates."""
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
        """Update the chosen parameters with the kernel, and the rest with the ordinary update."""
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
            # SGD creates momentum buffers by storing them in these lists; its step then reads them from there.
            for column, part in zip(lists[2:], others[2:], strict=True):
                for at, value in zip(rest, part, strict=False):
                    column[at] = value

    def _readable(self, counters: list[Any], params: list[Any]) -> list[Any]:
        """Return copies of the step counters with the device and dtype that the kernel reads.

        The kernel increments them with each update, so they are copied again only if somebody else has changed the
        counters: a loaded checkpoint, or a script that edits them.
        """
        same = len(counters) == len(self._counters) and all(map(operator.is_, counters, self._counters))
        if not same or [counter._version for counter in counters] != self._versions:
            self._counters = counters
            self._copies = [
                counter.to(device=param.device, dtype=torch.float32, copy=True)
                for counter, param in zip(counters, params, strict=True)
            ]
        return self._copies
