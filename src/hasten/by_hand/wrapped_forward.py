"""Wrap a model's forward by techniques, while the model remains the same object and is called as before."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from hasten.run import Run
from hasten.techniques import Technique
from hasten.techniques.base import Call
from hasten.techniques.compute.precision import device_to_cast
from hasten.techniques.float32_draws import Float32Draws

_SLOT = "_compiled_call_impl"  # attribute that `Module.__call__` calls in place of `_call_impl`, if it is set


class WrappedForward:
    """Routes the calls of one model through the techniques of a Run.

    It is stored in the attribute where `model.compile()` stores compiled code. torch reads that attribute in every call
    anyway, so a model without techniques in its forward has no overhead, and the model's hooks, pickles and copies are
    unaffected.
    """

    def __init__(self, model: Any, run: Run, cast: AutocastContext) -> None:
        self._model = weakref.ref(model)
        self._run, self._cast = run, cast
        self._inner = vars(model).get(_SLOT)  # compiled code of the user's own `model.compile()`
        self._kind = type(model)
        self._forward: Call | None = None
        # Not by setattr: the wrapper that `torch.compile(model)` returns would set it on the inner model.
        vars(model)[_SLOT] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model through the techniques."""
        model = self._model()
        if self._forward is not None:
            return self._forward(model, args, kwargs)
        return self._first(model, args, kwargs)

    def _first(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the first call: let techniques change the model, as its inputs are known now, and wrap the forward.

        This object is removed first, because the technique `compile` stores compiled code in the same attribute. It
        remains removed if no technique wraps the forward.
        """
        self.remove()
        self._run.model(model, args)
        self._inner = vars(model).get(_SLOT)
        if not self._run.techniques_at("forward"):
            return model(*args, **kwargs)
        self._forward = self._wrapped()
        vars(model)[_SLOT] = self
        return self._forward(model, args, kwargs)

    @property
    def compiled(self) -> Any:
        """Compiled code that the techniques wrap; None if the model is not compiled."""
        return self._inner

    def _wrapped(self) -> Call:
        """Return the forward, wrapped by each technique that acts there; one that fails is left out."""
        forward = self._plain
        for technique in self._run.techniques_at("forward"):
            inner = forward
            try:
                forward = technique.forward(inner)
            except Exception as error:  # a technique never breaks a script
                self._run.failed(technique, error)
                continue
            if technique is self._cast.precision:
                forward = self._cast.unless_by_hand(forward, inner)
        return forward

    def _plain(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model without techniques: its compiled code, or torch's way."""
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return self._kind._call_impl(model, *args, **kwargs)

    def remove(self) -> None:
        """Restore the attribute, unless the user has stored something else there since."""
        model = self._model()
        if model is not None and vars(model).get(_SLOT) is self:
            if self._inner is None:
                del vars(model)[_SLOT]
            else:
                vars(model)[_SLOT] = self._inner

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None, so that copies and pickles of the model are plain models."""
        return type(None), ()


class AutocastContext:
    """Context of `hasten.autocast`, which also tells wrapped models whether it is entered.

    Args:
        precision: The technique `precision`; None for float32.
    """

    def __init__(self, precision: Technique | None) -> None:
        self.precision = precision
        self._dtype = None
        if precision is not None and str(precision.setting).endswith("-mixed"):
            self._dtype = torch.bfloat16 if precision.setting == "bf16-mixed" else torch.float16
        self._wide = None if self._dtype is None else Float32Draws()
        self._device = ""
        self._spare: Any = None
        self._entered: list[Any] = []

    def add(self, model: Any) -> None:
        """Note the device on which a model computes, to cast there."""
        self._device = device_to_cast(model, torch) or self._device
        if self._dtype is not None and self._device in ("cpu", "cuda"):
            self._spare = self._autocast()

    def _autocast(self) -> Any:
        # With torch's cache of cast weights, unlike the technique: results are those of a torch.autocast in the script.
        return torch.autocast(self._device, self._dtype)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return this context, or one without effect if nothing is to be cast."""
        return contextlib.nullcontext() if self._spare is None else self

    def __enter__(self) -> None:
        """Start casting. Contexts may be nested."""
        assert self.precision is not None
        assert self._wide is not None
        if not self.precision.acted:
            self.precision.did("hasten.autocast")
        # Creating torch's context takes as long as entering it, so the outermost one is reused.
        entered = self._autocast() if self._entered else self._spare
        self._entered.append(entered)
        self._wide.__enter__()
        entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop casting, unless an outer context is still entered."""
        self._entered.pop().__exit__(*error)
        if self._wide is not None:
            self._wide.__exit__(*error)

    def unless_by_hand(self, casting: Call, plain: Call) -> Call:
        """Return a forward that leaves casting to `hasten.autocast` while that is entered.

        The technique would take that context for the script's own autocast, and stop acting.
        """

        def forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (plain if self._entered else casting)(model, args, kwargs)

        return forward

    def leave(self) -> None:
        """Restore torch's random functions, which were replaced to draw in float32."""
        if self._wide is not None:
            self._wide.leave()
            self._spare = None
