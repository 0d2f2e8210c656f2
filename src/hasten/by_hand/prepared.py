"""Models, optimizers and loaders that `hasten.setup` prepared with one set of techniques."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hasten import messages
from hasten.by_hand.wrapped_forward import AutocastContext, WrappedForward
from hasten.errors import HastenError
from hasten.loading import changed, with_options, with_techniques
from hasten.plan import Setting
from hasten.run import Run
from hasten.techniques import CATALOGUE, build
from hasten.techniques.replaced import ReplacedFunction


def sorted_by_role(parts: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the models, the optimizers and the loaders among the parts; learning-rate schedules are skipped.

    Raises:
        HastenError: A part is none of these.
    """
    models, optimizers, loaders = [], [], []
    for place, part in enumerate(parts):
        if isinstance(part, torch.nn.Module):
            models.append(part)
        elif isinstance(part, torch.optim.Optimizer) or (hasattr(part, "param_groups") and hasattr(part, "step")):
            optimizers.append(part)
        elif isinstance(part, LRScheduler | ReduceLROnPlateau):
            continue
        elif hasattr(part, "__iter__") and not isinstance(part, torch.Tensor | list | tuple | Mapping | str):
            loaders.append(part)
        else:
            raise HastenError(
                f"argument {place + 1} of hasten.setup is a {type(part).__name__}: no module, optimizer, loader or "
                "schedule",
                "pass each of them separately: model, optimizer, loader = hasten.setup(model, optimizer, loader)",
            )
    return models, optimizers, loaders


class _LoudRun(Run):
    """A Run that reports at once what it skips, since a user's own loop has no report at its end."""

    def skip(self, what: str, error: BaseException) -> None:
        """Record what could not be done, and print it once."""
        before = len(self.skipped)
        super().skip(what, error)
        for line in self.skipped[before:]:
            messages.tell(f"hasten: skipped {line}")


class Prepared:
    """Models, optimizers and loaders under one set of techniques.

    Args:
        settings: Technique name -> setting.
        remarks: Remarks to print, about settings that can have no effect here.
    """

    def __init__(self, settings: dict[str, Setting], remarks: list[str]) -> None:
        self.settings = settings
        self._run = _LoudRun(build(settings, CATALOGUE))
        precision = next((technique for technique in self._run.techniques if technique.name == "precision"), None)
        self._cast = AutocastContext(precision)
        self._wrapped_forwards: list[WrappedForward] = []
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._backward: ReplacedFunction | None = None
        for line in remarks:
            messages.tell(f"hasten: {line}")
        self._run.process()
        if self._run.techniques_at("backward"):
            # Replace torch.autograd.backward, so that techniques act on a plain `loss.backward()` (loss scaling, say)
            # as on `hasten.backward(loss)`.
            self._backward = ReplacedFunction(
                torch.autograd, "backward", lambda plain: self._run.wrap("backward", plain)
            )
            self._backward.put_in_place()
        if settings:
            atexit.register(self._say_idle)

    def add(self, models: list[Any], optimizers: list[Any], loaders: list[Any]) -> dict[int, Any]:
        """Install the techniques in these parts. Return the replaced loaders, by the id of the original."""
        self._refuse_late_conversion(models, optimizers)
        for model in models:
            if model not in self._models:
                self._models.add(model)
                weakref.finalize(model, self._run.forget, id(model)).atexit = False
                self._cast.add(model)
                for technique in self._run.techniques:
                    technique.prepare(model)
                if self._run.techniques_at("model") or self._run.techniques_at("forward"):
                    self._wrapped_forwards.append(WrappedForward(model, self._run, self._cast))
        for optimizer in optimizers:
            self._run.optimizer(optimizer)
        changed = {}
        for loader in loaders:
            if isinstance(loader, DataLoader):
                changed[id(loader)] = with_passes(with_options(loader, self._run), self._run)
        return changed

    def _refuse_late_conversion(self, models: list[Any], optimizers: list[Any]) -> None:
        """Raise a HastenError if a model is to be converted whose optimizer has state in the old dtype already."""
        kind = str(self.settings.get("precision", ""))
        if kind.endswith("-true") and any(optimizer.state for optimizer in optimizers):
            raise HastenError(
                f"precision={kind!r} converts the model, and an optimizer holds state of the former type already",
                "load the optimizer's state after hasten.setup",
            )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of `hasten.autocast`."""
        return self._cast.context()

    def end(self, announces: bool = False) -> None:
        """Remove what was installed.

        Args:
            announces: Whether to print that the techniques end, if one of the models is still in use.
        """
        if announces and self.settings and len(self._models):
            names = ", ".join(self.settings)
            messages.tell(f"hasten: another setup with other techniques: {names} of the former one end here")
        for wrapped in self._wrapped_forwards:
            wrapped.remove()
        self._wrapped_forwards.clear()
        if self._backward is not None:
            self._backward.put_back()
        for technique in self._run.techniques:
            technique.off()
            technique.teardown()
            technique.restore()
        self._cast.leave()
        if self.settings:
            self._say_idle()
            atexit.unregister(self._say_idle)

    def _say_idle(self) -> None:
        """Print which techniques found nothing to act on, or left something alone."""
        for line in (*self._run.idle(), *self._run.left_alone()):
            messages.tell(f"hasten: {line}")


def with_passes(loader: DataLoader[Any], run: Run) -> DataLoader[Any]:
    """Return a copy of the loader with techniques in its passes; the loader itself if no technique acts there."""
    in_passes = run.techniques_at("batches") or (run.techniques_at("fetcher") and not loader.num_workers)
    if not in_passes:
        return loader
    loader = changed(loader)
    loader.__dict__["_hasten_run"] = run
    kind: Any = type(loader)
    loader.__class__ = _with_passes(kind)
    return loader


@functools.cache
def _with_passes(kind: Any) -> Any:
    """Return a subclass of a loader class whose passes go through the techniques of a Run."""

    class Passes(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            run: Run = self._hasten_run
            fetch = with_techniques(iterator, run)
            return _Pass(iterator, fetch) if run.techniques_at("batches") else iterator

    Passes.__name__, Passes.__qualname__, Passes.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Passes


class _Pass:
    """Proxy of a loader's iterator that fetches batches through techniques; all else is the iterator's."""

    def __init__(self, iterator: Iterator[Any], fetch: Callable[[], Any]) -> None:
        self._iterator, self._fetch = iterator, fetch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._fetch()

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
