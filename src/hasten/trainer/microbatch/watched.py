"""Watches torch's losses for means over something other than samples."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_BY_CLASS = (functional.cross_entropy, functional.nll_loss)


class Watched(TorchFunctionMode):
    """Sees calls of F.cross_entropy and F.nll_loss while it is entered: the two whose mean is not one over samples.

    The others of torch divide by all entries, weights and `pos_weight` of binary cross entropies among them. Modules
    that the script has compiled are left alone: what they call would be compiled once more.

    Args:
        module: Whose step is watched.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._off = compiles(module)
        self._calls = 0
        self._sizes: set[int] = set()
        self._ratios: set[float] = set()
        self._weighed = ""
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
        """A part of so many samples was computed."""
        if self._calls and samples:
            self._sizes.add(samples)
            self._ratios.add(self._calls / samples)
        for name, target, ignore_index in self._targets:
            kept = target != ignore_index
            if not bool(kept.all()):
                self._ignored.add((name, ignore_index))
            if samples and not target.numel() % samples:
                self._counts |= {float(one) for one in kept.reshape(samples, -1).sum(1).tolist()}
            elif (name, ignore_index) in self._ignored:
                self._counts |= {-1.0, -2.0}  # nobody knows whose targets these are
        self._calls, self._targets = 0, []

    def wrong(self) -> tuple[str, str] | None:
        """Return what is no mean over samples, and what to do; None: nothing was seen."""
        if len(self._ratios) == 1 < len(self._sizes):
            # As many calls as samples, however many these are: a loss a sample, and then most likely their mean.
            return None
        if self._weighed:
            what = f"{self._weighed} with class weights divides by the weights of its targets, not by samples"
            return what, _fix("weight[batch[1]].sum()")
        if self._ignored and len(self._counts) > 1:
            name, ignore_index = min(self._ignored)
            what = f"{name} divides by the targets that are not ignored, of which samples have different numbers"
            return what, _fix(f"(batch[1] != {ignore_index}).sum()")
        return None

    def _see(self, func: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        target = options["target"]
        self._calls += 1
        if not options["input"].requires_grad or target.is_floating_point():  # no part of the loss, or probabilities
            return
        if options["reduction"] != "mean" or options["size_average"] is False or options["reduce"] is False:
            return
        name, weight = f"F.{func.__name__}", options["weight"]
        if weight is not None and bool((weight != weight.flatten()[0]).any()):
            self._weighed = name
        self._targets.append((name, target.detach(), options["ignore_index"]))


def compiles(module: torch.nn.Module) -> bool:
    """Whether the script has compiled a part of a module: under a mode of torch's it would be compiled once more."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())


def _fix(terms: str) -> str:
    return (
        "define loss_terms(self, batch) in the module: what the mean of this batch divides by; here most likely"
        f" `return {terms}`, or `return len(batch[1])` if the loss is a mean over samples after all"
    )
