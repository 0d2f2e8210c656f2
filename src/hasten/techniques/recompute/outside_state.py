"""Save the state beside its inputs that a module's forward reads or writes, and restore it to recompute the forward.

`ForwardState` copies what may change and can be restored: attributes, containers, plain objects, NumPy arrays, buffers
that the forward changes, names outside of the module, random states. Tensors are too large to copy, so parameters,
inputs and other tensors are watched instead (version and address), and a change means that the forward cannot be
repeated. `ModuleKnowledge` learns over the forwards of a module, so that later ones copy less. Objects that can neither
be restored nor watched (an iterator, a queue) raise `CannotRepeatError` if the module's code names them.
"""

from __future__ import annotations

import copyreg
import sys
from collections import OrderedDict, deque
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hasten.data.rng import is_generator
from hasten.techniques.recompute.generators import GeneratorUse, States
from hasten.techniques.recompute.names import ModuleCode, OuterName

_TORCH_OWN = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 4  # levels of lists, dicts and objects in attributes that are followed
_LONGEST = 500  # most entries of a container that is copied; of longer ones only the length is restored
_LARGEST = 1 << 24  # most bytes of an array that is copied
_MOST = 3000  # most objects that are followed
# Libraries whose objects are not entered: loggers, locks, arrays.
_LIBRARIES = frozenset(sys.stdlib_module_names | {"torch", "numpy", "hasten"}) - {"types", "argparse", "collections"}
# Modules of those libraries whose objects hold something that a forward may change.
_NOT_ENTERED = frozenset(
    {"array", "queue", "_queue", "weakref", "_contextvars", "multiprocessing.sharedctypes", "multiprocessing.managers"}
)
# Types whose objects hold nothing that a forward could change.
_STILL = (str, bytes, int, float, complex, bool, type(None), type, FunctionType, MethodType, BuiltinFunctionType,
          ModuleType, torch.dtype, torch.device, torch.Size, range, slice)  # fmt: skip
_STILL_EXACTLY = frozenset(_STILL)


class CannotRepeatError(Exception):
    """Raised if a forward cannot be repeated exactly; its message says why."""


class ModuleKnowledge:
    """Facts about one module, learned once from its code or over its forwards."""

    def __init__(self, module: nn.Module, with_hooks: bool) -> None:
        """Read a module's code.

        Args:
            module: The module whose forward is repeated. No reference is kept, which would be a cycle: the module's
                replaced forward refers to this object.
            with_hooks: Whether the module's own hooks are repeated too; those of submodules always are.
        """
        self.with_hooks = with_hooks
        self.generator_use = GeneratorUse()
        code = ModuleCode(module)
        self.refusal = (
            f"its forward may say or write something ({code.says}), which would be twice" if code.says else ""
        )
        self.outside = code.outside  # see `ModuleCode` for these three
        self.reached = code.reached
        self.changes = code.changes
        # ids of modules whose buffers a forward changes; None until the first forward, which copies all buffers.
        self.changing: set[int] | None = None


class ForwardState:
    """Snapshot of a module, its inputs, outer names and random states, made before a forward.

    Args:
        knowledge: Facts about the module.
        module: The module.
        args: Its inputs, nested.
        before_first_run: Whether it is made before the first run. Otherwise it is made before the repetition, to
            restore the present state after it.

    Attributes:
        storages: Addresses of memory that exists outside of the forward: weights, buffers, inputs.

    Raises:
        CannotRepeatError: The module has state that cannot be restored.
    """

    def __init__(self, knowledge: ModuleKnowledge, module: nn.Module, args: Any, before_first_run: bool = True) -> None:
        if knowledge.refusal:
            raise CannotRepeatError(knowledge.refusal)
        self._knowledge = knowledge
        self._before_first_run = before_first_run
        self._without_hooks = None if knowledge.with_hooks else module
        self._long: list[tuple[Any, int]] = []  # long containers, and their lengths
        self._containers: list[tuple[Any, Any]] = []  # containers, and copies of them
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []  # dicts of buffers, and dicts of copies
        self._watched: list[tuple[str, Any, int, int | None]] = []  # name, tensor, version, address (None: may move)
        self._changing: list[tuple[int, list[Any]]] = []  # id of a module, its buffers and their versions
        self._names: list[tuple[OuterName, Any]] = []  # outer names, and their values
        self._generators: list[Any] = []
        self._arrays: list[tuple[Any, Any]] = []  # arrays, and copies of them
        self._slotted: list[tuple[Any, dict[str, Any]]] = []  # objects with slots, and the slots' values
        self._visited: set[int] = set()
        self.storages: set[int] = set()
        self._module(module)
        self._note(args, 0, "an input")
        for outer_name in knowledge.outside:
            value = outer_name.read()
            self._names.append((outer_name, value))
            self._note(value, 1, outer_name.name)
        self._states = States(knowledge.generator_use, self._generators)
        self._dtype = torch.get_default_dtype()

    # -- saving -----------------------------------------------------------------------------------------

    def _module(self, module: nn.Module) -> None:
        """Save a module's attributes and buffers, watch its parameters, and enter its submodules."""
        if id(module) in self._visited:
            return
        self._visited.add(id(module))
        own = vars(module)
        if (own["_forward_hooks"] or own["_forward_pre_hooks"]) and module is not self._without_hooks:
            _refuse_hooks(module)
        kept = own.copy()
        self._containers.append((own, kept))
        for name, value in own.items():
            if type(value) not in _STILL_EXACTLY and name not in _TORCH_OWN:
                kept[name] = self._apart(value)
                self._note(value, 0, name)
        if parameters := own["_parameters"]:
            self._containers.append((parameters, parameters.copy()))
            # FSDP gathers full parameters for the forward and again for the backward, at other addresses.
            moves = own.get("_is_fsdp_managed_module", False)
            for name, parameter in parameters.items():
                if parameter is not None:
                    self._watch(name, parameter, moves)
        if buffers := own["_buffers"]:
            self._take_buffers(module, buffers)
        if modules := own["_modules"]:
            self._containers.append((modules, modules.copy()))
            for inner in modules.values():
                if inner is not None:
                    self._module(inner)

    def _take_buffers(self, module: nn.Module, buffers: dict[str, Any]) -> None:
        """Copy a module's buffers if its forward may change them; otherwise watch them."""
        changing = self._knowledge.changing
        # BatchNorm's kernels update the statistics without a new version of the tensors, so always copy those.
        statistics = isinstance(module, _NormBase) and module.running_mean is not None
        changes = statistics or changing is None or id(module) in changing
        if self._before_first_run and changes:
            kept = {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
            self._buffers.append((buffers, kept))
        else:
            self._containers.append((buffers, buffers.copy()))
        for name, buffer in buffers.items():
            if buffer is None:
                continue
            if changes:
                self.storages.add(buffer.untyped_storage().data_ptr())
            else:
                self._watch(name, buffer)
        if not statistics:
            versions = [(buffer, buffer._version) for buffer in buffers.values() if buffer is not None]
            self._changing.append((id(module), versions))

    def _watch(self, name: str, tensor: Any, moves: bool = False) -> None:
        """Watch a tensor whose values and address must not change between the forward and its repetition.

        Args:
            name: Its name, for messages.
            tensor: The tensor.
            moves: Whether its address may change.
        """
        if tensor.layout is not torch.strided or nn.parameter.is_lazy(tensor):
            raise CannotRepeatError(f"{name} is a {type(tensor).__name__} ({tensor.layout})")
        address = None if moves else tensor.data_ptr()
        self._watched.append((name, _without_graph(tensor), tensor._version, address))
        self.storages.add(tensor.untyped_storage().data_ptr())

    def _apart(self, value: Any) -> Any:
        """Return an attribute's value without its graph, which would keep those of earlier steps alive."""
        if self._before_first_run and isinstance(value, torch.Tensor):
            return _without_graph(value)
        if self._before_first_run and type(value) is tuple:
            return tuple(map(self._apart, value))
        return value

    def _note(self, value: Any, depth: int, name: str) -> None:
        """Save a value that can change: a container, generator, tensor, array or plain object."""
        if isinstance(value, torch.Tensor):
            self._watch(name, value)
        elif isinstance(value, _STILL):
            return
        elif is_generator(value):
            if value is not torch.default_generator and not any(value is known for known in self._generators):
                self._generators.append(value)
        elif type(value).__name__ == "ndarray":
            self._note_array(value, name)
        elif hasattr(type(value), "__next__") and name.removeprefix(OuterName.MARK) in self._knowledge.reached:
            raise CannotRepeatError(f"{name} is a {type(value).__name__}, which nobody can set back")
        elif id(value) not in self._visited:
            beyond = depth > _DEPTH or len(self._visited) >= _MOST
            if beyond or not _is_put_back(value):
                self._refuse_to_change(name, value)
            if not beyond:
                self._visited.add(id(value))
                self._note_object(value, depth, name)

    def _refuse_to_change(self, name: str, value: Any) -> None:
        """Refuse a module whose code names an object that is not restored, and may modify such objects."""
        if (
            self._before_first_run
            and self._knowledge.changes
            and name.removeprefix(OuterName.MARK) in self._knowledge.reached
        ):
            kind, entries = type(value).__name__, f" of {len(value)} entries" if hasattr(value, "__len__") else ""
            raise CannotRepeatError(f"{name} is or holds a {kind}{entries}, which it may change and nobody puts back")

    def _note_array(self, array: Any, name: str) -> None:
        """Copy a NumPy array, which has no version that would tell of writes."""
        if array.nbytes > _LARGEST:
            raise CannotRepeatError(f"{name} is an array of {array.nbytes >> 20} MiB, which it may write to unseen")
        if not any(array is known for known, _ in self._arrays):
            self._arrays.append((array, array.copy()))

    def _note_object(self, value: Any, depth: int, name: str) -> None:
        """Save a container or plain object, and enter it."""
        if isinstance(value, nn.Module):
            # A module in a list or a plain object belongs to the block; one that a global or closure names does not.
            if not name.startswith(OuterName.MARK):
                self._visited.discard(id(value))
                self._module(value)
            return
        inside: Any = ()
        if isinstance(value, dict):
            inside = self._keep(value).values()
        elif isinstance(value, list | deque | set):
            inside = self._keep(value)
        elif isinstance(value, tuple | frozenset):
            inside = value
        elif type(value).__module__.partition(".")[0] not in _LIBRARIES:
            own = getattr(value, "__dict__", None)
            inside = [*self._keep(own).values()] if isinstance(own, dict) else []
            if slots := _slots(value):
                self._slotted.append((value, slots))
                inside += slots.values()
        for inner in inside:
            if type(inner) not in _STILL_EXACTLY:
                self._note(inner, depth + 1, name)

    def _keep(self, container: Any) -> Any:
        """Copy a container, or save the length of a long one. Return the container to enter; an empty one if long."""
        if len(container) > _LONGEST:
            self._long.append((container, len(container)))
            return type(container)() if type(container) in (dict, list, set, deque) else {}
        if isinstance(container, dict):
            kept: Any = {key: self._apart(value) for key, value in container.items()}
        else:
            kept = set(container) if isinstance(container, set) else [self._apart(value) for value in container]
        self._containers.append((container, kept))
        return container

    # -- after the forward ------------------------------------------------------------------------------

    def after(self) -> str:
        """Return what the forward changed that cannot be restored; "" for nothing. Call it once, after the forward.

        It also learns which generators and buffers the module changes, so that later snapshots copy them.
        """
        reason = self._states.drew_unseen()
        changed = {
            key for key, versions in self._changing if any(buffer._version != before for buffer, before in versions)
        }
        known = self._knowledge
        unseen = known.changing is not None and not changed <= known.changing
        known.changing = changed if known.changing is None else known.changing | changed
        if reason:
            return f"its forward draws {reason}, which it had not done before"
        if unseen:
            return "its forward changes a buffer that it had not changed before"
        name = self.changed()
        return f"its forward changes {name} in place" if name else ""

    def changed(self) -> str:
        """Return the name of a watched parameter, buffer or input that was changed since; "" for none."""
        for name, tensor, version, address in self._watched:
            if tensor._version != version or (address is not None and tensor.data_ptr() != address):
                return name
        return ""

    # -- restoring --------------------------------------------------------------------------------------

    def again(self, module: nn.Module, args: Any) -> ForwardState:
        """Return a snapshot of the present state that covers everything this one will overwrite."""
        now = ForwardState(self._knowledge, module, args, before_first_run=False)
        # The repetition also overwrites objects that the module had in the forward and has no longer.
        seen = {id(container) for container, _ in now._containers}
        for container, _ in (*self._containers, *self._buffers):
            if id(container) not in seen:
                now._keep(container)
        for array, _ in self._arrays:
            now._note_array(array, "an array")
        slotted = {id(thing) for thing, _ in now._slotted}
        now._slotted += [(thing, _slots(thing)) for thing, _ in self._slotted if id(thing) not in slotted]
        now._states.cover(self._states)
        return now

    def put_back(self) -> None:
        """Restore everything.

        Raises:
            CannotRepeatError: A container that was too long to copy has changed its length.
        """
        for container, kept in self._containers:
            _refill(container, kept)
        for container, length in self._long:
            if isinstance(container, list) and len(container) > length:
                del container[length:]
            if len(container) != length:
                raise CannotRepeatError(f"a {type(container).__name__} of {length} entries was changed")
        for buffers, copies in self._buffers:
            buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in copies.items()})
        for place, value in self._names:
            place.write(value)
        for array, contents in self._arrays:
            if array.flags.writeable:
                array[...] = contents
        for thing, slots in self._slotted:
            for name, value in slots.items():
                object.__setattr__(thing, name, value)
        self._states.put_back()
        # Only if needed: setting it makes the value unusable that another thread reads at the same moment.
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)

    def moved_unseen(self) -> bool:
        """Return whether the repetition drew from a generator whose state was not copied."""
        return self._states.moved()


def _is_put_back(value: Any) -> bool:
    """Return whether the contents of a container or object are restored: not if it is long, or of certain libraries."""
    kind = type(value)
    if isinstance(value, dict | list | deque | set) and len(value) > _LONGEST:
        return False
    return kind.__module__ not in _NOT_ENTERED and kind.__name__ not in ("_local", "bytearray")


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory and version without its graph, but with the same `requires_grad`."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_(tensor.requires_grad)


def _slots(thing: Any) -> dict[str, Any]:
    """Return the attributes that an object has in `__slots__`."""
    names = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def _refuse_hooks(module: nn.Module) -> None:
    """Raise `CannotRepeatError` if the script has forward hooks on a module."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for hook in hooks.values():
            where = getattr(hook, "__module__", None) or type(hook).__module__
            # hasten's own hooks may run twice: the Trainer has some, to see which modules its first step calls.
            if not str(where).startswith(("torch.", "hasten.")):
                raise CannotRepeatError(f"its {type(module).__name__} has a forward hook, which would run twice")


def _refill(container: Any, kept: Any) -> None:
    """Restore a container's entries, which are the very same objects as before."""
    if isinstance(container, dict):
        # Compare in C, since this is done for each module: the same keys and values, in the same order.
        same = len(container) == len(kept) and all(map(is_, container, kept))
        if not same or not all(map(is_, container.values(), kept.values())):
            kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
            kind.clear(container)
            kind.update(container, kept)
    elif len(container) != len(kept) or any(now is not then for now, then in zip(container, kept, strict=True)):
        container.clear()
        container.update(kept) if isinstance(container, set) else container.extend(kept)
