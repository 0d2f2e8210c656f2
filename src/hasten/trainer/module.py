"""Module: a model with its training step, its optimizer and its hooks."""

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
    """A `torch.nn.Module` that knows how it is trained; with the names and hooks that people know.

    Override `training_step` and `configure_optimizers`; everything else is optional. A hook that is not
    overridden is never called.

    Attributes:
        trainer: The Trainer it is in, while and after it is trained.
        automatic_optimization: False when `training_step` calls `manual_backward` and steps its optimizers itself.
        hparams: What `save_hyperparameters` kept.
        example_input_array: A batch of inputs for the summary and for graphs of loggers, if you like.

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

    # Kept beside the module's own attributes and out of its state: a module is pickled and copied without them.
    _trainer: Trainer | None = None
    _current_fx_name: str | None = None
    _hparams: Hyperparameters | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_trainer", "_current_fx_name")}

    # -- where it is -----------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer.

        Raises:
            HastenError: The module was not handed to one yet.
        """
        if self._trainer is None:
            raise HastenError(
                f"{type(self).__name__} has no trainer yet", "hand it to one first: Trainer().fit(module, loader)"
            )
        return self._trainer

    @property
    def device(self) -> torch.device:
        """Where the parameters lie; before training, where the Trainer will put them."""
        if self._trainer is not None:
            return self._trainer.device
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """Epochs done; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps done; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Number of this process among all; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine; 0 without a trainer."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return [] if self._trainer is None else self._trainer.loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, in the first process only and without spoiling the progress line."""
        self.trainer.print(*args, **kwargs)

    # -- what to write ---------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Outputs:
        """`(batch, batch_idx)` -> the loss, a dict with "loss", or None to skip the batch."""
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`(batch, batch_idx, dataloader_idx=0)`; log what is of interest."""
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """`(batch, batch_idx, dataloader_idx=0)`; log what is of interest."""
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`(batch, batch_idx, dataloader_idx=0)` -> predictions; default: `forward` of the batch."""
        return self(args[0])

    def configure_optimizers(self) -> Any:
        """An optimizer; a list of them; two lists, optimizers and schedulers; or dicts with "optimizer",
        "lr_scheduler" (a scheduler, or a dict with "scheduler", "interval", "frequency", "monitor") and "monitor"."""
        raise HastenError(
            f"{type(self).__name__} has no configure_optimizers", "define it, and return a torch.optim optimizer"
        )

    def configure_callbacks(self) -> Any:
        """Callbacks that this module brings along; one of a kind replaces the Trainer's."""
        return []

    def configure_model(self) -> None:
        """Build layers here if they shall be built late; may be called more than once."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Override to differentiate in your own way."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Override to step in your own way; call `optimizer.step(closure=optimizer_closure)` at most once."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Override to clear gradients in your own way."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Override for schedulers that step in their own way."""
        scheduler.step() if metric is None else scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Override to clip in your own way."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Override for batches of a kind that has no `.to`."""
        from hasten.trainer.batches import to_device

        return to_device(batch, device)

    # -- what to call ----------------------------------------------------------------------------------

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
        """Log one value. It stays on its device, unread, until it is shown or written.

        Args:
            name: Its name; with both `on_step` and `on_epoch` it gets the suffixes `_step` and `_epoch`.
            value: A number, a tensor of one element, or a torchmetrics Metric.
            prog_bar: Show it in the progress line.
            logger: Give it to the loggers (default: yes).
            on_step: Log this step's value (default: in training).
            on_epoch: Log the value reduced over the epoch (default: in validation and test).
            reduce_fx: How to reduce over the epoch: "mean" (weighted by batch size), "sum", "min" or "max".
            enable_graph: Keep the value's graph.
            sync_dist: Reduce over all processes too.
            sync_dist_group: The process group to reduce over.
            add_dataloader_idx: With several loaders, append `/dataloader_idx_N` to the name.
            batch_size: Weight for the mean; default: first dimension of the first tensor in the batch.
            metric_attribute: Name of the Metric's attribute in the module (found by itself).
            rank_zero_only: Only the first process calls this.
        """
        trainer = self._trainer
        if trainer is None:
            return  # a step that is tried out without a Trainer
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
        """`log` for each of several values."""
        for name, value in dictionary.items():
            self.log(name, value, **how)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them; for manual optimization. Their steps are counted."""
        counted = self.trainer.engine.optimizing.counted if use_pl_optimizer else self.trainer.optimizers
        return counted[0] if len(counted) == 1 else counted

    def lr_schedulers(self) -> Any:
        """The scheduler, the list of them, or None; for manual optimization."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return (schedulers[0] if len(schedulers) == 1 else schedulers) or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """`loss.backward()` with precision and hooks, for manual optimization.

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
        """Clip this optimizer's gradients; default: by the Trainer's flags."""
        trainer = self.trainer
        value = trainer.config.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = gradient_clip_algorithm or trainer.config.gradient_clip_algorithm or "norm"
        trainer.engine.strategy.clip(optimizer, value, algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients, until `untoggle_optimizer`."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        kept: dict[int, bool] = self.__dict__.setdefault("_toggled", {})
        for other in self.trainer.optimizers:
            for p in (p for group in other.param_groups for p in group["params"]):
                kept.setdefault(id(p), p.requires_grad)
                p.requires_grad = kept[id(p)] and id(p) in mine

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        kept: dict[int, bool] = self.__dict__.pop("_toggled", {})
        for other in self.trainer.optimizers:
            for p in (p for group in other.param_groups for p in group["params"]):
                p.requires_grad = kept.get(id(p), p.requires_grad)

    def freeze(self) -> None:
        """No parameter learns any more; eval mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """All parameters learn; train mode."""
        self.requires_grad_(True)
        self.train()

    def all_gather(self, data: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """A tensor of every process, stacked: (world_size, ...); with one process the tensor itself."""
        return self.trainer.world.gather(data, sync_grads=sync_grads)

    # -- hyper-parameters ------------------------------------------------------------------------------

    @property
    def hparams(self) -> Hyperparameters:
        """Hyperparameters that `save_hyperparameters` kept; entries are attributes too."""
        if self._hparams is None:
            object.__setattr__(self, "_hparams", Hyperparameters())
        assert self._hparams is not None
        return self._hparams

    def save_hyperparameters(self, *names: Any, ignore: Any = (), logger: bool = True) -> None:
        """Keep the arguments of `__init__` in `self.hparams`, in checkpoints and in the loggers.

        Args:
            names: Which arguments; default: all. Or one dict to keep as it is.
            ignore: Names to leave out.
            logger: Whether loggers get them.
        """
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        given = arguments_of(type(self), frame.f_back)
        left_out = {ignore} if isinstance(ignore, str) else set(ignore)
        if names and not isinstance(names[0], str):
            given = dict(names[0]) if isinstance(names[0], Mapping) else vars(names[0])
        elif names:
            given = {name: given[name] for name in names}
        self.hparams.update({name: value for name, value in given.items() if name not in left_out})
        object.__setattr__(self, "_log_hyperparams", logger)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = "cpu", strict: bool = True, **changed: Any
    ) -> Self:
        """A module with the hyper-parameters and weights of a checkpoint. Runs no code from the file.

        Args:
            checkpoint_path: The file.
            map_location: The device to load to.
            strict: Whether every weight must be there.
            changed: Arguments of `__init__` that replace, or are not among, the saved ones.

        Raises:
            HastenError: The file is damaged, or an argument could not be saved in it and is not given here.
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
