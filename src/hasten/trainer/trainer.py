"""Trainer: trains a module; every cure for slowness is a flag."""

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
from hasten.trainer.flags import FlagAttribute, noting, refuse_unknown, set_by
from hasten.trainer.loggers.base import Logger
from hasten.trainer.loss_module import LossModule
from hasten.trainer.progress import Progress
from hasten.trainer.properties import TrainerProperties
from hasten.trainer.seeding import seed_everything as seed_everything
from hasten.trainer.stages import Metrics, Stage

if TYPE_CHECKING:
    from hasten.batch.result import BatchSizes
    from hasten.check.checked import Checked

Loaders = Any
"""A DataLoader, anything iterable, or lists and dicts of them."""

_BUILT = ("accelerator", "strategy", "callbacks", "logger", "profiler")
"""Flags whose name on a Trainer is what was built from them."""


class Trainer(TrainerProperties):
    __doc__ = f"""Train, validate, test and predict.

    Attributes:
        config: The flags. Setting one on the Trainer (`trainer.max_epochs = 5`) replaces it as a whole.
        progress: All counters.
        engine: What is built for a run.

    Args:
{documentation()}

    Raises:
        HastenError: A flag is unknown (with what was probably meant), out of range, or contradicts another.

    Example:
        >>> trainer = hasten.Trainer(max_epochs=10, precision="bf16-mixed", accumulate_grad_batches=16)
        >>> trainer.fit(model, train_loader, val_loader)
    """

    @takes(Config)
    def __init__(self, **flags: Any) -> None:
        found = adapter().environment_flags(type(self).__name__, flags)
        flags |= {name: value for name, (_, value) in found.items()}
        with noting(found):
            self._set_up(flags)
        for line in (*set_by(found), *installing.one_or_all(flags)):
            self.say(line)

    def _set_up(self, flags: dict[str, Any]) -> None:
        refuse_unknown(flags, [flag.name for flag in fields(Config)])
        self.given = Config(**flags)
        self.config = self.given.settled()
        if self.config.seed is not None:
            seed_everything(self.config.seed)
        self.progress, self.stage, self.metrics = Progress(), Stage(), Metrics()
        self._said: set[str] = set()
        techniques = installing.installed(self.config)
        self.installed, self._remarks = techniques.settings, techniques.remarks
        if "precision" in self.installed:
            self.config = replace(self.config, precision=self.installed["precision"])
        self.engine = Engine(self, self.config, techniques.run)
        self.engine.strategy.check(self.installed, self.config.plan)
        attachments = Attachments(self.given, self.config)
        self._loggers: list[Any] = attachments.loggers()
        self.profiler = attachments.profiler()
        self.callbacks: list[Any] = attachments.callbacks() + techniques.callbacks
        self.checkpointing = Checkpointing(self, self.config.background_saves)

    # -- what a person calls ---------------------------------------------------------------------------

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
        """Train a module.

        Args:
            model: A `hasten.Module`, a module of a framework that hasten knows, or any `nn.Module` with `loss`.
            train_dataloaders: A DataLoader, anything iterable, or nested lists and dicts of them; or a datamodule.
            val_dataloaders: The same, for validation.
            datamodule: A datamodule that has the loaders.
            ckpt_path: Go on from this checkpoint: a path, "last" or "best". Going on is exact: a run that was killed
                and went on ends with the weights of one that was not, on CPU to the last bit.
            weights_only: Accepted for scripts that pass it; checkpoints are never unpickled, whatever it says.
            loss: With a plain `nn.Module`: `loss(model(*inputs), target)` for batches of (inputs..., target).
            optimizer: With `loss`: an optimizer, or a function from parameters to one; default AdamW at 1e-3.

        Raises:
            HastenError: The module lacks a step or an optimizer, or the checkpoint is damaged.
            SystemExit: After SIGTERM (code 143) and Ctrl-C (130), when the checkpoint is written.
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
    ) -> Checked:
        """Compare this Trainer's techniques with the same training without them, step by step; trains nothing here.

        Some batches are trained in forks of this process, plain and under the techniques (of flags and plan), on one
        thread. Losses, gradients, weights, buffers, optimizer state, random states, samples and checkpoints must be
        equal to the bit for techniques that are `exact`, within the training's own rounding for `rounding`.

        Args:
            model: As for `fit`; so are the loaders, `datamodule`, `loss` and `optimizer`.
            batches: Batches of each pass, of training and of validation.
            epochs: Passes.
            resume: Also go on from the checkpoint, in both directions.

        Returns:
            What was found; `print` shows it, `.ok` is the answer.

        Raises:
            HastenError: The training fails without any technique, or this process has used the GPU and cannot fork.

        Example:
            >>> found = hasten.Trainer(plan="hasten.toml").check(model, train_loader, val_loader)
            >>> assert found.ok, found
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
        """Find the largest batch that is safe, where throughput saturates, and what memory goes to.

        Copies of the module train some steps and validate, three times over, with larger and larger batches, the
        longest samples first. Module, optimizer, loaders and random states are afterwards as they were, to the bit.

        Args:
            model: As for `fit`; so are the loaders, `datamodule`, `loss` and `optimizer`.
            memory: Bytes that this process, or the GPU, may have in all; default: nine tenths of what is free.
            timeout: Seconds after which one attempt is ended.

        Returns:
            `.largest`, `.saturated`, `.rates`, `.peaks` and `.memory`; `print` shows them.

        Raises:
            HastenError: The batch size cannot be changed, the module not copied, or the own batch size does not fit.
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
            model: The module; default: the one trained last, with its best checkpoint if there is one.
            dataloaders: Default: those of the datamodule or the module.
            ckpt_path: Weights to load: a path, "best" or "last"; None with `model` takes its weights as they are.
            verbose: Print what was logged.
            datamodule: A datamodule that has the loaders.
            weights_only: As for `fit`.

        Returns:
            What was logged, a dict for each loader.
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
            Its outputs on the host, by batch; with several loaders a list for each; None if not `return_predictions`.
        """
        path = arguments.weights_of(self, model, ckpt_path)
        self._attach(model, "predict", dataloaders, datamodule, predict=dataloaders)
        keep = True if return_predictions is None else return_predictions
        return session.run(self, "predict", path, return_predictions=keep)  # type: ignore[no-any-return]

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint of the training as it stands; every process calls this.

        The file is written whole or not at all, in the background: `fit` waits for it before it returns.
        """
        self.checkpointing.save(filepath, weights_only)
        if self.stage.fn != "fit" or self.stage.stopped:
            self.checkpointing.saver.wait()

    @contextlib.contextmanager
    def init_module(self) -> Iterator[None]:
        """Modules made under this lie on the device, in the precision, at once."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.engine.precision.parameters or before)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(before)

    # -- what callbacks and modules call ---------------------------------------------------------------

    def configure(self, **flags: Any) -> None:
        """Change flags of a Trainer that is built, such as `max_epochs`; the next step reads them."""
        self.config = replace(self.config, **flags)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, once all that was to be written before is there."""
        self.checkpointing.remove(path)

    def link_checkpoint(self, target: str | Path, link: str | Path) -> None:
        """Let `link` be a symbolic link to a checkpoint."""
        self.checkpointing.link(Path(target), Path(link))

    def may_save(self) -> bool:
        """Return whether no callback objects to a checkpoint now (NaNWatch does, when the weights are spoilt)."""
        asked = (getattr(callback, "allows_checkpoint", None) for callback in self.callbacks)
        return all(allows(self) for allows in asked if allows is not None)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate, with precision and hooks; for manual optimization."""
        self.engine.strategy.before_backward(loss)
        steps.backward_of(self, self.engine.hooks)(loss, *args, **kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give values to the loggers; this reads them from the device."""
        if not self.loggers or not values:
            return
        numbers = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        if step is None:
            given = numbers.pop("step", None)
            step = int(given) if given is not None else self.progress.logged_steps
            if given is None:
                numbers.setdefault("epoch", self.current_epoch)
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics(metrics=dict(numbers), step=step)
                if not isinstance(logger, Logger):  # hasten's own know when to write
                    logger.save()

    def cannot_log(self, name: str) -> None:
        """Say that `self.log` was called where nothing is collected."""
        if self.config.barebones:
            self.say("self.log does nothing with barebones=True", once=True)
            return
        raise self.misconfigured(
            f"self.log({name!r}, ...) is called where nothing can be logged (a predict hook, or outside a run)",
            "use self.logger.log_metrics there",
        )

    @property
    def estimated_stepping_batches(self) -> float:
        """How many optimizer steps the whole training will have; infinity when nobody knows.

        Loads the training data if that has not been done, so it may be asked in `configure_optimizers`.
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
            datamodule, loaders = first, dict.fromkeys(loaders)
        if datamodule is not None and any(loader is not None for loader in loaders.values()):
            raise self.misconfigured(f"{fn}() got both loaders and a datamodule", "give one of them")
        if fn == "fit":
            checks.settle_limits(self)
            for line in self._remarks:
                self.say(line, once=True)
        self.engine.attach(model, datamodule, loaders, fn == "fit")

    # -- what only other frameworks read ---------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Answer names that another framework's classes read of their trainer (`strategy`, `fit_loop`, ...)."""
        if name.startswith("__") or "checkpointing" not in self.__dict__:  # while it is built, or copied
            raise AttributeError(f"Trainer has no attribute {name!r}")
        return adapter().attribute(self, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return new


for _flag in fields(Config):
    if _flag.name not in _BUILT and not hasattr(Trainer, _flag.name):
        setattr(Trainer, _flag.name, FlagAttribute(_flag.name))
