"""Validation, test and prediction: the loops without a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hasten import loading, messages
from hasten.trainer import feeding, signals, sources, steps

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.logged import Board
    from hasten.trainer.sources import Combined
    from hasten.trainer.trainer import Trainer

_STEP = {"validate": "validation", "test": "test", "predict": "predict"}


@contextlib.contextmanager
def without_gradients(inference_mode: bool) -> Iterator[None]:
    """No graphs; with `inference_mode` no version counters either, unless processes must exchange tensors."""
    with torch.inference_mode() if inference_mode else torch.no_grad():
        yield


class _Modes:
    """Which submodules were in train mode, to put them back."""

    def __init__(self, module: Any) -> None:
        self._training = [(part, part.training) for part in module.modules()]

    def restore(self) -> None:
        for part, training in self._training:
            part.training = training


def _check_dataloader_idx(trainer: Trainer, hooks: Hooks, stage: str, several: bool) -> None:
    import inspect

    for name in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
        if name == "predict_step" and hooks.of_module(name) is None:
            continue
        if not name.endswith("_step") and hooks.of_module(name) is None:
            continue
        parameters = inspect.signature(getattr(trainer.model, name)).parameters
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        full_name = f"{type(trainer.model).__name__}.{name}()"
        takes = "dataloader_idx" in parameters
        if several and not takes and not variadic:
            raise RuntimeError(
                f"there are several {stage} loaders, but no `dataloader_idx` argument in `{full_name}`: add"
                " `dataloader_idx=0` to its arguments"
            )
        if not several and takes and parameters["dataloader_idx"].default is inspect.Parameter.empty:
            raise RuntimeError(
                f"there is a single {stage} loader, but you have included `dataloader_idx` in `{full_name}`: give it a"
                " default, `dataloader_idx=0`"
            )


def evaluate(
    trainer: Trainer,
    hooks: Hooks,
    board: Board,
    source: Combined,
    limits: list[float],
    kind: str,
    before_end: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Run the module over validation or test loaders.

    Args:
        trainer: Whose it is.
        hooks: To call.
        board: Where values are logged.
        source: The loaders.
        limits: Batches of each that are used.
        kind: "validate" or "test".
        before_end: Called when only the hooks of its end are left.

    Returns:
        What was logged, by loader.
    """
    stage = _STEP[kind]
    module = trainer.model
    own_step = getattr(module, f"{stage}_step")
    draws = steps.draws(own_step)
    several = source.mode == "sequential" and len(source.leaves) > 1 and not draws
    if not draws:
        _check_dataloader_idx(trainer, hooks, stage, several)
    modes = _Modes(module)
    _set_eval(hooks, module, stage)
    _set_epoch(trainer, source)
    board.reset()
    hooks.call(f"on_{stage}_start")
    hooks.call(f"on_{stage}_epoch_start")
    step = steps.called(trainer, f"{stage}_step", own_step)
    with_idx = steps.takes_batch_idx(own_step)
    preparing = [] if draws else feeding.preparing(trainer, stage)
    on_start, on_end = hooks.of(f"on_{stage}_batch_start"), hooks.of(f"on_{stage}_batch_end")
    names = module.__dict__
    results: list[dict[str, Any]] = []
    before = 0
    progress, stopping = trainer.progress, trainer.engine.stopping
    progress.evaluated_batches = 0
    seen = progress.batches_seen[f"{trainer.stage.fn}_{kind}"]
    batches = sources.evaluation_batches(source, limits, trainer.engine.run)
    for batch, batch_idx, index in feeding.DrawnInTurn(batches).steps() if draws else batches:
        while before != index:
            results.append(_loader_is_over(trainer, board))
            before += 1
        for prepare in preparing:
            batch = prepare(batch, index)
        places: tuple[Any, ...] = (batch, batch_idx, index) if several else (batch, batch_idx)
        board.begin_batch(batch, index if several else None)
        for hook in on_start:
            hook(*places)
        names["_current_fx_name"] = f"{stage}_step"
        output = step(*places) if with_idx else step(batch, *places[2:])
        names["_current_fx_name"] = None
        for hook in on_end:
            hook(output, *places)
        board.batch = None
        progress.evaluated_batches += 1
        fresh = trainer.collect()
        if not trainer.sanity_checking and fresh:
            trainer.log(fresh, step=seen[index])
        if not trainer.sanity_checking:
            seen[index] += 1
        if stopping.signal and not trainer.sanity_checking:
            signals.stop_if_asked(trainer)
    results.append(_loader_is_over(trainer, board))
    board.dataloader_idx = None
    hooks.call(f"on_{stage}_epoch_end")
    last = {} if trainer.sanity_checking else trainer.collect()
    for one in results:
        one.update(last)
    together = {name: value for one in results for name, value in one.items()}
    if not trainer.sanity_checking:
        trainer.log(together)
    if before_end is not None:
        before_end()
    hooks.call(f"on_{stage}_end")
    board.reset()
    own_train = hooks.of_module(f"on_{stage}_model_train")
    own_train() if own_train is not None else modes.restore()
    return results


def _loader_is_over(trainer: Trainer, board: Board) -> dict[str, Any]:
    board.stepping = False
    return {} if trainer.sanity_checking else trainer.collect()


def _set_eval(hooks: Hooks, module: Any, stage: str) -> None:
    own = hooks.of_module(f"on_{stage}_model_eval")
    own() if own is not None else module.eval()


def _set_epoch(trainer: Trainer, source: Combined) -> None:
    for leaf in source.leaves:
        sources.set_epoch(leaf, trainer.current_epoch)


def predict(
    trainer: Trainer, hooks: Hooks, source: Combined, limits: list[float], keep: bool
) -> list[Any] | list[list[Any]] | None:
    """Run the module over prediction loaders.

    Returns:
        Its outputs by batch; with several loaders a list for each; None when they are not kept.
    """
    module = trainer.model
    draws = steps.draws(module.predict_step)
    several = source.mode == "sequential" and len(source.leaves) > 1
    if not draws:
        _check_dataloader_idx(trainer, hooks, "predict", several)
    modes = _Modes(module)
    _set_eval(hooks, module, "predict")
    _set_epoch(trainer, source)
    hooks.call("on_predict_start")
    hooks.call("on_predict_epoch_start")
    step = steps.called(trainer, "predict_step", module.predict_step)
    with_idx = steps.takes_batch_idx(module.predict_step)
    preparing = [] if draws else feeding.preparing(trainer, "predict")
    on_start, on_end = hooks.of("on_predict_batch_start"), hooks.of("on_predict_batch_end")
    names = module.__dict__
    predictions: list[list[Any]] = [[] for _ in source.leaves]
    indices: list[list[list[int]]] = [[] for _ in source.leaves]
    writers = [one.interval for one in trainer.callbacks if hasattr(one, "interval")]  # prediction writers
    watched = _WatchedIndices(source) if writers else None
    by_epoch = any(getattr(interval, "on_epoch", False) for interval in writers)
    prediction = trainer.engine.prediction
    prediction.outputs, prediction.indices = (predictions if several else predictions[0]), indices
    prediction.batch_indices = None
    batches = sources.evaluation_batches(source, limits, trainer.engine.run)
    for batch, batch_idx, index in feeding.DrawnInTurn(batches).steps() if draws else batches:
        if watched is not None:
            prediction.batch_indices = watched.batch(index, batch_idx)
            if by_epoch:
                indices[index].append(prediction.batch_indices or [])
        for prepare in preparing:
            batch = prepare(batch, index)
        places: tuple[Any, ...] = (batch, batch_idx, index) if several else (batch, batch_idx)
        for hook in on_start:
            hook(*places)
        names["_current_fx_name"] = "predict_step"
        output = step(batch) if draws else step(*places) if with_idx else step(batch, *places[2:])
        names["_current_fx_name"] = None
        if output is None:
            messages.warn("predict_step gave None", stacklevel=2)
        for hook in on_end:
            hook(output, *places)
        if keep or by_epoch:
            predictions[index].append(sources.mapped(output, torch.Tensor, lambda tensor: tensor.cpu()))
    hooks.call("on_predict_epoch_end")
    hooks.call("on_predict_end")
    own_train = hooks.of_module("on_predict_model_train")
    own_train() if own_train is not None else modes.restore()
    returned, prediction.outputs = prediction.outputs, None
    return returned if keep else None


class _WatchedIndices:
    """Which samples each batch is made of, for callbacks that write predictions beside their samples."""

    def __init__(self, source: Combined) -> None:
        self._seen: list[list[list[int]]] = []
        for position, leaf in enumerate(source.leaves):
            sampler = getattr(leaf, "batch_sampler", None)
            seen: list[list[int]] = []
            self._seen.append(seen)
            if sampler is not None:
                source.leaves[position] = loading.changed(leaf, batch_sampler=_Recording(sampler, seen))

    def batch(self, loader: int, batch_idx: int) -> list[int] | None:
        """The samples of a batch."""
        seen = self._seen[loader]
        return seen[batch_idx] if batch_idx < len(seen) else None


class _Recording:
    """A batch sampler that remembers what it gave."""

    def __init__(self, sampler: Any, seen: list[list[int]]) -> None:
        self._sampler = sampler
        self._seen = seen

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            self._seen.append(list(batch))
            yield batch
