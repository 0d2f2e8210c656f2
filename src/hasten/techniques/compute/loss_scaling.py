"""Dynamic loss scaling for fp16, invisible to what comes after a backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from hasten.techniques.base import Call


class LossScaler:
    """Dynamic loss scaling around `backward`, invisible to what comes after it.

    Gradients are brought back to their true size right after each backward, so clipping and logging see what
    they expect. The scale is a power of two, which makes the way there and back exact. Where a parameter has
    hooks, which would see scaled gradients, nothing is scaled.
    """

    def __init__(self) -> None:
        self.scale = 2.0**15
        self._clean_steps = 0
        self._overflows: Any = None  # on the device: backwards so far that overflowed
        self._adapted = 0  # how many of them have made the scale smaller
        self._answered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._rests = False

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Scale nothing meanwhile."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def backward(self, call: Call, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """`call`, which is `torch.autograd.backward` or wraps it, on the scaled loss."""
        import torch

        single = isinstance(tensors, torch.Tensor)
        roots = [tensors] if single else list(tensors)
        leaves = _leaves(roots)
        if self._rests or any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves):
            call(tensors, *args, **kwargs)
            return
        before = _gradients(leaves)
        if before:  # accumulated so far: scaled along, so that one division serves the sum
            torch._foreach_mul_(before, self.scale)
        scaled = [root * self.scale for root in roots]
        call(scaled[0] if single else scaled, *args, **kwargs)
        by_device: dict[Any, list[Any]] = {}
        for gradient in _gradients(leaves):
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            overflow = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1.0 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
            self._overflows = overflow if self._overflows is None else self._overflows + overflow.to(self._overflows)

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how many steps it has held; for between two steps."""
        return {"scale": self.scale, "clean_steps": self._clean_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, with no overflow that awaits its step."""
        self.scale, self._clean_steps = float(state["scale"]), int(state["clean_steps"])
        self._overflows, self._adapted = None, 0
        self._answered.clear()

    def joined(self, optimizer: Any) -> None:
        """An optimizer was built: overflows before that are none of its own."""
        self._answered[optimizer] = self._adapted

    def may_step(self, optimizer: Any) -> bool:
        """Whether no backward overflowed since this optimizer last asked; adapts the scale.

        Reads one number from the device, as GradScaler does.
        """
        overflows = 0 if self._overflows is None else int(self._overflows.item())
        if overflows > self._adapted:
            self._adapted, self._clean_steps = overflows, 0
            self.scale = max(1.0, self.scale / 2)
        else:
            self._clean_steps += 1
            if self._clean_steps >= 2000:
                self.scale, self._clean_steps = min(self.scale * 2, 2.0**24), 0
        fine = overflows == self._answered.get(optimizer, 0)
        self._answered[optimizer] = overflows
        return fine


def _gradients(leaves: list[Any]) -> list[Any]:
    """The leaves' gradients; of sparse ones the values."""
    present = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in present]


def _leaves(roots: list[Any]) -> list[Any]:
    """The leaf tensors that a backward from `roots` accumulates into."""
    found: dict[int, Any] = {}
    seen, queue = set(), [root.grad_fn for root in roots if root.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        queue += [following for following, _ in node.next_functions]
    return list(found.values())
