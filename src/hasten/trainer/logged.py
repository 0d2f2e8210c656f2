"""Values of `self.log`, kept on their device without a synchronization until they are shown or written.

`LoggedValues` (a "board") has an `Entry` per hook, name and loader. In a batch, step values are collected; at the end
of an epoch, values reduced over it. `MAY_LOG` holds which hooks may log, and how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.trainer.batches import batch_size as size_of
from hasten.trainer.logged_value import Entry, Reduce, value_type

_TENSOR = torch.Tensor
_WIDE = (torch.float32, torch.float64)
_ON_OR_OFF = ((False, True), (False, True))
_EPOCH_ONLY = ((False,), (True,))
_IN_TRAINING = (*_ON_OR_OFF, True, False)  # allowed for on_step, on_epoch; defaults of on_step, on_epoch
_IN_EVALUATION = (*_ON_OR_OFF, False, True)
_AT_EDGES = (*_EPOCH_ONLY, False, True)

MAY_LOG: dict[str, tuple[tuple[bool, ...], tuple[bool, ...], bool, bool]] = {
    **dict.fromkeys(
        (
            "on_before_backward",
            "backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "optimizer_step",
            "configure_gradient_clipping",
            "clip_gradients",
            "on_before_zero_grad",
            "optimizer_zero_grad",
            "training_step",
            "on_train_batch_start",
            "on_train_batch_end",
        ),
        _IN_TRAINING,
    ),
    **dict.fromkeys(
        [f"{name}_step" for name in ("validation", "test")]
        + [f"on_{name}_batch_{edge}" for name in ("validation", "test") for edge in ("start", "end")],
        _IN_EVALUATION,
    ),
    **dict.fromkeys(
        ["on_train_start", "on_train_epoch_start", "on_train_epoch_end"]
        + [f"on_{name}_{edge}" for name in ("validation", "test") for edge in ("start", "epoch_start", "epoch_end")],
        _AT_EDGES,
    ),
}
"""Hooks in which `self.log` may be called: allowed values of `on_step` and `on_epoch`, and their defaults."""


def levels(
    hook: str | None, on_step: bool | None, on_epoch: bool | None, error: Any = HastenError
) -> tuple[bool, bool]:
    """Return whether a value logged in a hook is logged per step, and per epoch.

    Raises:
        HastenError: The hook may not log, or not in this way.
    """
    if hook is None or hook not in MAY_LOG:
        raise error(
            f"You can't `self.log()` inside `{hook}`" if hook else "You can't `self.log()` here: no hook is running",
            "use self.logger.log_metrics there",
        )
    step_allowed, epoch_allowed, step_default, epoch_default = MAY_LOG[hook]
    step = step_default if on_step is None else on_step
    epoch = epoch_default if on_epoch is None else on_epoch
    for flag, value, allowed in (("on_step", step, step_allowed), ("on_epoch", epoch, epoch_allowed)):
        if value not in allowed:
            raise error(f"self.log(..., {flag}={value}) makes no sense in {hook}", f"say {flag}={allowed[0]}")
    if not step and not epoch:
        raise error("`self.log(on_step=False, on_epoch=False)` is not useful: it logs nothing", "set one of them")
    return step, epoch


class LoggedValues:
    """The values logged in one loop (training, or one evaluation).

    Args:
        training: Whether it is the training loop: its step values go to callbacks too.
        reduce: `reduce(tensor, reduce_op=..., group=...)` over all processes; None with one process.
        misconfigured: The exception to raise for wrong use.
    """

    def __init__(self, training: bool, reduce: Reduce | None = None, misconfigured: Any = HastenError) -> None:
        self.training = training
        self.entries: dict[Any, Entry] = {}
        self.batch: Any = None
        self.dataloader_idx: int | None = None
        self.stepping = False
        self._size: int | None = None
        self._reduce = reduce
        self._error = misconfigured

    def begin_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Set the batch that values logged from now on belong to."""
        self.batch = batch
        self._size = None
        self.dataloader_idx = dataloader_idx
        self.stepping = True

    def log(
        self,
        hook: str | None,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_fn: Any = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Store a value; see `Module.log`."""
        entry = self.entries.get((hook, name, self.dataloader_idx if add_dataloader_idx else None))
        how = (prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, rank_zero_only)
        if entry is None:
            index = self.dataloader_idx if add_dataloader_idx else None
            entry = self._register(hook, name, value, index, how, sync_dist_group, add_dataloader_idx)
        elif entry.how != how or entry.dataloader_idx != self.dataloader_idx:
            raise self._error(
                f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments or loaders",
                "use the same arguments, or another name",
            )
        entry.valid = True
        if entry.metric is not None:
            entry.metric = value
            entry.last = value._forward_cache  # torchmetrics' value for the last batch
            return
        if type(value) is _TENSOR and value.dtype in _WIDE and not (enable_graph or value.dim()):
            # The usual case, kept short. A copy, since the script may change its tensor in place later.
            value = value.detach().clone()
        else:
            value = self._scalar(name, value, enable_graph)
        if entry.on_step:
            entry.last = value if entry.sync is None else entry.sync(value.clone())
            if not entry.on_epoch:
                return
        entry.add(value, 1 if entry.reduce != "mean" else batch_size or self._size or self._batch_size())

    def _scalar(self, name: str, value: Any, enable_graph: bool) -> Any:
        """Return a logged number or tensor as a new 0-d floating-point tensor."""
        if isinstance(value, torch.Tensor):
            if value.dim():
                if value.numel() != 1:
                    raise ValueError(
                        f"self.log({name!r}, ...): the tensor must have a single element, this one has shape"
                        f" {tuple(value.shape)}; log its .mean()"
                    )
                value = value.reshape(())
            copy = value.clone() if enable_graph else value.detach().clone()
            return copy if copy.is_floating_point() and copy.element_size() >= 4 else copy.to(value_type())
        if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
            return torch.tensor(float(value), dtype=value_type())
        raise ValueError(f"self.log({name!r}, ...) takes a number or a tensor, not a {type(value).__name__}")

    def _batch_size(self) -> int:
        """Return the current batch's number of samples, looked up once per batch."""
        if self.batch is None:
            return 1
        batch = self.batch
        first = batch[0] if type(batch) in (list, tuple) and batch else batch
        if type(first) is _TENSOR and first.dim():  # most batches
            self._size = len(first)
            return self._size or 1
        self._size = size_of(batch)
        if not self._size:
            raise self._error(
                f"self.log cannot tell the batch size of a {type(self.batch).__name__}",
                "say it: self.log(..., batch_size=len(...))",
            )
        return self._size

    def _register(
        self, hook: str | None, name: str, value: Any, index: int | None, how: tuple[Any, ...], group: Any, suffix: bool
    ) -> Entry:
        """Check the arguments of a name's first `log`, and store its entry."""
        prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, rank_zero_only = how
        if suffix and "/dataloader_idx_" in name:
            raise self._error(
                f"You called `self.log` with the key `{name}`, but the loader's number is added to the name anyway",
                "leave it out of the name, or say add_dataloader_idx=False",
            )
        step, epoch = levels(hook, on_step, on_epoch, self._error)
        entry = Entry(str(hook), name, how, step, epoch, f"/dataloader_idx_{index}" if index is not None else "")
        entry.prog_bar, entry.logger, entry.graph = prog_bar, logger, enable_graph
        entry.dataloader_idx = self.dataloader_idx
        entry.reduce = self._reduction(reduce_fx)
        if isinstance(value, Mapping):
            raise ValueError(f"self.log({name!r}, ...) takes one value, not a dict; use self.log_dict")
        if hasattr(value, "compute") and hasattr(value, "_forward_cache"):
            entry.metric = value
        elif sync_dist and self._reduce is not None and not rank_zero_only:
            reduce, op = self._reduce, entry.reduce
            entry.sync = lambda value, reduce_op=op: reduce(value, reduce_op=reduce_op, group=group)
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and epoch:
            messages.warn(
                f"self.log({name!r}, ...) in {hook}: an integer is reduced as a float; log value.float()", stacklevel=4
            )
        self.entries[hook, name, index] = entry
        return entry

    def _reduction(self, reduce_fx: Any) -> str:
        """Return a reduction's name: "mean", "sum", "min" or "max"."""
        name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", str(reduce_fx))
        name = "mean" if name == "avg" else name
        known = (torch.mean, torch.sum, torch.min, torch.max, sum, min, max)
        if name not in ("mean", "sum", "min", "max") or (callable(reduce_fx) and reduce_fx not in known):
            raise self._error(
                f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported, not {reduce_fx!r}",
                "for another reduction log a torchmetrics.Metric",
            )
        return str(name)

    # -- reading ---------------------------------------------------------------------------------------

    def _values(self, on_step: bool) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Yield the entries of the current loader with their step or epoch values."""
        for entry in self.entries.values():
            if not entry.valid or entry.dataloader_idx != self.dataloader_idx:
                continue
            if on_step and entry.on_step:
                value = entry.last
            elif not on_step and entry.on_epoch:
                value = entry.epoch_value()
            else:
                continue
            if isinstance(value, torch.Tensor):
                yield entry, value if entry.graph else value.detach()
            elif value is not None:
                raise ValueError(f"`compute()` return of the metric {entry.name!r} must be a tensor, not {value!r}")

    def collect(self, callback: dict[str, Any], logged: dict[str, Any], bar: dict[str, Any]) -> dict[str, Any]:
        """Add the logged values to the three dicts; return those for the loggers. Reads nothing from the device.

        Args:
            callback: Values for callbacks: all epoch values, and in training step values too.
            logged: Values for the loggers.
            bar: Values for the progress line.
        """
        on_step = self.stepping
        fresh = {}
        for entry, value in self._values(on_step):
            name = entry.name + entry.suffix
            forked = f"{entry.name}_{'step' if on_step else 'epoch'}{entry.suffix}" if entry.forked else name
            if entry.logger:
                fresh[forked] = value
            if self.training or (entry.on_epoch and not on_step):
                callback[name] = callback[forked] = value
            if entry.prog_bar:
                bar[forked] = value
        logged.update(fresh)
        return fresh

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset the values: all, only Metrics (True) or only the others (False), of all hooks or of one."""
        for entry in self.entries.values():
            if (metrics is None or metrics == (entry.metric is not None)) and fx in (None, entry.hook):
                entry.reset()
        if metrics is None and fx is None:
            self.stepping = False

    # -- resume ----------------------------------------------------------------------------------------

    def state_dict(self, names: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
        """Return what a resumed epoch needs: the sums so far.

        Args:
            names: Names of the submodules by `id`: a Metric is stored by its name in the module.
        """
        entries = []
        for (hook, name, index), entry in self.entries.items():
            metric = None if entry.metric is None else (names or {}).get(id(entry.metric))
            # Not saved: a Metric that is not an attribute of the module, and a `reduce_fx` that is a function.
            if not entry.valid or (entry.metric is not None and metric is None) or not isinstance(entry.how[4], str):
                continue
            if metric is None:
                entry.fold()
            entries.append(
                {
                    "key": [hook, name, index],
                    "how": list(entry.how),
                    "levels": [entry.on_step, entry.on_epoch],
                    "last": entry.last,
                    "total": entry.total,
                    "count": entry.count,
                    "double": entry.dtype == torch.float64,
                    "metric": metric,
                }
            )
        return entries

    def load_state_dict(self, entries: list[dict[str, Any]], parts: Mapping[str, Any] | None = None) -> None:
        """Restore `state_dict`'s values; `parts` are the submodules by name."""
        for saved in entries:
            hook, name, index = saved["key"]
            metric = (parts or {}).get(str(saved.get("metric")))
            if saved.get("metric") is not None and metric is None:
                continue
            entry = self._register(hook, name, metric, index, tuple(saved["how"]), None, index is not None)
            entry.last, entry.total, entry.count = saved["last"], saved["total"], saved["count"]
            if saved.get("double"):
                entry.dtype = torch.float64
            entry.valid = True


class NothingLogged(LoggedValues):
    """Stores no values, for `barebones`."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class LoggedNames(NothingLogged):
    """Stores the names of logged values, and nothing else.

    Attributes:
        names: All names so far.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.names: set[str] = set()

    def log(self, hook: str | None, name: str, *args: Any, **kwargs: Any) -> None:
        """Store the name."""
        self.names.add(name)
