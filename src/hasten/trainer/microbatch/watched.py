"""Watch calls of torch's losses for means over something other than samples."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_BY_CLASS = (functional.cross_entropy, functional.nll_loss)


class WatchedLosses(TorchFunctionMode):
    """Watches calls of F.cross_entropy and F.nll_loss while it is entered: the two whose mean may not be over samples.

    torch's other losses divide by the number of elements, even binary cross entropy with weights or `pos_weight`.
    Modules with compiled parts are not watched: they would be compiled once more under this mode.

    Args:
        module: The module whose step is watched.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._off = compiles(module)
        self._calls = 0
        self._sizes: set[int] = set()
        self._ratios: set[float] = set()
        self._weighted_loss = ""
        self._targets: list[tuple[str, torch.Tensor, int]] = []
        self._ignored: set[tuple[str, int]] = set()
        self._counts: set[float] = set()

    def __enter__(self) -> Any:
        return self if self._off else super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if not self._off:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BY_CLASS:
            self._see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def part(self, samples: int) -> None:
        """Evaluate the calls of a part that had this many samples."""
        if self._calls and samples:
            self._sizes.add(samples)
            self._ratios.add(self._calls / samples)
        for name, target, ignore_index in self._targets:
            counted = target != ignore_index
            if not bool(counted.all()):
                self._ignored.add((name, ignore_index))
            if samples and not target.numel() % samples:
                self._counts |= {float(count) for count in counted.reshape(samples, -1).sum(1).tolist()}
            elif (name, ignore_index) in self._ignored:
                self._counts |= {
                    -1.0,
                    -2.0,
                }  # targets do not map to samples: assume that samples have different numbers
        self._calls, self._targets = 0, []

    def wrong(self) -> tuple[str, str] | None:
        """Return what is not a mean over samples, and what to do; None: nothing was seen."""
        if len(self._ratios) == 1 < len(self._sizes):
            # One call per sample, whatever the size of the part: most likely the step averages these losses itself.
            return None
        if self._weighted_loss:
            problem = f"{self._weighted_loss} with class weights divides by the weights of its targets, not by samples"
            return problem, _fix("weight[batch[1]].sum()")
        if self._ignored and len(self._counts) > 1:
            name, ignore_index = min(self._ignored)
            problem = f"{name} divides by the targets that are not ignored, of which samples have different numbers"
            return problem, _fix(f"(batch[1] != {ignore_index}).sum()")
        return None

    def _see(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note a call of a loss."""
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        target = options["target"]
        self._calls += 1
        if (
            not options["input"].requires_grad or target.is_floating_point()
        ):  # not part of the loss, or class probabilities
            return
        if options["reduction"] != "mean" or options["size_average"] is False or options["reduce"] is False:
            return
        name, weight = f"F.{func.__name__}", options["weight"]
        if weight is not None and bool((weight != weight.flatten()[0]).any()):
            self._weighted_loss = name
        self._targets.append((name, target.detach(), options["ignore_index"]))


def compiles(module: torch.nn.Module) -> bool:
    """Return whether the script has compiled a part of a module: under a torch mode it would be compiled again."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())


def _fix(terms: str) -> str:
    """Return the advice to define `loss_terms`."""
    return (
        "define loss_terms(self, batch) in the module: what the mean of this batch divides by; here most likely"
        f" `return {terms}`, or `return len(batch[1])` if the loss is a mean over samples after all"
    )
