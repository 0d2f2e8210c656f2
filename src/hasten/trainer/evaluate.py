"""The loops of validation, test and prediction: no backward, no optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from hasten import loading, messages
from hasten.trainer import feeding, signals, sources, steps

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.logged import LoggedValues
    from hasten.trainer.sources import Combined
    from hasten.trainer.trainer import Trainer

_STEP = {"validate": "validation", "test": "test", "predict": "predict"}


def without_gradients(inference_mode: bool) -> AbstractContextManager[None]:
    """Return a context without autograd graphs; with `inference_mode`, also without version counters.

    Processes that exchange tensors need those counters.
    """
    return torch.inference_mode() if inference_mode else torch.no_grad()


def _check_dataloader_idx(trainer: Trainer, hooks: Hooks, stage: str, several: bool) -> None:
    """Raise if the step or a batch hook lacks `dataloader_idx` with several loaders, or requires it with one."""
    for name in (f"{stage}_step", f"on_{stage}_batch_start", f"on_{stage}_batch_end"):
        if name not in ("validation_step", "test_step") and hooks.of_module(name) is None:
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


class _EvaluationLoop:
    """One run over evaluation loaders: the module's step, the hooks around it, and the module's train/eval modes.

    Attributes:
        several: Whether hooks and steps get `dataloader_idx`, because there are several loaders.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks, source: Combined, stage: str) -> None:
        self._trainer, self._hooks, self._source, self._stage = trainer, hooks, source, stage
        self._draws = feeding.draws_batches(getattr(trainer.model, f"{stage}_step"))
        self.several = source.mode == "sequential" and len(source.leaves) > 1
        if not self._draws:
            _check_dataloader_idx(trainer, hooks, stage, self.several)
        self._modes = [(part, part.training) for part in trainer.model.modules()]
        own = hooks.of_module(f"on_{stage}_model_eval")
        own() if own is not None else trainer.model.eval()
        for leaf in source.leaves:
            sources.set_epoch(leaf, trainer.current_epoch)

    def begin(self) -> None:
        """Call the start hooks, and build the step and the functions that prepare each batch."""
        trainer, hooks, stage = self._trainer, self._hooks, self._stage
        hooks.call(f"on_{stage}_start")
        hooks.call(f"on_{stage}_epoch_start")
        own_step = getattr(trainer.model, f"{stage}_step")
        self._step = steps.wrap_step_method(trainer, f"{stage}_step", own_step)
        self._with_idx = steps.takes_batch_idx(own_step)
        self._preparing = [] if self._draws else feeding.batch_transforms(trainer, stage)
        self._on_start, self._on_end = hooks.of(f"on_{stage}_batch_start"), hooks.of(f"on_{stage}_batch_end")

    def batches(self, limits: list[float]) -> Iterator[tuple[Any, int, int]]:
        """Yield `(batch, batch_idx, dataloader_idx)`."""
        batches = sources.evaluation_batches(self._source, limits, self._trainer.engine.run)
        return feeding.LoadersInTurn(batches).steps() if self._draws else batches

    def prepared(self, batch: Any, index: int) -> Any:
        """Return a batch as the step gets it: after the transfer hooks, on the device."""
        for prepare in self._preparing:
            batch = prepare(batch, index)
        return batch

    def step(self, batch: Any, batch_idx: int, index: int) -> Any:
        """Run the module's step with the hooks around it; return the step's output."""
        arity = 3 if self.several else 2
        arguments: tuple[Any, ...] = (batch.last if self._draws else (batch, batch_idx, index))[:arity]
        names = self._trainer.model.__dict__
        for hook in self._on_start:
            hook(*arguments)
        names["_current_fx_name"] = f"{self._stage}_step"
        step = self._step
        if self._draws:
            output = step(batch)
            arguments = batch.last[:arity]  # hooks at the end get the batch that the step has drawn
        else:
            output = step(*arguments) if self._with_idx else step(batch, *arguments[2:])
        names["_current_fx_name"] = None
        if output is None and self._stage == "predict":
            messages.warn("predict_step gave None", stacklevel=2)
        for hook in self._on_end:
            hook(output, *arguments)
        return output

    def end(self) -> None:
        """Restore the module's train and eval modes. Must come last."""
        own = self._hooks.of_module(f"on_{self._stage}_model_train")
        if own is not None:
            own()
            return
        for part, training in self._modes:  # not `.train()`: a frozen part may have been in eval mode before
            part.training = training


def evaluate(
    trainer: Trainer,
    hooks: Hooks,
    board: LoggedValues,
    source: Combined,
    limits: list[float],
    kind: str,
    before_end: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Run the module over validation or test loaders.

    Args:
        trainer: The Trainer.
        hooks: The hooks to call.
        board: Collects the values that are logged.
        source: The loaders.
        limits: Number of batches used from each loader.
        kind: "validate" or "test".
        before_end: Called just before the last hooks (`on_validation_end`).

    Returns:
        The logged values, a dict per loader.
    """
    stage = _STEP[kind]
    running = _EvaluationLoop(trainer, hooks, source, stage)
    board.reset()
    running.begin()
    results: list[dict[str, Any]] = []
    progress, stopping = trainer.progress, trainer.engine.stopping
    progress.evaluated_batches = 0
    batches_seen = progress.batches_seen[f"{trainer.stage.fn}_{kind}"]
    for batch, batch_idx, index in running.batches(limits):
        while len(results) != index:  # the first batch of a later loader
            results.append(_loader_is_over(trainer, board))
        prepared = running.prepared(batch, index)
        board.begin_batch(prepared, index if running.several else None)
        running.step(prepared, batch_idx, index)
        board.batch = batch = prepared = None
        progress.evaluated_batches += 1
        fresh = trainer.collect()
        if trainer.sanity_checking:
            continue
        trainer.log(fresh, step=batches_seen[index])  # x-axis: batches evaluated so far, over all epochs
        batches_seen[index] += 1
        if stopping.signal:
            signals.stop_if_asked(trainer)
    results.append(_loader_is_over(trainer, board))
    board.dataloader_idx = None
    hooks.call(f"on_{stage}_epoch_end")
    if not trainer.sanity_checking:
        last = trainer.collect()
        for values in results:
            values.update(last)
        trainer.log({name: value for values in results for name, value in values.items()})
    if before_end is not None:
        before_end()
    hooks.call(f"on_{stage}_end")
    board.reset()
    running.end()
    return results


def _loader_is_over(trainer: Trainer, board: LoggedValues) -> dict[str, Any]:
    """Return the epoch values logged for the loader that has ended."""
    board.stepping = False
    return {} if trainer.sanity_checking else trainer.collect()


def print_results(trainer: Trainer, results: list[dict[str, Any]], fn: str) -> None:
    """Print a table of the logged values: a row per value, a column per loader."""
    stripped = [{name.split("/dataloader_idx_")[0]: value for name, value in values.items()} for values in results]
    names = sorted({name for values in stripped for name in values})
    if not names or not trainer.is_global_zero:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(f"{fn} metric", *(f"DataLoader {index}" for index in range(len(stripped))))
    for name in names:
        cells = [values.get(name) for values in stripped]
        table.add_row(name, *("" if cell is None else f"{float(cell):.6g}" for cell in cells))
    with messages.harmless():
        Console().print(table)


def predict(
    trainer: Trainer, hooks: Hooks, source: Combined, limits: list[float], keep: bool
) -> list[Any] | list[list[Any]] | None:
    """Run the module over prediction loaders.

    Returns:
        The outputs by batch; with several loaders a list for each; None if not `keep`.
    """
    running = _EvaluationLoop(trainer, hooks, source, "predict")
    running.begin()
    predictions: list[list[Any]] = [[] for _ in source.leaves]
    indices: list[list[list[int]]] = [[] for _ in source.leaves]
    # Prediction writers have an `interval`.
    writers = [callback.interval for callback in trainer.callbacks if hasattr(callback, "interval")]
    watched = _BatchIndices(source) if writers else None
    by_epoch = any(getattr(interval, "on_epoch", False) for interval in writers)
    prediction = trainer.engine.prediction
    prediction.outputs, prediction.indices = (predictions if running.several else predictions[0]), indices
    prediction.batch_indices = None
    for batch, batch_idx, index in running.batches(limits):
        if watched is not None:
            prediction.batch_indices = watched.batch(index, batch_idx)
            if by_epoch:
                indices[index].append(prediction.batch_indices or [])
        output = running.step(running.prepared(batch, index), batch_idx, index)
        if keep or by_epoch:
            predictions[index].append(sources.mapped(output, torch.Tensor, lambda tensor: tensor.cpu()))
    hooks.call("on_predict_epoch_end")
    hooks.call("on_predict_end")
    running.end()
    returned, prediction.outputs = prediction.outputs, None
    return returned if keep else None


class _BatchIndices:
    """Records which samples each batch is made of, for callbacks that write predictions next to their samples."""

    def __init__(self, source: Combined) -> None:
        self._drawn: list[list[list[int]]] = []
        for position, leaf in enumerate(source.leaves):
            sampler = getattr(leaf, "batch_sampler", None)
            drawn: list[list[int]] = []
            self._drawn.append(drawn)
            if sampler is not None:
                source.leaves[position] = loading.changed(leaf, batch_sampler=_RecordingSampler(sampler, drawn))

    def batch(self, loader: int, batch_idx: int) -> list[int] | None:
        """Return the sample indices of a batch; None if the loader's sampler has not drawn it, or it has no sampler."""
        drawn = self._drawn[loader]
        return drawn[batch_idx] if batch_idx < len(drawn) else None


class _RecordingSampler:
    """Proxy of a batch sampler that records the batches it yields.

    Prefetching workers draw ahead, so a batch is looked up by its number and not as the latest.
    """

    def __init__(self, sampler: Any, drawn: list[list[int]]) -> None:
        self._sampler = sampler
        self._drawn = drawn

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            self._drawn.append(list(batch))
            yield batch
