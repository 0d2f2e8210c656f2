"""Dynamic loss scaling for fp16, invisible to what comes after a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from hasten.techniques.base import Call
from hasten.techniques.compute.finite_buffers import FiniteBuffers
from hasten.techniques.compute.gradient_reads import GradientReads
from hasten.techniques.gradient_access import own_function

_fine: set[type] = set()  # kinds of nodes that are torch's own
_UNASKED = 8  # backwards without a step after which overflows are looked for: each look waits for the device


class LossScaler:
    """Dynamic loss scaling around `backward`, invisible to what comes after it.

    Gradients are brought back to their true size right after each backward, so clipping and logging see what
    they expect. The scale is a power of two, which makes the way there and back exact. Where something would see
    gradients inside a backward, which are scaled, or takes them from elsewhere, nothing is scaled any more.

    Args:
        give_up: Called with the reason once nothing may be scaled, nor computed in fp16, any more.
        dropped: Called when gradients that overflowed were dropped by the script, with no step made of them.

    Attributes:
        scale: What a loss is multiplied by.
        stop_reason: Why nothing is scaled any more; "" while it is.
        paused: Whether nothing is scaled for now, so that no step can have overflowed.
        buffers: What keeps overflows of a forward out of the models' buffers; asked before each forward in fp16.
    """

    def __init__(
        self, give_up: Callable[[str], None] = lambda why: None, dropped: Callable[[], None] = lambda: None
    ) -> None:
        self.scale = 2.0**15
        self.stop_reason = ""
        self.paused = False
        self._give_up = give_up
        self._dropped = dropped
        self._unasked = 0  # backwards since an optimizer last asked
        self._clean_steps = 0
        self._overflows: Any = None  # on the device: backwards so far that overflowed
        self._adapted = 0  # how many of them have made the scale smaller
        self._answered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._inside = False
        self._forwards = 0  # training forwards since the last backward
        self._read = False  # whether the script has read gradients of a backward before their step
        self.reads = GradientReads(self._show)
        self.buffers = FiniteBuffers()
        self._in_flight = True  # whether the next backward may go through a graph in fp16

    def leave(self, why: str) -> None:
        """Scale nothing from here on. Of the next backward, whose forward may be in fp16, overflows still count."""
        if not self.stop_reason:
            self.stop_reason = why
            self._give_up(why)

    def backward(self, call: Call, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """`call`, which is `torch.autograd.backward` or wraps it, on the scaled loss."""
        import torch

        # A backward inside a backward (a reentrant checkpoint) has a scaled gradient already.
        if self._inside or (self.stop_reason and not self._in_flight):
            call(tensors, *args, **kwargs)
            return
        single = isinstance(tensors, torch.Tensor)
        roots = [tensors] if single else list(tensors)
        leaves, function = _leaves(roots)
        self._forwards = 0
        self._look_for_dropped()
        if not self.stop_reason and (why := function or _reason(leaves, args, kwargs) or self._unguarded(leaves)):
            self.leave(why)
        if self.stop_reason:
            self._in_flight = False
            call(tensors, *args, **kwargs)
            if not _create_graph(args, kwargs):
                self._unscale(leaves, 1.0)
                self._expect_reads(False)
            return
        scale, self._inside = self.scale, True
        before = _gradients(leaves)
        if before:  # accumulated so far: scaled along, so that one division serves the sum
            torch._foreach_mul_(before, scale)
        # In 32 bits: a loss in fp16 times the scale is infinite.
        scaled = [(root.float() if root.itemsize < 4 else root) * scale for root in roots]
        try:
            call(scaled[0] if single else scaled, *args, **kwargs)
        except BaseException:
            torch._foreach_mul_(_gradients(leaves), 1.0 / scale)
            raise
        finally:
            self._inside = False
        self._unscale(leaves, scale)
        # Of gradients that were there before, the script may hold what it need not read again: views of one tensor.
        self._expect_reads(bool(before) and (self._unasked == 1 or self._read))

    def _expect_reads(self, at_once: bool) -> None:
        """Keep an overflow of this backward from who reads gradients before the step."""
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return
        if at_once:
            self._show(True)
        self.reads.expect()

    def _show(self, harmless: bool) -> None:
        """Gradients are about to be read: take out what overflowed. Waits for the device."""
        self._read = self._read or not harmless
        if self._overflows is None or int(self._overflows.item()) <= self._adapted:
            return
        stepped = [
            parameter
            for optimizer in self._answered
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        for gradient in _gradients(stepped):
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        if not harmless:
            self.leave("the script itself reads gradients before they are stepped, and they overflowed in fp16")

    def looked_for(self) -> bool:
        """Note a training forward, and return whether its output is to be looked at: no backward follows for long."""
        self._forwards += 1
        return self._forwards >= _UNASKED and not self._forwards & (self._forwards - 1)

    def _unscale(self, leaves: list[Any], scale: float) -> None:
        """Divide gradients by the scale, and count an overflow if one is not finite."""
        import torch

        by_device: dict[Any, list[Any]] = {}
        for gradient in _gradients(leaves):
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            overflow = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1.0 / scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
            self._overflows = overflow if self._overflows is None else self._overflows + overflow.to(self._overflows)

    def _unguarded(self, leaves: list[Any]) -> str:
        """Why nobody would keep an overflow from what uses a gradient; "" where optimizers do that step them all.

        By hand (`p -= lr * p.grad`), by an optimizer that is none of torch's, or one that was copied or unpickled, the
        infinite gradient would be taken for a true one. So would an input's, of which an adversarial example is made.
        """
        stepped = {
            id(parameter)
            for optimizer in self._answered
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        count = sum(id(leaf) not in stepped for leaf in leaves)
        if not count:
            return ""
        return f"no optimizer of torch's steps {count} of the tensors that get gradients, so an overflow would be used"

    def _look_for_dropped(self) -> None:
        """Adapt the scale where the script itself drops gradients that overflowed, and never comes to a step.

        (`if not norm.isfinite(): optimizer.zero_grad(); continue`) With the same scale the next would overflow too.
        """
        self._unasked += 1
        if self.stop_reason or self._unasked == 1 or self._overflows is None:
            return
        nothing_left = all(
            parameter.grad is None
            for optimizer in self._answered
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        if not nothing_left and self._unasked % _UNASKED:
            return
        overflows = int(self._overflows.item())
        if overflows > self._adapted:
            self.buffers.restore()
            self._adapt(overflows)
            self._dropped()
        if nothing_left:  # they are gone with their gradients: a step that comes is not made of them
            for optimizer in self._answered:
                self._answered[optimizer] = overflows
            self._unasked = 1

    def _adapt(self, overflows: int) -> None:
        """Make the scale smaller, or go back to float32 where it cannot be."""
        self._adapted, self._clean_steps = overflows, 0
        if self.scale == 1.0:
            self.leave("numbers overflow in fp16 with no scale at all: in the forward, or in gradients of this size")
        self.scale = max(1.0, self.scale / 2)

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how many steps it has held; for between two steps."""
        state: dict[str, Any] = {"scale": self.scale, "clean_steps": self._clean_steps}
        return {**state, "gone": self.stop_reason} if self.stop_reason else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, with no overflow that awaits its step."""
        self.scale, self._clean_steps = float(state["scale"]), int(state["clean_steps"])
        self._overflows, self._adapted = None, 0
        self.buffers.settle()
        for optimizer in self._answered:
            self._answered[optimizer] = 0
        if state.get("gone"):
            self.leave(str(state["gone"]))
            self._in_flight = False

    def counted(self) -> tuple[Any, ...]:
        """Return what backwards change here, for `recount`."""
        return self._overflows, self._adapted, self._unasked, self.scale, self._clean_steps

    def recount(self, counted: tuple[Any, ...]) -> None:
        """Go back to what `counted` gave: the backwards since are done again."""
        self._overflows, self._adapted, self._unasked, self.scale, self._clean_steps = counted

    def resume(self) -> None:
        """Scale again behind a pause; call it between two steps."""
        self.paused, self._unasked = False, 0
        self.load_state_dict(self.state_dict())

    def joined(self, optimizer: Any) -> None:
        """An optimizer was built: overflows before that are none of its own."""
        self._answered[optimizer] = self._adapted

    def _read_counts(self) -> tuple[int, int]:
        """Return how many backwards overflowed so far, and a number above 0 if buffers are not finite."""
        import torch

        spoilt = list(self.buffers.overflows())
        if self._overflows is None:
            return 0, sum(int(count.item()) for count in spoilt)
        overflows, *rest = torch.cat([self._overflows, *(count.to(self._overflows) for count in spoilt)]).tolist()
        return int(overflows), int(sum(rest))

    def may_step(self, optimizer: Any) -> bool:
        """Whether no backward overflowed since this optimizer last asked; adapts the scale.

        Reads from the device once, as GradScaler does.
        """
        self._unasked = 0
        self.reads.settle()
        overflows, spoilt = self._read_counts()
        if spoilt:
            self.buffers.restore()
        self.buffers.settle()
        if self.stop_reason and not self._in_flight:
            self.buffers.forget()
        if overflows > self._adapted:
            self._adapt(overflows)
        else:
            self._clean_steps += 1
            if self._clean_steps >= 2000:
                self.scale, self._clean_steps = min(self.scale * 2, 2.0**24), 0
        fine = overflows == self._answered.get(optimizer, 0)
        self._answered[optimizer] = overflows
        return fine


def _gradients(leaves: list[Any]) -> list[Any]:
    """The leaves' gradients, each once; of sparse ones the values."""
    present = {id(leaf.grad): leaf.grad for leaf in leaves if leaf.grad is not None}
    return [gradient._values() if gradient.is_sparse else gradient for gradient in present.values()]


def _create_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("create_graph") or (len(args) > 2 and args[2]))


def _reason(leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why scaled gradients would be seen in this backward, or not be brought back behind it; "" if neither."""
    if _create_graph(args, kwargs):
        return "gradients are differentiated again (create_graph)"
    if any(leaf._backward_hooks or _are_watched(leaf) for leaf in leaves):
        return "a hook on a parameter sees its gradient"
    if any(leaf.itemsize < 4 for leaf in leaves):
        return "a parameter is in 16 bits already"
    inputs = kwargs.get("inputs") or ()
    inputs = [inputs] if hasattr(inputs, "is_leaf") else inputs
    return "" if all(getattr(one, "is_leaf", False) for one in inputs) else "gradients inside the graph are asked for"


def _are_watched(leaf: Any) -> bool:
    """Whether a hook other than hasten's own, which only notes that there is a gradient, sees this leaf's."""
    hooks = (leaf._post_accumulate_grad_hooks or {}).values()
    return any(not str(getattr(hook, "__module__", "")).startswith("hasten.") for hook in hooks)


def _leaves(roots: list[Any]) -> tuple[list[Any], str]:
    """The leaf tensors that a backward from `roots` accumulates into, and who of the script's own looks on."""
    leaves: dict[int, Any] = {}
    onlooker = ""
    visited, queue = set(), [root.grad_fn for root in roots if root.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        elif type(node) not in _fine:
            if name := own_function(node):
                onlooker = onlooker or f"the backward of {name} sees its gradient"
            else:
                _fine.add(type(node))
        queue += [following for following, _ in node.next_functions]
    return list(leaves.values()), onlooker
