"""The Trainer: trains, validates, tests and predicts with a module; each technique for speed is a flag."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.trainer import arguments, checks, feeding, installing, session, steps
from hasten.trainer.adapter import adapter
from hasten.trainer.attachments import Attachments
from hasten.trainer.checkpointing import Checkpointing
from hasten.trainer.config import Config
from hasten.trainer.config_docs import documentation, takes
from hasten.trainer.engine import Engine
from hasten.trainer.errors import refuse_class
from hasten.trainer.flags import FlagAttribute, note_environment, refuse_unknown, set_by
from hasten.trainer.loggers.base import Logger
from hasten.trainer.loss_module import LossModule
from hasten.trainer.progress import Progress
from hasten.trainer.properties import TrainerProperties
from hasten.trainer.seeding import seed_everything as seed_everything
from hasten.trainer.stages import Metrics, Stage

if TYPE_CHECKING:
    from hasten.batch.result import BatchSizes
    from hasten.check.result import CheckResult

Loaders = Any
"""A DataLoader, any iterable of batches, or nested lists and dicts of them."""

_BUILT = ("accelerator", "strategy", "callbacks", "logger", "profiler")
"""Flags whose attribute on a Trainer is the object built from the flag (`trainer.logger`), not the flag's value."""


class Trainer(TrainerProperties):
    __doc__ = f"""Trains, validates, tests and predicts with a module.

    Attributes:
        config: The flags, frozen. Setting a flag on the Trainer (`trainer.max_epochs = 5`) replaces the whole Config.
        progress: All counters.
        engine: The objects built for a run: processes, strategy, hooks, loaders, optimizers, loop.

    Args:
{documentation()}

    Raises:
        HastenError: A flag is unknown (the message suggests the closest one), out of range, or contradicts another.

    Example:
        >>> trainer = hasten.Trainer(max_epochs=10, precision="bf16-mixed", accumulate_grad_batches=16)
        >>> trainer.fit(model, train_loader, val_loader)
    """

    @takes(Config)
    def __init__(self, **flags: Any) -> None:
        from_environment = adapter().environment_flags(type(self).__name__, flags)
        flags |= {name: value for name, (_, value) in from_environment.items()}
        with note_environment(from_environment):
            self._set_up(flags)
        for line in (*set_by(from_environment), *installing.notes_on_one(flags)):
            self.say(line)

    def _set_up(self, flags: dict[str, Any]) -> None:
        refuse_unknown(flags, [flag.name for flag in fields(Config)])
        self.user_config = Config(**flags)
        self.config = self.user_config.settled()
        if self.config.seed is not None:
            seed_everything(self.config.seed)  # before anything below draws random numbers
        self.progress, self.stage, self.metrics = Progress(), Stage(), Metrics()
        self._said_once: set[str] = set()
        techniques = installing.installed(self.config)
        self.installed, self._remarks = techniques.settings, techniques.remarks
        if "precision" in self.installed:
            self.config = replace(self.config, precision=self.installed["precision"])  # it may come from the plan
        self.engine = Engine(self, self.config, techniques.run)
        self.engine.strategy.check(self.installed, self.config.plan)
        attachments = Attachments(self.user_config, self.config)
        self._loggers: list[Any] = attachments.loggers()
        self.profiler = attachments.profiler()
        self.callbacks: list[Any] = attachments.callbacks() + techniques.callbacks
        self.checkpointing = Checkpointing(self, self.config.background_saves)

    # -- what users call ------------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: Any = None,
    ) -> None:
        """Train a module, and validate it between training steps.

        Args:
            model: A `hasten.Module`, a module of a supported framework, or any `nn.Module` together with `loss`.
            train_dataloaders: A DataLoader, any iterable, or nested lists and dicts of them; or a datamodule.
            val_dataloaders: The same, for validation.
            datamodule: An object that provides the loaders (`train_dataloader`, `val_dataloader`).
            ckpt_path: Resume from this checkpoint: a path, "last" or "best". Resuming is exact: a run that was killed
                and resumed ends with the same weights as an uninterrupted run, on CPU to the last bit.
            weights_only: Accepted for scripts that pass it, and ignored: checkpoints are never unpickled.
            loss: For a plain `nn.Module`: `loss(model(*inputs), target)` for batches of (inputs..., target).
            optimizer: With `loss`: an optimizer, or a function from parameters to an optimizer; default AdamW at 1e-3.

        Raises:
            HastenError: The module lacks a step or an optimizer, or the checkpoint is damaged.
            SystemExit: After SIGTERM (exit code 143), SIGUSR1 (138) or Ctrl-C (130), once the checkpoint is written.
        """
        if loss is not None:
            refuse_class("loss", loss)
            model = LossModule(model, loss, optimizer)
        elif optimizer is not None:
            raise self.misconfigured("fit(optimizer=...) goes with loss=...", "a Module has configure_optimizers")
        self._attach(model, "fit", train_dataloaders, datamodule, train=train_dataloaders, val=val_dataloaders)
        session.run(self, "fit", self.checkpointing.find(ckpt_path))

    def check(
        self,
        model: Any,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        datamodule: Any = None,
        *,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: Any = None,
        batches: int = 6,
        epochs: int = 2,
        resume: bool = True,
    ) -> CheckResult:
        """Compare training under this Trainer's techniques with plain training, step by step; trains nothing here.

        Forks of this process train a few batches on one thread, without and with the techniques of flags and plan.
        Losses, gradients, weights, buffers, optimizer state, random states, samples and checkpoints must be equal to
        the bit for techniques that are `exact`, and within the training's own rounding for `rounding`.

        Args:
            model: As for `fit`, like the loaders, `datamodule`, `loss` and `optimizer`.
            batches: Batches per pass, of training and of validation.
            epochs: Passes.
            resume: Also resume from checkpoints: plain ones under the techniques, and the reverse.

        Returns:
            The result of the check: `print` shows it, `.ok` tells whether it passed.

        Raises:
            HastenError: The training fails without any technique, or this process has used the GPU and cannot fork.

        Example:
            >>> checked = hasten.Trainer(plan="hasten.toml").check(model, train_loader, val_loader)
            >>> assert checked.ok, checked
        """
        from hasten.trainer.check import check

        fit = {
            "model": model,
            "train_dataloaders": train_dataloaders,
            "val_dataloaders": val_dataloaders,
            "datamodule": datamodule,
            "loss": loss,
            "optimizer": optimizer,
        }
        return check(self, fit, batches, epochs, resume)

    def find_batch_size(
        self,
        model: Any,
        train_dataloaders: Loaders = None,
        val_dataloaders: Loaders = None,
        datamodule: Any = None,
        *,
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: Any = None,
        memory: int | None = None,
        timeout: float = 60.0,
    ) -> BatchSizes:
        """Find the largest batch size that is safe, where throughput saturates, and what uses the memory.

        Copies of the module train some steps and validate, three times over, with growing batches, the longest samples
        first. Module, optimizer, loaders and random states are restored afterwards, to the bit.

        Args:
            model: As for `fit`, like the loaders, `datamodule`, `loss` and `optimizer`.
            memory: Bytes that this process, or the GPU, may use in total; default: 90 % of the free memory.
            timeout: Seconds after which an attempt is stopped.

        Returns:
            `.largest`, `.saturated`, `.rates`, `.peaks` and `.memory`; `print` shows them.

        Raises:
            HastenError: The batch size cannot be changed, the module not copied, or the current size does not fit.
        """
        from hasten.trainer.finders import find

        fit = {"model": model, "datamodule": datamodule, "loss": loss, "optimizer": optimizer}
        return find(self, fit, train_dataloaders, val_dataloaders, memory, timeout)

    def validate(
        self,
        model: Any = None,
        dataloaders: Loaders = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run `validation_step` over the validation loaders.

        Args:
            model: The module; default: the module trained last, with its best checkpoint if there is one.
            dataloaders: Default: those of the datamodule or the module.
            ckpt_path: Weights to load: a path, "best" or "last"; None with `model` keeps the weights it has.
            verbose: Print the logged values.
            datamodule: An object that provides the loaders.
            weights_only: As for `fit`.

        Returns:
            The logged values, a dict for each loader.
        """
        path = arguments.weights_of(self, model, ckpt_path)
        self._attach(model, "validate", dataloaders, datamodule, val=dataloaders)
        return session.run(self, "validate", path, verbose=verbose)  # type: ignore[no-any-return]

    def test(
        self,
        model: Any = None,
        dataloaders: Loaders = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Run `test_step` over the test loaders; arguments as for `validate`."""
        path = arguments.weights_of(self, model, ckpt_path)
        self._attach(model, "test", dataloaders, datamodule, test=dataloaders)
        return session.run(self, "test", path, verbose=verbose)  # type: ignore[no-any-return]

    def predict(
        self,
        model: Any = None,
        dataloaders: Loaders = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | list[list[Any]] | None:
        """Run `predict_step` over the prediction loaders.

        Returns:
            The outputs on the host, by batch; with several loaders a list for each; None if not `return_predictions`.
        """
        path = arguments.weights_of(self, model, ckpt_path)
        self._attach(model, "predict", dataloaders, datamodule, predict=dataloaders)
        keep = True if return_predictions is None else return_predictions
        return session.run(self, "predict", path, return_predictions=keep)  # type: ignore[no-any-return]

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint of the training's current state. Every process must call this.

        The file is written atomically, in the background: `fit` waits for it before it returns.
        """
        self.checkpointing.save(filepath, weights_only)
        if self.stage.fn != "fit" or self.stage.stopped:
            self.checkpointing.saver.wait()

    @contextlib.contextmanager
    def init_module(self) -> Iterator[None]:
        """Create the modules built in this context directly on the device, in the Trainer's precision."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.engine.precision.parameters or before)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(before)

    # -- what callbacks and modules call ---------------------------------------------------------------

    def configure(self, **flags: Any) -> None:
        """Change flags of an existing Trainer, such as `max_epochs`; they take effect with the next step."""
        self.config = replace(self.config, **flags)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, after all writes that were requested earlier."""
        self.checkpointing.remove(path)

    def link_checkpoint(self, target: str | Path, link: str | Path) -> None:
        """Make `link` a symbolic link to a checkpoint."""
        self.checkpointing.link(Path(target), Path(link))

    def may_save(self) -> bool:
        """Return whether every callback allows a checkpoint now (NaNWatch refuses once weights are not finite)."""
        asked = (getattr(callback, "allows_checkpoint", None) for callback in self.callbacks)
        return all(allows(self) for allows in asked if allows is not None)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass with precision and hooks, for manual optimization."""
        self.engine.strategy.before_backward(loss)
        steps.backward_of(self, self.engine.hooks)(loss, *args, **kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Send values to the loggers; this reads tensors from the device, and waits for it."""
        if not self.loggers or not values:
            return
        numbers = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        if step is None:
            logged_step = numbers.pop("step", None)  # a logged value named "step" is the x-axis
            step = int(logged_step) if logged_step is not None else self.progress.logged_steps
            if logged_step is None:
                numbers.setdefault("epoch", self.current_epoch)
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics(metrics=dict(numbers), step=step)
                if not isinstance(logger, Logger):  # hasten's loggers decide when to write; others buffer until save()
                    logger.save()

    def cannot_log(self, name: str) -> None:
        """Report that `self.log` was called where no values are collected: raise, or print it under `barebones`."""
        if self.config.barebones:
            self.say("self.log does nothing with barebones=True", once=True)
            return
        raise self.misconfigured(
            f"self.log({name!r}, ...) is called where nothing can be logged (a predict hook, or outside a run)",
            "use self.logger.log_metrics there",
        )

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps of the whole training; infinity when unknown.

        Loads the training data if that has not happened yet, so `configure_optimizers` may use it.
        """
        config = self.config
        limit: float = math.inf if config.max_steps == -1 else config.max_steps
        if config.max_epochs == -1:
            return limit
        if self.engine.feeds["train"].source is None:
            feeding.setup(self, "train")
        if math.isinf(self.num_training_batches):
            return limit
        assert config.max_epochs is not None
        schedules = self._callbacks_named("GradientAccumulationScheduler")
        if any(getattr(schedule, "going_to_accumulate_grad_batches", bool)() for schedule in schedules):
            raise self.misconfigured(
                "estimated_stepping_batches is not known where accumulate_grad_batches is a schedule by epoch",
                "give a number, or say the number of steps yourself",
            )
        per_epoch: int = math.ceil(self.num_training_batches / config.accumulate_grad_batches)
        return min(per_epoch * max(config.max_epochs, 1), limit)

    # -- before a run ----------------------------------------------------------------------------------

    def _attach(self, model: Any, fn: str, first: Any, datamodule: Any, **loaders: Any) -> None:
        if self.stage.status == "running":
            raise self.misconfigured(
                f"{fn}() is called while {self.stage.fn}() runs", "use another Trainer for it, or call it afterwards"
            )
        refuse_class(f"{fn}(model)", model)
        refuse_class("datamodule", datamodule)
        model = arguments.module_of(self, fn, model)
        if datamodule is None and hasattr(first, "train_dataloader") and hasattr(first, "prepare_data"):
            datamodule, loaders = first, dict.fromkeys(loaders)  # as in fit(model, datamodule)
        if datamodule is not None and any(loader is not None for loader in loaders.values()):
            raise self.misconfigured(f"{fn}() got both loaders and a datamodule", "give one of them")
        if fn == "fit":
            checks.resolve_limits(self)
            for line in self._remarks:
                self.say(line, once=True)
        self.engine.attach(model, datamodule, loaders, fn == "fit")

    # -- what only other frameworks read ---------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return attributes that another framework's classes read of their trainer (`strategy`, `fit_loop`, ...)."""
        if name.startswith("__") or "checkpointing" not in self.__dict__:  # it is being built or copied
            raise AttributeError(f"Trainer has no attribute {name!r}")
        return adapter().attribute(self, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return new


for _flag in fields(Config):  # `trainer.max_epochs` reads the flag; setting it replaces the Config
    if _flag.name not in _BUILT and not hasattr(Trainer, _flag.name):
        setattr(Trainer, _flag.name, FlagAttribute(_flag.name))
