"""A model's forward wrapped by techniques: the same object, called as before."""

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

_SLOT = "_compiled_call_impl"  # what `Module.__call__` calls in place of the module's own way, if it is set


class WrappedForward:
    """Leads the calls of one model through the techniques of a Run.

    It stands where `model.compile()` puts compiled code: torch asks there on every call anyway, so that a model without
    techniques in its forward pays nothing, and hooks, pickles and copies of the model stay what they are.
    """

    def __init__(self, model: Any, run: Run, cast: AutocastContext) -> None:
        self._model = weakref.ref(model)
        self._run, self._cast = run, cast
        self._inner = vars(model).get(_SLOT)  # what the person's own `model.compile()` put there
        self._kind = type(model)
        self._forward: Call | None = None
        vars(model)[_SLOT] = self  # not by setattr: what `torch.compile(model)` gives would hand it on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        model = self._model()
        if self._forward is not None:
            return self._forward(model, args, kwargs)
        return self._first(model, args, kwargs)

    def _first(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let techniques change the model, as they do once its first inputs are known; then stand aside if none wraps.

        `compile` looks where this object stands, and puts compiled code there.
        """
        self.remove()
        self._run.model(model, args)
        self._inner = vars(model).get(_SLOT)
        if not self._run.acting("forward"):
            return model(*args, **kwargs)
        self._forward = self._wrapped()
        vars(model)[_SLOT] = self
        return self._forward(model, args, kwargs)

    @property
    def compiled(self) -> Any:
        """The compiled code behind the techniques; None: the model is not compiled."""
        return self._inner

    def _wrapped(self) -> Call:
        forward = self._plain
        for technique in self._run.acting("forward"):
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
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return self._kind._call_impl(model, *args, **kwargs)

    def remove(self) -> None:
        """Put back what stood there, unless the person has put something else there since."""
        model = self._model()
        if model is not None and vars(model).get(_SLOT) is self:
            if self._inner is None:
                del vars(model)[_SLOT]
            else:
                vars(model)[_SLOT] = self._inner

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing in a copy or a pickle of the model: it is a plain model."""
        return type(None), ()


class AutocastContext:
    """The context of `hasten.autocast`, and what tells a model that it is within.

    Args:
        precision: The technique; None for float32.
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
        """Note where a model computes."""
        self._device = device_to_cast(model, torch) or self._device
        if self._dtype is not None and self._device in ("cpu", "cuda"):
            self._spare = self._autocast()

    def _autocast(self) -> Any:
        # With torch's cache of cast weights, unlike the technique: the numbers are those of torch.autocast by hand.
        return torch.autocast(self._device, self._dtype)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that casts, or one that does nothing."""
        return contextlib.nullcontext() if self._spare is None else self

    def __enter__(self) -> None:
        """Cast from here on; one may be within another."""
        assert self.precision is not None
        assert self._wide is not None
        if not self.precision.acted:
            self.precision.did("hasten.autocast")
        # To make torch's context takes as long as to enter it, so the outermost is always the same.
        entered = self._autocast() if self._entered else self._spare
        self._entered.append(entered)
        self._wide.__enter__()
        entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        """Cast no more, or as the context around this one."""
        self._entered.pop().__exit__(*error)
        if self._wide is not None:
            self._wide.__exit__(*error)

    def unless_by_hand(self, casting: Call, plain: Call) -> Call:
        """Return a forward that leaves casting to `hasten.autocast` within it.

        The technique would take it for the script's own autocast, and let go.
        """

        def forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (plain if self._entered else casting)(model, args, kwargs)

        return forward

    def leave(self) -> None:
        """Put torch's ways to draw random numbers back."""
        if self._wide is not None:
            self._wide.leave()
            self._spare = None
