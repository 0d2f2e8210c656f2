"""From `fit`, `validate`, `test` or `predict` to its end: set up, run, tear down, in Lightning's order."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.data import rng
from hasten.parallel import ending, guard, open_world, sync_batchnorm, wrap
from hasten.trainer import attachments, checks, evaluate, signals, spawned
from hasten.trainer.hooks import Hooks
from hasten.trainer.loop import FitLoop
from hasten.trainer.optimizing import parsed
from hasten.trainer.outermost import change_again
from hasten.trainer.profiling import measures
from hasten.trainer.stages import Function
from hasten.trainer.steps import CountedOptimizer

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_STAGES = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}


def run(trainer: Trainer, fn: str, path: str | None, **options: Any) -> Any:
    """Run one stage; whatever happens, callbacks and loggers hear of its end."""
    if strategy := spawned.strategy_of(trainer):
        return spawned.run(trainer, strategy, fn, path, options)
    trainer.should_stop = trainer.interrupted = False
    trainer.asked_to_stop = 0
    with contextlib.ExitStack() as stack:
        if not trainer.opened:
            trainer.world = open_world(
                trainer.accelerator_flag, trainer.devices, trainer.num_nodes, trainer.collective_strategy
            )
            trainer.opened = True
            for logger in trainer.loggers:
                if hasattr(type(logger), "agree"):  # one folder for all processes
                    logger.agree(trainer.world)
        trainer.stage.fn, trainer.stage.stage, trainer.stage.status = fn, _STAGES[fn], "running"
        stack.enter_context(guard(trainer.world))
        try:
            stack.enter_context(signals.watched(trainer))
            return _run(trainer, Function(fn), path, **options)
        except BaseException as error:
            if trainer.lightning is not None and trainer.lightning.is_leaving(error):
                _left(trainer)
                return None
            _failed(trainer, error)
            if isinstance(error, KeyboardInterrupt) and not signals.is_interactive():
                raise SystemExit(128 + signal.SIGINT) from error
            raise
        finally:
            trainer.board = None
            for technique in trainer.run.acting("restore"):  # what comes after this training is not its own
                technique.restore()
            messages.settle()  # the exit code is the training's, though nobody can read what was said


def _left(trainer: Trainer) -> None:
    """A callback wanted the run for itself, and is done with it."""
    hooks, fn = trainer.hooks, trainer.stage.fn
    if (own := hooks.of_datamodule("teardown")) is not None:
        own(stage=fn)
    hooks.call("teardown", stage=fn)
    for logger in trainer.loggers:
        logger.finalize("success")
    _tear_down(trainer)
    trainer.stage.status, trainer.stage.stage = "finished", None


def _failed(trainer: Trainer, error: BaseException) -> None:
    trainer.stage.status = "interrupted"
    trainer.interrupted = True
    for hook in trainer.hooks.of_callbacks("on_exception") if trainer.has_hooks else ():
        hook(error)
    if trainer.has_hooks and (own := trainer.hooks.of_datamodule("on_exception")) is not None:
        own(error)
    for logger in trainer.loggers:
        logger.finalize("failed")
    try:
        _tear_down(trainer)
    except Exception as second:  # the first error is the one to show
        messages.warn(f"while ending: {second}", stacklevel=2)
    trainer.stage.stage = None


def _run(trainer: Trainer, fn: str, path: str | None, **options: Any) -> Any:
    model = trainer.model
    trainer.lightning_attached()
    trainer.hooks = Hooks(
        trainer,
        model,
        trainer.bases("module"),
        trainer.bases("callback"),
        trainer.bases("datamodule"),
        trainer.profiled if measures(trainer.profiler) else None,
    )
    hooks = trainer.hooks
    trainer.board = None if fn == "predict" else trainer.new_board(training=fn == "fit")
    if (own := hooks.of_module("configure_callbacks")) is not None:
        attachments.with_module_callbacks(trainer, own())
    checks.check(trainer, fn)
    if measures(trainer.profiler):
        if trainer.lightning is not None:
            trainer.lightning.before_profiling()
        trainer.profiler.setup(stage=fn, local_rank=None, log_dir=trainer.log_dir)
    _prepare_data(trainer)
    # Weights & Biases first: it copies what TensorBoard writes, if it sees that begin.
    for logger in sorted(trainer.loggers, key=lambda one: type(one).__name__ != "WandbLogger"):
        if not isinstance(logger, attachments.Silent) and hasattr(type(logger), "experiment"):
            _ = logger.experiment  # made now, so that all that follows finds the logger's folder
    trainer.world.barrier("setup")
    if trainer.lightning is not None:
        trainer.lightning.before_setup()
    if (own := hooks.of_datamodule("setup")) is not None:
        own(stage=fn)
    hooks.call("setup", stage=fn)
    trainer.world.barrier("after setup")
    if (own := hooks.of_module("configure_model")) is not None:
        own()
    trainer.checkpointing.load(path)
    trainer.checkpointing.restore_model()
    trainer.metrics.clear()
    _to_device(trainer)
    if fn == "fit":
        _optimizers(trainer)
        hooks.call("on_fit_start")
    if trainer.enable_autolog_hparams:
        _log_hparams(trainer)
    resumed = trainer.checkpointing.restore_training() if fn == "fit" else None
    trainer.checkpointing.loaded = None
    answer = _stage(trainer, fn, resumed, **options)
    _tear_down(trainer)
    if fn == "fit":
        hooks.call("on_fit_end")
    if (own := hooks.of_datamodule("teardown")) is not None:
        own(stage=fn)
    hooks.call("teardown", stage=fn)
    model.__dict__["_current_fx_name"] = None
    for logger in trainer.loggers:
        logger.finalize("success")
    if measures(trainer.profiler):
        trainer.profiler.describe()
    trainer.stage.status, trainer.stage.stage = "finished", None
    for line in trainer.run.skipped:
        trainer.say(f"skipped: {line}", once=True)
    if fn == "fit":
        for line in (*trainer.run.idle(), *trainer.run.left_alone()):
            trainer.say(line, once=True)
    return answer


def _prepare_data(trainer: Trainer) -> None:
    """Once a machine, or once in all: before any process goes on."""
    hooks, world = trainer.hooks, trainer.world
    for owner, own in (
        (trainer.datamodule, hooks.of_datamodule("prepare_data")),
        (trainer.model, hooks.of_module("prepare_data")),
    ):
        if own is None:
            continue
        each_node = getattr(owner, "prepare_data_per_node", True)
        if world.local_rank == 0 if each_node else world.rank == 0:
            own()
        world.barrier("prepare_data")


def _to_device(trainer: Trainer) -> None:
    """The module on its device, in its precision, as the process-wide techniques want it."""
    model, run = trainer.model, trainer.run
    if not trainer.processed:
        trainer.processed = True
        run.process()
    else:
        for technique in run.acting("restore"):
            if technique.active:
                technique.process()
    if trainer.deterministic is not None:
        if trainer.deterministic and trainer.device.type == "cuda":
            import os

            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(bool(trainer.deterministic), warn_only=trainer.deterministic == "warn")
    if trainer.benchmark is False:
        torch.backends.cudnn.benchmark = False
    if trainer.sync_batchnorm and trainer.world.size == 1:
        trainer.say("sync_batchnorm=True is of no use here: there is one process", once=True)
    elif trainer.sync_batchnorm:
        trainer.model = model = sync_batchnorm(model, trainer.world)
    model.to(trainer.device)
    for technique in run.techniques:
        prepare = getattr(technique, "prepare", None)
        if prepare is not None:
            prepare(model)


def _optimizers(trainer: Trainer) -> None:
    hooks, model = trainer.hooks, trainer.model
    own = hooks.of_module("configure_optimizers")
    given = own() if own is not None else model.configure_optimizers()
    trainer.optimizers, trainer.lr_scheduler_configs = parsed(
        given,
        model.automatic_optimization,
        hooks.of_module("lr_scheduler_step") is not None,
        trainer.misconfigured,
    )
    for optimizer in trainer.optimizers:
        trainer.run.optimizer(optimizer)
    before = hooks.of("on_before_optimizer_step")
    if trainer.lightning is not None:
        trainer.counted_optimizers = trainer.lightning.counted(trainer.optimizers)
        trainer.lr_scheduler_configs = trainer.lightning.scheduler_configs(trainer.lr_scheduler_configs)
    else:
        trainer.counted_optimizers = [CountedOptimizer(one, trainer, before) for one in trainer.optimizers]
    trainer.distributed = None
    if trainer.world.size > 1:
        trainer.distributed = wrap(
            model,
            model.training_step,
            trainer.world,
            find_unused_parameters="find_unused" in trainer.strategy_name,
            static_graph="static_graph" in trainer.strategy_name,
        )


def _log_hparams(trainer: Trainer) -> None:
    model, datamodule = trainer.model, trainer.datamodule
    given = [
        dict(getattr(owner, "hparams_initial", None) or owner.hparams)
        for owner in (model, datamodule)
        if owner is not None and getattr(owner, "_log_hyperparams", False)
    ]
    model_has, data_has = given if len(given) == 2 else ({}, {})
    if differ := [str(name) for name in model_has.keys() & data_has if not _same(model_has, data_has, name)]:
        raise RuntimeError(
            f"Error while merging hparams: module and datamodule both have {sorted(differ)}, with different values:"
            " loggers could show only one of them"
        )
    hparams = {name: value for one in given for name, value in one.items()}
    for logger in trainer.loggers:
        if hparams:
            logger.log_hyperparams(hparams)
        if hasattr(logger, "log_graph"):
            logger.log_graph(model)
        logger.save()


def _same(first: dict[str, Any], second: dict[str, Any], name: str) -> bool:
    """Whether a hyper-parameter is the same in both; arrays and tensors must be one object."""
    one, other = first[name], second[name]
    if one is other or type(one) is not type(other):
        return one is other
    return not hasattr(one, "shape") and bool(one == other)


def _stage(trainer: Trainer, fn: str, resumed: dict[str, Any] | None, **options: Any) -> Any:
    hooks = trainer.hooks
    trainer.world.barrier(fn)
    trainer.model.zero_grad()
    if fn == "predict":
        trainer.setup_source("predict")
        if not sum(trainer.num_predict_batches):
            return []
        with evaluate.without_gradients(trainer.inference_mode):
            return evaluate.predict(
                trainer, hooks, trainer.predict_source, trainer.num_predict_batches, options["return_predictions"]
            )
    if fn != "fit":
        kind = "val" if fn == "validate" else "test"
        trainer.setup_source(kind)
        limits = trainer.num_val_batches if kind == "val" else trainer.num_test_batches
        if not sum(limits):
            return []
        board = trainer.board = trainer.new_board(training=False)
        source = trainer.val_source if kind == "val" else trainer.test_source
        with evaluate.without_gradients(trainer.inference_mode):
            results = evaluate.evaluate(trainer, hooks, board, source, limits, fn)
        if options["verbose"]:
            from hasten.trainer.tables import print_results

            print_results(trainer, results, fn)
        return [{name: _plain(value) for name, value in one.items()} for one in results]
    _fit(trainer, resumed)
    return None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _fit(trainer: Trainer, resumed: dict[str, Any] | None) -> None:
    with contextlib.ExitStack() as stack:
        if trainer.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        stack.enter_context(torch.enable_grad())
        trainer.loop = None
        trainer.train_source = None
        validates = trainer.enable_validation and checks.has_loader(trainer, "val")
        if validates and resumed is None and trainer.num_sanity_val_steps:
            _sanity_check(trainer)
        train(trainer, resumed)


def train(trainer: Trainer, resumed: dict[str, Any] | None) -> None:
    """The training itself."""
    if trainer.limit_train_batches == 0 or not trainer.has_step("training_step"):
        return
    trainer.setup_source("train")
    loop = trainer.loop = FitLoop(trainer, trainer.hooks, resumed)
    parameters = dict(trainer.model.named_parameters())
    for name, gradient in (resumed or {"gradients": {}})["gradients"].items():
        parameters[name].grad = gradient.to(parameters[name].device)
    trainer.board = loop.board
    if trainer.validates_this_epoch and trainer.val_source is None:
        trainer.setup_source("val")
    stage, trainer.stage.stage = trainer.stage.stage, "train"
    loop.resume_between_epochs()
    if loop.done():
        trainer.stage.stage = stage
        if trainer.current_epoch and resumed is None and trainer.trained is not trainer.model:
            trainer.warn(
                f"nothing was trained: this Trainer has done its {trainer.current_epoch} epochs, with another module;"
                " make a new Trainer for each"
            )
        return
    if trainer.trained is not trainer.model:
        trainer.trained, trainer.outermost = trainer.model, None
    if resumed is not None and resumed.get("outermost") is not None:
        change_again(trainer, resumed["outermost"])
    _warn_of_eval_mode(trainer)
    trainer.checkpointing.begin()
    loop.run()


def _warn_of_eval_mode(trainer: Trainer) -> None:
    resting = [name for name, module in trainer.model.named_modules() if not module.training]
    if resting:
        trainer.warn(
            f"{len(resting)} modules are in eval mode as training begins ({', '.join(resting[:3])}...): dropout and"
            " BatchNorm rest in them; call .train() on them if that is not meant"
        )


def _sanity_check(trainer: Trainer) -> None:
    """A few validation batches before training, so that a mistake there shows now. Draws nothing from training."""
    state = rng.state()
    stage = trainer.stage.stage
    trainer.stage.stage = "sanity_check"
    for hook in trainer.hooks.of_callbacks("on_sanity_check_start"):
        hook()
    trainer.setup_source("val")
    if sum(trainer.num_sanity_val_batches):
        board = trainer.board = trainer.new_board(training=False)
        with evaluate.without_gradients(False):
            evaluate.evaluate(
                trainer, trainer.hooks, board, trainer.val_source, trainer.num_sanity_val_batches, "validate"
            )
    for hook in trainer.hooks.of_callbacks("on_sanity_check_end"):
        hook()
    trainer.metrics.clear()
    trainer.evaluated_batches = 0
    trainer.stage.stage = stage
    rng.restore(state)


def _tear_down(trainer: Trainer) -> None:
    """What must be left in order, whether the training ended well or not."""
    trainer.metrics.to_cpu()
    trainer.distributed = None
    trainer.run.over()
    if trainer.loop is not None:
        trainer.loop.let_go()
    for source in (trainer.train_source, trainer.val_source):
        for position in source.positions if source is not None else ():
            position.end()
    trainer.checkpointing.release()


def stop(trainer: Trainer) -> None:
    """Somebody asked for an end: save, and leave with an exit code."""
    number = trainer.asked_to_stop
    trainer.interrupted = True
    ending()
    path = trainer.checkpointing.save_interrupted() if trainer.stage.fn == "fit" else None
    name = signal.Signals(number).name
    if path is not None:
        trainer.say(f'{name}: saved {path}; go on with fit(..., ckpt_path="last")')
    else:
        why = "" if trainer.checkpoint_callbacks else "checkpoints are off, so "
        trainer.say(f"{name}: stopped; {why}nothing was saved")
    if number == signal.SIGINT and signals.is_interactive():
        raise KeyboardInterrupt
    raise signals.stopped(number)
