"""Module: an `nn.Module` with its training step, its optimizers and its hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.trainer.hooks import ModuleHooks, overridden
from hasten.trainer.hyperparameters import Hyperparameters, arguments_of

if TYPE_CHECKING:
    from typing import Self

    from hasten.trainer.trainer import Trainer

Outputs = torch.Tensor | Mapping[str, Any] | None


class Module(ModuleHooks, torch.nn.Module):
    """A `torch.nn.Module` that defines how it is trained, under the method and hook names that are in common use.

    Override `training_step` and `configure_optimizers`; everything else is optional. A hook that is not
    overridden is never called, so it costs nothing.

    Attributes:
        trainer: The Trainer that trains, or last trained, the module.
        automatic_optimization: False when `training_step` calls `manual_backward` and steps its optimizers itself.
        strict_loading: Whether a checkpoint's weights must match the module's, name by name.
        hparams: The arguments that `save_hyperparameters` stored.
        example_input_array: Optional: a batch of inputs for the model summary and the graphs of loggers.

    Example:
        >>> class Digits(hasten.Module):
        ...     def __init__(self, lr=0.1):
        ...         super().__init__()
        ...         self.save_hyperparameters()
        ...         self.net = torch.nn.Linear(64, 10)
        ...
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         loss = torch.nn.functional.cross_entropy(self.net(x), y)
        ...         self.log("loss", loss, prog_bar=True)
        ...         return loss
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
    """

    automatic_optimization = True
    strict_loading = True
    example_input_array: Any = None

    # `__getstate__` leaves the first two out: a copy or pickle of the module must not drag its Trainer along.
    _trainer: Trainer | None = None
    _current_fx_name: str | None = None
    _hparams: Hyperparameters | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_trainer", "_current_fx_name")}

    # -- its Trainer ------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer that trains, or last trained, the module.

        Raises:
            HastenError: No Trainer has been given the module yet.
        """
        if self._trainer is None:
            raise HastenError(
                f"{type(self).__name__} has no trainer yet", "hand it to one first: Trainer().fit(module, loader)"
            )
        return self._trainer

    @property
    def device(self) -> torch.device:
        """The Trainer's device; without a trainer, the device of the first parameter."""
        if self._trainer is not None:
            return self._trainer.device
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """Number of finished epochs; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps done; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """All loggers; empty without a trainer."""
        return [] if self._trainer is None else self._trainer.loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress line."""
        self.trainer.print(*args, **kwargs)

    # -- methods to define ------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Outputs:
        """Return the loss of a batch: `(batch, batch_idx)` -> a tensor, a dict with "loss", or None to skip it."""
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a validation batch and log its metrics: `(batch, batch_idx, dataloader_idx=0)`."""
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a test batch and log its metrics: `(batch, batch_idx, dataloader_idx=0)`."""
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch: `(batch, batch_idx, dataloader_idx=0)`. Default: `forward(batch)`."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """Return the optimizers, and optionally their learning-rate schedulers.

        Accepted are: an optimizer; a list of optimizers; two lists, optimizers and schedulers; or one or more dicts
        with "optimizer", "lr_scheduler" (a scheduler, or a dict with "scheduler", "interval", "frequency", "monitor")
        and "monitor".
        """
        raise HastenError(
            f"{type(self).__name__} has no configure_optimizers", "define it, and return a torch.optim optimizer"
        )

    def configure_callbacks(self) -> Any:
        """Return callbacks to add to the Trainer's; a callback replaces the Trainer's callbacks of the same class."""
        return []

    def configure_model(self) -> None:
        """Build layers late, after `setup` and before weights are loaded; may be called more than once."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; override for a custom one."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step the optimizer; an override calls `optimizer.step(closure=optimizer_closure)` at most once."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clear the optimizer's gradients; override for another way."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler; override for schedulers with another `step` signature."""
        scheduler.step() if metric is None else scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the optimizer's gradients; override for another way."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy a batch to a device; override for batches of types without a `.to` method."""
        from hasten.trainer.batches import to_device

        return to_device(batch, device)

    # -- methods to call --------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log one value. It stays on its device, without a synchronization, until it is shown or written.

        Args:
            name: The value's name; with both `on_step` and `on_epoch` it gets the suffixes `_step` and `_epoch`.
            value: A number, a tensor of one element, or a torchmetrics Metric.
            prog_bar: Show the value in the progress line.
            logger: Send the value to the loggers (default: yes).
            on_step: Log this step's value (default: in training).
            on_epoch: Log the value reduced over the epoch (default: in validation and test).
            reduce_fx: How to reduce over the epoch: "mean" (weighted by batch size), "sum", "min" or "max".
            enable_graph: Keep the value's autograd graph.
            sync_dist: Also reduce over all processes.
            sync_dist_group: The process group to reduce over.
            add_dataloader_idx: With several loaders, append `/dataloader_idx_N` to the name.
            batch_size: Weight for the mean; default: first dimension of the first tensor in the batch.
            metric_attribute: Accepted and ignored: a Metric's attribute name in the module is looked up automatically.
            rank_zero_only: Only rank 0 makes this call, so the value is not reduced over processes.
        """
        trainer = self._trainer
        if trainer is None:
            return  # a step called without a Trainer, in a unit test for example
        if (board := trainer.engine.board) is None:
            trainer.cannot_log(name)
            return
        board.log(
            self._current_fx_name,
            name,
            value,
            prog_bar,
            True if logger is None else logger,
            on_step,
            on_epoch,
            reduce_fx,
            enable_graph,
            sync_dist,
            sync_dist_group=sync_dist_group,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            rank_zero_only=rank_zero_only,
        )

    def log_dict(self, dictionary: Mapping[str, Any], **how: Any) -> None:
        """Log several values; keyword arguments as for `log`."""
        for name, value in dictionary.items():
            self.log(name, value, **how)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several, for manual optimization.

        Steps of the returned wrappers count in `global_step`; `use_pl_optimizer=False` returns the bare optimizers.
        """
        counted = self.trainer.engine.optimizing.counted if use_pl_optimizer else self.trainer.optimizers
        return counted[0] if len(counted) == 1 else counted

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, a list of several, or None; for manual optimization."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return (schedulers[0] if len(schedulers) == 1 else schedulers) or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run `loss.backward()` with precision and hooks, for manual optimization.

        Raises:
            HastenError: The module optimizes automatically.
        """
        if self.automatic_optimization:
            raise HastenError(
                "manual_backward is for manual optimization", "set self.automatic_optimization = False in __init__"
            )
        self.trainer.backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip an optimizer's gradients; value and algorithm default to the Trainer's flags."""
        trainer = self.trainer
        value = trainer.config.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or trainer.config.gradient_clip_algorithm or "norm"
        trainer.engine.strategy.clip(optimizer, value, algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Make only this optimizer's parameters require gradients, until `untoggle_optimizer`.

        Used where several optimizers take turns, as in a GAN. The flags before the first toggle are remembered, so
        frozen parameters stay frozen.
        """
        own_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        required_grad: dict[int, bool] = self.__dict__.setdefault("_toggled", {})
        for other in self.trainer.optimizers:
            for p in (p for group in other.param_groups for p in group["params"]):
                required_grad.setdefault(id(p), p.requires_grad)
                p.requires_grad = required_grad[id(p)] and id(p) in own_ids

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        required_grad: dict[int, bool] = self.__dict__.pop("_toggled", {})
        for other in self.trainer.optimizers:
            for p in (p for group in other.param_groups for p in group["params"]):
                p.requires_grad = required_grad.get(id(p), p.requires_grad)

    def freeze(self) -> None:
        """Turn gradients off for all parameters, and switch to eval mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Turn gradients on for all parameters, and switch to train mode."""
        self.requires_grad_(True)
        self.train()

    def all_gather(self, data: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return every process's tensor, stacked: (world_size, ...); with one process the tensor itself."""
        return self.trainer.world.gather(data, sync_grads=sync_grads)

    # -- hyper-parameters ------------------------------------------------------------------------------

    @property
    def hparams(self) -> Hyperparameters:
        """The hyper-parameters that `save_hyperparameters` stored; entries can be read as attributes."""
        if self._hparams is None:
            object.__setattr__(self, "_hparams", Hyperparameters())
        assert self._hparams is not None
        return self._hparams

    def save_hyperparameters(self, *names: Any, ignore: Any = (), logger: bool = True) -> None:
        """Store the arguments of `__init__` in `self.hparams`, in checkpoints and in the loggers.

        Args:
            names: The arguments to store; default: all. Or one dict, or object with attributes, to store instead.
            ignore: Names to leave out.
            logger: Whether loggers get them too.
        """
        frame = inspect.currentframe()  # the arguments are read from the calling `__init__`'s frame
        assert frame is not None
        assert frame.f_back is not None
        arguments = arguments_of(type(self), frame.f_back)
        left_out = {ignore} if isinstance(ignore, str) else set(ignore)
        if names and not isinstance(names[0], str):
            arguments = dict(names[0]) if isinstance(names[0], Mapping) else vars(names[0])
        elif names:
            arguments = {name: arguments[name] for name in names}
        self.hparams.update({name: value for name, value in arguments.items() if name not in left_out})
        object.__setattr__(self, "_log_hyperparams", logger)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", strict: bool = True, **changed: Any
    ) -> Self:
        """Build a module with the hyper-parameters and weights of a checkpoint. Runs no code from the file.

        Args:
            checkpoint_path: The checkpoint file.
            map_location: The device to load to.
            strict: Whether the checkpoint's weights must match the module's, name by name.
            changed: Arguments of `__init__` that replace the saved ones, or were not saved.

        Raises:
            HastenError: The file is damaged, or an argument that could not be saved is not given here.
        """
        from hasten.trainer.checkpoint import NotSaved, read

        saved = read(checkpoint_path, map_location)
        arguments = {**saved.get("hyper_parameters", {}), **changed}
        accepted = inspect.signature(cls.__init__).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            arguments = {name: value for name, value in arguments.items() if name in accepted}
        for name, value in arguments.items():
            if isinstance(value, NotSaved):
                raise HastenError(
                    f"{checkpoint_path}: the argument {name!r} was {value}, which a checkpoint cannot hold safely",
                    f"give it: {cls.__name__}.load_from_checkpoint(path, {name}=...)",
                )
        module = cls(**arguments)
        if overridden(module, "on_load_checkpoint", ModuleHooks):
            module.on_load_checkpoint(saved)
        module.load_state_dict(saved["state_dict"], strict=strict)
        return module
