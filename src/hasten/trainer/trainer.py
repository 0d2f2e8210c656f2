"""Trainer: trains a module; every cure for slowness is a flag."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.parallel import World, choose_devices
from hasten.plan import Plan, Setting
from hasten.run import Run
from hasten.techniques import CATALOGUE, build
from hasten.trainer import checks, feeding, session
from hasten.trainer import flags as say
from hasten.trainer.attachments import Attachments, silent
from hasten.trainer.checkpointing import Checkpointing
from hasten.trainer.hooks import ModuleHooks, overridden
from hasten.trainer.logged import Board
from hasten.trainer.loggers.base import Logger
from hasten.trainer.loop import FitLoop
from hasten.trainer.module import LossModule, Module
from hasten.trainer.optimizing import SchedulerConfig
from hasten.trainer.readable import Readable
from hasten.trainer.signals import Agreement
from hasten.trainer.stages import Metrics, Stage
from hasten.trainer.steps import Step, backward_of

if TYPE_CHECKING:
    from hasten.check.checked import Checked
    from hasten.trainer.lightning.face import Face

Loaders = Any
"""A DataLoader, anything iterable, or lists and dicts of them."""


class Trainer(Readable):
    """Trains, validates, tests and predicts; names, defaults and meaning of flags are Lightning's where it has them.

    Args:
        accelerator: "auto", "cpu", "gpu" or "cuda".
        strategy: "auto", "ddp" (one process a device), "ddp_find_unused_parameters_true", or "ddp_fork" and
            "ddp_spawn" for notebooks.
        devices: "auto" (all GPUs, or one CPU process), a number, or a list of GPU numbers.
        num_nodes: Machines; more than one is started by torchrun or srun.
        precision: "32-true" (default), "bf16-mixed", "16-mixed" (with loss scaling), "bf16-true", "16-true", "64-true".
        logger: A logger, several, False for none; default: CSV files (TensorBoard for a LightningModule that has it).
        callbacks: Callbacks of hasten or of Lightning.
        fast_dev_run: Run this many batches of everything (True: 1), with no logs and no checkpoints.
        max_epochs: Stop after so many epochs; -1 never. Default: 1000 if `max_steps` is not given either.
        min_epochs: Let nothing stop the training earlier.
        max_steps: Stop after so many optimizer steps; -1 never.
        min_steps: Let nothing stop the training earlier.
        max_time: Stop after this long: a timedelta, "DD:HH:MM:SS" or {"hours": 2}.
        limit_train_batches: Batches per epoch: an int counts them, a float is a share. The same for val, test and
            predict.
        overfit_batches: Train and validate on so many training batches, the same in each epoch.
        val_check_interval: Validate every so many training batches (int), after a share of the epoch (float), or
            after a duration.
        check_val_every_n_epoch: Validate in every n-th epoch only; None counts `val_check_interval` over epochs.
        num_sanity_val_steps: Validation batches tried before training; -1 all.
        log_every_n_steps: Loggers get step values every so many steps.
        enable_checkpointing: Save a checkpoint each epoch if no ModelCheckpoint is given.
        enable_progress_bar: Show progress: a live line on a terminal, a line an epoch elsewhere.
        enable_model_summary: Print layers and parameters first.
        accumulate_grad_batches: Step after so many batches; or a schedule {epoch: number}.
        gradient_clip_val: Largest gradient norm (or value); None clips nothing.
        gradient_clip_algorithm: "norm" or "value".
        deterministic: Use deterministic kernels only; "warn" where there are any.
        benchmark: Let cuDNN try its algorithms (technique `cudnn_benchmark`).
        inference_mode: Validate, test and predict under `torch.inference_mode` rather than `no_grad`.
        use_distributed_sampler: Give each process its share of the data.
        profiler: "simple" (time by hook), "pytorch" (a trace of some steps), or a Lightning profiler.
        detect_anomaly: Find the operation that made a NaN. Slow.
        barebones: Nothing but the loop: no logs, checkpoints, progress, summary or sanity check.
        sync_batchnorm: BatchNorm over all processes.
        reload_dataloaders_every_n_epochs: Ask for new loaders every so many epochs.
        default_root_dir: Where logs and checkpoints go; default: the current folder.
        enable_autolog_hparams: Give hyper-parameters to the loggers.
        plan: A plan that `hasten tune` wrote (its file, or a Plan): its techniques are installed. "auto" finds out
            during `fit` which help, and writes them to `hasten-auto.toml` in `default_root_dir`; the schedule beside
            it, given as `plan`, repeats the same switches.
        compile: Compile the model (technique `compile`); True or a mode of torch.compile.
        channels_last: Technique `channels_last`, for convolutions.
        fused_optimizer: Technique `fused_optimizer`: one kernel for all parameters.
        matmul_precision: "high" or "medium": TF32 or bf16 inside float32 matrix products on GPUs.
        device_prefetch: Copy the next batch to the GPU while this one computes, from pinned memory.
        batched_fetch: Gather batches of a TensorDataset at once rather than sample by sample.
        activation_checkpointing: Recompute activations of repeated blocks in the backward: less memory, more time.
        seed: Seed Python, NumPy and torch before anything is drawn; the same in every process.
        checkpoint_format: "hasten" (safetensors), or "torch" for tools that read `torch.save` files.
        background_saves: Write checkpoints while training goes on.

    Raises:
        HastenError: A flag is unknown (with what was probably meant), out of range, or contradicts another.

    Example:
        >>> trainer = hasten.Trainer(max_epochs=10, precision="bf16-mixed", accumulate_grad_batches=16)
        >>> trainer.fit(model, train_loader, val_loader)
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | dict[int, int] = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        plan: str | Path | Plan | None = None,
        compile: bool | str | None = None,
        channels_last: bool | None = None,
        fused_optimizer: bool | None = None,
        matmul_precision: str | None = None,
        device_prefetch: bool | None = None,
        batched_fetch: bool | None = None,
        activation_checkpointing: bool | str | None = None,
        seed: int | None = None,
        checkpoint_format: str = "hasten",
        background_saves: bool = True,
        **unknown: Any,
    ) -> None:
        self.given = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        say.refuse_unknown(unknown, type(self))
        say.switches(locals())
        say.path("plan", plan, Plan)
        say.path("default_root_dir", default_root_dir)
        for name, value in (("num_nodes", num_nodes), ("log_every_n_steps", log_every_n_steps)):
            say.whole(name, value, 0 if name == "log_every_n_steps" else 1)
        say.whole("max_epochs", max_epochs, -1)
        say.whole("min_epochs", min_epochs, 0)
        say.whole("max_steps", max_steps, -1, optional=False)
        say.whole("min_steps", min_steps, 0)
        say.whole("num_sanity_val_steps", num_sanity_val_steps, -1)
        say.whole("reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs, 0, optional=False)
        say.whole("check_val_every_n_epoch", check_val_every_n_epoch, 1)
        say.clipping(gradient_clip_val, gradient_clip_algorithm)
        if checkpoint_format not in ("hasten", "torch"):
            raise say.misconfigured(f"checkpoint_format={checkpoint_format!r}", 'it is "hasten" or "torch"')
        if seed is not None:
            seed_everything(seed)
        self.seed = seed
        self.barebones = barebones
        if barebones:
            say.refuse_beside_barebones(locals())
            log_every_n_steps, num_sanity_val_steps = 0, 0
            logger = enable_checkpointing = enable_progress_bar = enable_model_summary = False
        self.default_root_dir = os.path.abspath(Path(default_root_dir or Path.cwd()).expanduser())  # noqa: PTH100  # links stay as they are

        # where
        self.accelerator_flag = accelerator
        self.strategy_name = say.strategy(strategy)
        self.devices = devices
        self.num_nodes = num_nodes
        self.precision = say.precision_of(precision)
        self.use_distributed_sampler = use_distributed_sampler
        self.sync_batchnorm = sync_batchnorm
        say.devices(accelerator, devices)
        say.accelerator(accelerator)
        self.world = World(device=choose_devices(accelerator, devices)[0])
        self.opened = False

        # how long, how much
        self.max_epochs, self.min_epochs = max_epochs, min_epochs
        self.max_steps, self.min_steps = max_steps, min_steps
        self.limit_train_batches = say.limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = say.limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = say.limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = say.limit("limit_predict_batches", limit_predict_batches)
        self.overfit_batches = overfit_batches
        say.share_or_count("overfit_batches", overfit_batches)
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.num_sanity_val_steps: float = 2 if num_sanity_val_steps is None else num_sanity_val_steps
        if self.num_sanity_val_steps == -1:
            self.num_sanity_val_steps = math.inf
        self.log_every_n_steps = 50 if log_every_n_steps is None else log_every_n_steps
        self.val_check_interval, self.val_check_seconds = say.val_check(val_check_interval, check_val_every_n_epoch)
        if overfit_batches:
            self.limit_train_batches = self.limit_val_batches = overfit_batches

        # how
        self.accumulate_grad_batches, schedule = say.accumulation(accumulate_grad_batches)
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = (
            None if gradient_clip_algorithm is None else say.ClipAlgorithm(say.word(gradient_clip_algorithm))
        )
        self.deterministic = deterministic
        self.benchmark = benchmark
        self.inference_mode = inference_mode
        self.detect_anomaly = detect_anomaly
        self.enable_autolog_hparams = enable_autolog_hparams
        self.checkpoint_format = checkpoint_format
        self.fast_dev_run = say.batches_to_try(fast_dev_run)
        if fast_dev_run:
            self._only_try(int(fast_dev_run))
            logger, enable_checkpointing = (False if logger is False else silent(), False)
        prefetches = True if device_prefetch else device_prefetch
        asked: dict[str, Setting | None] = {
            "precision": None if self.precision == "32-true" else self.precision,
            "compile": "default" if compile is True else compile,
            "channels_last": channels_last,
            "fused_optimizer": fused_optimizer,
            "matmul_precision": matmul_precision,
            "pin_memory": prefetches,
            "device_prefetch": prefetches,
            "batched_fetch": batched_fetch,
            "activation_checkpointing": activation_checkpointing,
            "cudnn_benchmark": True if benchmark else None,
        }
        tuning = None
        if isinstance(plan, str | os.PathLike) and not fast_dev_run:
            from hasten.trainer.tuning import tuning_of

            tuning = tuning_of(plan)
        self._techniques, self._remarks = say.techniques(asked, None if tuning or plan == "auto" else plan)
        self._remarks += say.said_of_plan(self._techniques)
        self.installed = {name: on for name, on in self._techniques.items() if name not in say.NEEDS_NOTHING}
        self.run = tuning.board(asked, self.installed) if tuning else Run(build(self.installed, CATALOGUE))
        if "precision" in self.installed:
            self.precision = str(self.installed["precision"])
        self.processed = False

        # what it is in the middle of
        self.stage = Stage()
        self.metrics = Metrics()
        self.board: Board | None = None
        self.current_epoch = 0
        self.global_step = 0
        self.total_batches = 0
        self.logged_steps = 0
        self.should_stop = False
        self.asked_to_stop = 0
        self.agreement: Agreement | None = None
        self.interrupted = False
        self.model: Any = None
        self.trained: Any = None  # the module trained last
        self.outermost: list[str] | None = None  # names of the modules that its first step called
        self.datamodule: Any = None
        self.optimizers: list[Any] = []
        self.counted_optimizers: list[Any] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.distributed: Any = None
        self.num_training_batches: float = math.inf
        self.num_val_batches: list[float] = []
        self.num_test_batches: list[float] = []
        self.num_predict_batches: list[float] = []
        self.val_check_batch: float = math.inf
        self.loop: FitLoop | None = None
        self.train_source: Any = None
        self.val_source: Any = None
        self.test_source: Any = None
        self.predict_source: Any = None
        self.predict_batch_indices: list[int] | None = None
        self.predict_indices: Any = None
        self.predictions: Any = None
        self.evaluated_batches = 0
        # by run and kind, then by loader, over all passes: the x-axis of what is logged in evaluations
        self.batches_seen: dict[str, Counter[int]] = defaultdict(Counter)
        self.skip_backward = False
        self.before_own_step: Any = None  # hooks and clipping, between backward and an optimizer_step by the module
        self.lightning: Face | None = None
        self.hooks: Any = None
        self._said: set[str] = set()
        self.loaders: dict[str, Any] = {}
        self.reloaded_at = {"train": -math.inf, "val": -math.inf}

        attachments = Attachments(
            callbacks,
            logger,
            enable_checkpointing,
            enable_progress_bar,
            enable_model_summary,
            max_time,
            schedule,
            profiler,
        )
        self.loggers = attachments.loggers(self)
        self.profiler = attachments.profiler()
        self.callbacks: list[Any] = attachments.callbacks(self) + ([tuning] if tuning else [])
        self.checkpointing = Checkpointing(self, background_saves)
        counted = {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
            "overfit_batches": overfit_batches,
            "val_check_interval": val_check_interval,
        }
        for line in say.one_or_all(counted):
            self.say(line)

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
            model: A `hasten.Module`, a LightningModule, or any `nn.Module` together with `loss`.
            train_dataloaders: A DataLoader, anything iterable, or nested lists and dicts of them; or a datamodule.
            val_dataloaders: The same, for validation.
            datamodule: A datamodule that has the loaders.
            ckpt_path: Go on from this checkpoint: a path, "last" or "best". Going on is exact: a run that was killed
                and went on ends with the weights of one that was not, on CPU to the last bit.
            weights_only: Accepted for Lightning's sake; checkpoints are never unpickled, whatever it says.
            loss: With a plain `nn.Module`: `loss(model(*inputs), target)` for batches of (inputs..., target).
            optimizer: With `loss`: an optimizer, or a function from parameters to one; default AdamW at 1e-3.

        Raises:
            HastenError: The module lacks a step or an optimizer, or the checkpoint is damaged.
            SystemExit: After SIGTERM (code 143) and Ctrl-C (130), when the checkpoint is written.
        """
        if loss is not None:
            say.refuse_class("loss", loss)
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
        path = self._weights(model, ckpt_path)
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
        path = self._weights(model, ckpt_path)
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
        path = self._weights(model, ckpt_path)
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
        dtypes = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtypes.get(self.precision, before))
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(before)

    # -- what callbacks and modules call ---------------------------------------------------------------

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, once all that was to be written before is there."""
        self.checkpointing.remove(path)

    def link_checkpoint(self, target: str | Path, link: str | Path) -> None:
        """Let `link` be a symbolic link to a checkpoint."""
        if self.is_global_zero:
            self.checkpointing.saver.wait()
            link = Path(link)
            if link.is_symlink() or link.is_file():
                link.unlink()
            elif link.is_dir():
                shutil.rmtree(link)
            link.symlink_to(os.path.relpath(target, link.parent))
        self.world.barrier("link")

    def may_save(self) -> bool:
        """Whether no callback objects to a checkpoint now (NaNWatch does, when the weights are spoilt)."""
        asked = (getattr(callback, "allows_checkpoint", None) for callback in self.callbacks)
        return all(allows(self) for allows in asked if allows is not None)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate, with precision and hooks; for manual optimization."""
        if self.distributed is not None:
            from hasten.parallel import before_backward

            before_backward(self.distributed, loss)
        backward_of(self, self.hooks)(loss, *args, **kwargs)

    def cannot_log(self, name: str) -> None:
        """`self.log` was called where nothing is collected."""
        if self.barebones:
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
        if self.max_epochs == -1:
            return math.inf if self.max_steps == -1 else self.max_steps
        if self.train_source is None:
            self.setup_source("train")
        if math.isinf(self.num_training_batches):
            return math.inf if self.max_steps == -1 else self.max_steps
        assert self.max_epochs is not None
        if self._accumulates_by_schedule():
            raise self.misconfigured(
                "estimated_stepping_batches is not known where accumulate_grad_batches is a schedule by epoch",
                "give a number, or say the number of steps yourself",
            )
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * max(self.max_epochs, 1)
        return min(steps, self.max_steps) if self.max_steps != -1 else steps

    def _accumulates_by_schedule(self) -> bool:
        schedulers = self._callbacks_named("GradientAccumulationScheduler")
        return any(getattr(one, "going_to_accumulate_grad_batches", bool)() for one in schedulers)

    # -- what session and loops call -------------------------------------------------------------------

    def _only_try(self, batches: int) -> None:
        self.limit_train_batches = self.limit_val_batches = batches
        self.limit_test_batches = self.limit_predict_batches = batches
        self.max_steps, self.max_epochs, self.min_steps, self.min_epochs = batches, 1, None, None
        self.num_sanity_val_steps, self.val_check_interval, self.check_val_every_n_epoch = 0, 1.0, 1

    def _attach(self, model: Any, fn: str, first: Any, datamodule: Any, **loaders: Any) -> None:
        if self.stage.status == "running":
            raise self.misconfigured(
                f"{fn}() is called while {self.stage.fn}() runs", "use another Trainer for it, or call it afterwards"
            )
        say.refuse_class(f"{fn}(model)", model)
        say.refuse_class("datamodule", datamodule)
        trained = self.model
        model = trained if model is None or (isinstance(trained, LossModule) and model is trained.net) else model
        if model is None:
            raise TypeError(
                f"`Trainer.{fn}()` requires a `LightningModule` or a `hasten.Module`: none was given, and none was"
                " trained before"
            )
        model = getattr(model, "_orig_mod", model)  # what torch.compile(module) gave
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "training_step"):
            raise say.NotAModuleError(
                f"`Trainer.{fn}()`: model must be a `LightningModule` or a `hasten.Module`,"
                f" got `{type(model).__name__}`",
                "for a plain nn.Module: fit(model, loader, loss=torch.nn.functional.cross_entropy)",
            )
        if datamodule is None and hasattr(first, "train_dataloader") and hasattr(first, "prepare_data"):
            datamodule, loaders = first, dict.fromkeys(loaders)
        if datamodule is not None and any(loader is not None for loader in loaders.values()):
            raise self.misconfigured(f"{fn}() got both loaders and a datamodule", "give one of them")
        if fn == "fit":
            self._begin_anew()
        self.model = model
        self.datamodule = datamodule
        if datamodule is not None:
            datamodule.trainer = self
        self.loaders = loaders
        for kind in ("train", "val", "test", "predict"):
            if kind in loaders or fn == "fit":
                setattr(self, f"{kind}_source", None)
        self.reloaded_at = {"train": -math.inf, "val": -math.inf}

    def _begin_anew(self) -> None:
        if self.max_epochs is None:
            if self.max_steps == -1 and not self._callbacks_named("Timer"):
                self.warn(
                    "`max_epochs` was not set. Setting it to 1000 epochs. -1 trains until something else stops it."
                )
                self.max_epochs = 1000
            else:
                self.max_epochs = -1
        if self.min_epochs is not None and self.max_epochs not in (-1, None) and self.min_epochs > self.max_epochs:
            raise self.misconfigured(f"min_epochs={self.min_epochs} is more than max_epochs={self.max_epochs}")
        if self.min_steps is not None and self.max_steps != -1 and self.min_steps > self.max_steps:
            raise self.misconfigured(f"min_steps={self.min_steps} is more than max_steps={self.max_steps}")
        for line in self._remarks:
            self.say(line, once=True)

    def _weights(self, model: Any, path: str | Path | None) -> str | None:
        """The checkpoint whose weights an evaluation takes."""
        if path is not None or model is not None:
            return self.checkpointing.find(path, "evaluate")
        saved = [one for one in self.checkpoint_callbacks if getattr(one, "best_model_path", "")]
        if not saved or self.fast_dev_run:
            return None
        self.warn(
            "no model and no ckpt_path were given: The best model of the previous `fit` call will be used. Say"
            ' ckpt_path="best" if that is meant, or give the model'
        )
        return self.checkpointing.find("best")

    @property
    def collective_strategy(self) -> str:
        """The strategy as the parallel room knows it."""
        name = self.strategy_name
        return "ddp" if name.startswith("ddp") else name

    @property
    def has_hooks(self) -> bool:
        """Whether a stage has got so far that hooks are known."""
        return self.hooks is not None

    def lightning_attached(self) -> None:
        """Meet a LightningModule: give it what it reads of its trainer."""
        self.lightning = None
        if say.uses_lightning():
            from hasten.trainer.lightning import is_lightning
            from hasten.trainer.lightning.face import Face

            if is_lightning(self.model) or any(map(is_lightning, self.callbacks)) or is_lightning(self.datamodule):
                self.lightning = Face(self)
        if isinstance(self.model, Module):
            self.model.__dict__["_trainer"] = self
        else:
            self.model.trainer = self

    def bases(self, what: str) -> tuple[type, ...]:
        """The classes whose methods are defaults, of modules, callbacks or datamodules."""
        from hasten.trainer.callbacks.base import Callback

        own: dict[str, tuple[type, ...]] = {"module": (Module, ModuleHooks), "callback": (Callback,), "datamodule": ()}
        if not say.uses_lightning():
            return own[what]
        from hasten.trainer.lightning import bases

        return own[what] + bases(what)

    def profiled(self, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A hook behind the profiler."""
        profile = self.profiler.profile

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with profile(label):
                return method(*args, **kwargs)

        return timed

    def has_step(self, name: str) -> bool:
        """Whether the module has a step of its own."""
        return overridden(self.model, name, *self.bases("module"))

    _has_step = has_step

    def _has_loader(self, kind: str) -> bool:
        return checks.has_loader(self, kind)

    def new_board(self, training: bool) -> Board:
        """Where values are logged; None where nothing is."""
        if self.barebones:
            return _NoBoard(training)
        reduce = None if self.world.size == 1 else self._reduce
        return Board(training, reduce, self.misconfigured)

    def _reduce(self, value: torch.Tensor, reduce_op: str = "mean", group: Any = None) -> torch.Tensor:
        return self.world.reduce(value, str(reduce_op).lower().replace("avg", "mean"))

    def setup_source(self, kind: str) -> None:
        """Ask for the loaders of a kind ("train", "val", "test", "predict") and make them ready."""
        feeding.setup(self, kind)

    def _due(self, kind: str) -> bool:
        every = self.reload_dataloaders_every_n_epochs
        return bool(every) and self.current_epoch - self.reloaded_at[kind] >= every

    def training_source(self) -> Any:
        """The training loaders of this epoch."""
        if self._due("train"):
            self.setup_source("train")
            if self.lightning is not None:
                self.lightning.draw_for_reload(self.train_source.leaves)
        return self.train_source

    def first_step(self, step: Step) -> Step:
        """The first step of a training: techniques that change models see what is called in it."""
        if self.outermost is not None or not self.run.acting("model"):
            return step
        from hasten.trainer.outermost import found_in

        return found_in(step, self)

    def validate_within_fit(self) -> None:
        """A validation between two training steps."""
        from hasten.trainer.evaluate import evaluate, without_gradients

        assert self.loop is not None
        if self.val_source is None or self._due("val"):
            self.setup_source("val")
        self.loop.validation_begins()
        if not sum(self.num_val_batches):
            return
        training = self.board
        board = self.board = self.new_board(training=False)
        self.stage.stage = "validate"
        with without_gradients(False):
            limits, over = self.num_val_batches, self.loop.validation_is_over
            evaluate(self, self.hooks, board, self.val_source, limits, "validate", over)
        self.stage.stage = "train"
        self.board = training

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give values to the loggers; this reads them from the device."""
        if not self.loggers or not values:
            return
        numbers = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        if step is None:
            given = numbers.pop("step", None)
            step = int(given) if given is not None else self.logged_steps
            if given is None:
                numbers.setdefault("epoch", self.current_epoch)
        if self.is_global_zero:
            for logger in self.loggers:
                logger.log_metrics(metrics=dict(numbers), step=step)
                if not isinstance(logger, Logger):  # hasten's own know when to write
                    logger.save()

    def stop_if_signalled(self, stepped: bool = True, together: bool = False) -> None:
        """Save and end, if somebody asked for it.

        Args:
            stepped: Whether the batch just done ended with an optimizer step.
            together: All ranks are at this point now.
        """
        asked = self.asked_to_stop
        if self.world.size > 1 and together:
            asked = int(self.world.reduce(torch.tensor(float(asked)), "max"))
        elif asked and self.agreement is not None:
            if self.stage.fn != "fit":
                self.agreement.tell()
            elif self.validating:  # ranks do not meet in its batches: after it
                return
            else:
                asked = self.agreement.is_now(stepped)
        if asked:
            self.asked_to_stop = asked
            session.stop(self)

    def __getattr__(self, name: str) -> Any:
        """Names that only Lightning's own classes read (`strategy`, `fit_loop`, ...) are answered by its face."""
        if not name.startswith("__") and "metrics" in self.__dict__ and say.uses_lightning():
            from hasten.trainer.lightning.face import Face

            face = self.__dict__.get("lightning") or self.__dict__.setdefault("_face", Face(self))
            if hasattr(type(face), name) or name in face.__dict__:
                return getattr(face, name)
        raise AttributeError(f"Trainer has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("hooks", "loop", "distributed", "lightning", "_face", "board", "agreement", "before_own_step"):
            state[name] = None
        state["counted_optimizers"] = []  # made anew for each fit
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return new


class _NoBoard(Board):
    """Keeps nothing, for `barebones`."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed Python, NumPy and torch.

    Args:
        seed: From 0 to 2**32 - 1.
        workers: Kept for those who pass it: workers get seeds of their own from torch in any case.

    Returns:
        The seed.
    """
    import numpy

    given: Any = seed
    if not isinstance(given, int | numpy.integer) or not 0 <= given < 2**32:
        raise HastenError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    seed = int(given)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002  # what scripts draw from
    torch.manual_seed(seed)
    return seed
