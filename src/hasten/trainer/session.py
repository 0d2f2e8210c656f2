"""Runs one call of `fit`, `validate`, `test` or `predict`: set up, run, tear down, with each hook in its order.

`run` guards `_run` against failure: whatever ends a stage (an error, Ctrl-C, SIGTERM), callbacks and loggers hear of
it, and everything that the stage changed in the process is restored.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.data import rng
from hasten.errors import is_out_of_memory
from hasten.parallel import guard, open_world
from hasten.parallel.sharded import share_of
from hasten.trainer import attachments, checks, evaluate, feeding, rank_checks, setting_up, signals, spawned
from hasten.trainer.callbacks import NaNWatch
from hasten.trainer.loop import FitLoop
from hasten.trainer.profiling import measures
from hasten.trainer.stages import Function

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_STAGES = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}


def run(trainer: Trainer, fn: str, path: str | None, **options: Any) -> Any:
    """Run one stage. Callbacks and loggers hear of its end, even after an error.

    Args:
        trainer: The Trainer.
        fn: "fit", "validate", "test" or "predict".
        path: The checkpoint to load; None: none.
        options: Further arguments of the stage: `verbose`, `return_predictions`.

    Returns:
        The result of the Trainer's method.
    """
    if spawned.must_start_ranks(trainer):
        return spawned.run(run, trainer, fn, path, options)
    engine = trainer.engine
    trainer.progress.should_stop = engine.stopping.interrupted = False
    engine.stopping.signal = 0
    with contextlib.ExitStack() as stack:
        if not engine.opened:
            _open(trainer)
        trainer.stage.fn, trainer.stage.stage, trainer.stage.status = fn, _STAGES[fn], "running"
        stack.enter_context(guard(engine.world))
        try:
            stack.enter_context(signals.watched(trainer))
            return _run(trainer, Function(fn), path, **options)
        except BaseException as error:
            if engine.guest.is_leaving(error):
                _leave(trainer)
                return None
            explained = engine.strategy.explained(error)
            if trainer.training and is_out_of_memory(error):
                error.add_note(_where_memory_ran_out(trainer))
            if trainer.training and (note := _about_the_loss(trainer, error)):
                error.add_note(note)
            _failed(trainer, error)
            if explained is not None:
                raise explained from error
            if isinstance(error, KeyboardInterrupt) and not signals.is_interactive():
                raise SystemExit(128 + signal.SIGINT) from error
            raise
        finally:
            engine.board = None
            for technique in engine.run.techniques_at(
                "restore"
            ):  # code after this training must not run under its techniques
                technique.restore()
            messages.settle()  # a broken output pipe must not change the training's exit code


def _open(trainer: Trainer) -> None:
    """Join the other processes, once per Trainer: later runs use the same world."""
    engine, config = trainer.engine, trainer.config
    strategy = engine.strategy
    where = config.accelerator, config.devices, config.num_nodes
    engine.world = open_world(*where, strategy.collective, timeout=strategy.timeout)
    engine.opened = True
    engine.strategy = engine.strategy.within(engine.world)
    for logger in trainer.loggers:
        if hasattr(type(logger), "agree"):  # all processes must write to one folder
            logger.agree(engine.world)


def _leave(trainer: Trainer) -> None:
    """End a run that a callback left on purpose (a learning-rate finder, for example): no failure."""
    _tell_of_the_end(trainer, trainer.stage.fn)
    _tear_down(trainer)
    trainer.stage.status, trainer.stage.stage = "finished", None


def _tell_of_the_end(trainer: Trainer, fn: str | None) -> None:
    """Call the `teardown` hooks, and finalize the loggers."""
    hooks = trainer.engine.hooks
    if (own := hooks.of_datamodule("teardown")) is not None:
        own(stage=fn)
    hooks.call("teardown", stage=fn)
    for logger in trainer.loggers:
        logger.finalize("success")


def _where_memory_ran_out(trainer: Trainer) -> str:
    """Return the note for an out-of-memory error: the batch, and how to fit it."""
    progress = trainer.progress
    fix = "microbatch=..., smaller" if trainer.config.microbatch else 'microbatch="auto"'
    return (
        f"hasten: memory ran out in batch {progress.batch_idx} of epoch {progress.current_epoch} (optimizer step"
        f" {progress.global_step}).\n  {fix} computes a batch in parts, to the same gradient; `hasten batch` finds the"
        " largest that fits. Checkpoints that were written are whole."
    )


def _about_the_loss(trainer: Trainer, error: BaseException) -> str:
    """Return the note for errors that torch raises for an unusable loss of `training_step`; "" for other errors."""
    text = str(error) if isinstance(error, RuntimeError) and trainer.model.automatic_optimization else ""
    if text.startswith("grad can be implicitly created only for scalar outputs"):
        fix = "it must be one number, as loss.mean() is"
    elif text.startswith("element 0 of tensors does not require grad"):
        fix = "it has no graph (detach(), item(), no_grad(), or no parameter to train)"
    else:
        return ""
    return f"hasten: probably the loss that {type(trainer.model).__name__}.training_step returned: {fix}"


def _failed(trainer: Trainer, error: BaseException) -> None:
    """Tell callbacks, datamodule and loggers of a failure, then tear down."""
    trainer.stage.status = "interrupted"
    trainer.engine.stopping.interrupted = True
    calls: list[Callable[[], Any]] = []
    if (hooks := trainer.engine.hooks) is not None:  # None: it failed before hooks were collected
        calls += [functools.partial(hook, error) for hook in hooks.of_callbacks("on_exception")]
        if (own := hooks.of_datamodule("on_exception")) is not None:
            calls.append(functools.partial(own, error))
    calls += [functools.partial(logger.finalize, "failed") for logger in trainer.loggers]
    _call_each([*calls, functools.partial(_tear_down, trainer)])
    trainer.stage.stage = None


def _call_each(calls: Iterable[Callable[[], Any]]) -> None:
    """Call all functions, even if one raises: a failing `on_exception` must not keep others from cleaning up."""
    later_errors = []
    for call in calls:
        try:
            call()
        except BaseException as second:  # the first error is the one to raise, even if this is another Ctrl-C
            later_errors.append(f"{type(second).__name__}: {second}")
    for line in later_errors:  # after all calls: a warning may be configured to raise
        messages.warn(f"while ending: {line}", stacklevel=3)


def _run(trainer: Trainer, fn: str, path: str | None, **options: Any) -> Any:
    """Set up, run and tear down one stage."""
    engine = trainer.engine
    engine.meet()
    hooks = engine.hooks
    engine.board = None if fn == "predict" else engine.new_board(training=fn == "fit")
    if (hook := hooks.of_module("configure_callbacks")) is not None:
        attachments.with_module_callbacks(trainer, hook())
    checks.check(trainer, fn)
    if measures(trainer.profiler):
        engine.guest.before_profiling()
        trainer.profiler.setup(stage=fn, local_rank=None, log_dir=trainer.log_dir)
    # The order of what follows is the documented order of hooks; callbacks rely on it.
    setting_up.prepare_data(trainer)
    setting_up.open_loggers(trainer)
    engine.world.barrier("setup")
    engine.guest.before_setup()
    if (hook := hooks.of_datamodule("setup")) is not None:
        hook(stage=fn)
    hooks.call("setup", stage=fn)
    engine.world.barrier("after setup")
    if (hook := hooks.of_module("configure_model")) is not None:
        hook()
    if fn == "fit":
        rank_checks.check_model(trainer)  # else ranks that differ would wait for each other in training
    trainer.checkpointing.load(path)
    trainer.checkpointing.restore_model()
    trainer.metrics.clear()
    setting_up.to_device(trainer)
    if fn == "fit":
        setting_up.optimizers(trainer)
        hooks.call("on_fit_start")
    if trainer.config.enable_autolog_hparams:
        setting_up.log_hparams(trainer)
    resumed = trainer.checkpointing.restore_training() if fn == "fit" else None
    trainer.checkpointing.loaded = None  # free the checkpoint's memory
    answer = _stage(trainer, fn, resumed, **options)
    _tear_down(trainer)
    if fn == "fit":
        hooks.call("on_fit_end")
    _tell_of_the_end(trainer, fn)
    engine.model.__dict__["_current_fx_name"] = None
    if measures(trainer.profiler):
        trainer.profiler.describe()
    trainer.stage.status, trainer.stage.stage = "finished", None
    _tell_of_techniques(trainer, fn)
    if fn == "fit":
        _tell_of_nan(trainer)
    return answer


def _tell_of_techniques(trainer: Trainer, fn: str) -> None:
    """Print which techniques were skipped, and which found nothing to act on."""
    run = trainer.engine.run
    for line in run.skipped:
        trainer.say(f"skipped: {line}", once=True)
    if fn == "fit":
        for line in (*run.idle(), *run.left_alone()):
            trainer.say(line, once=True)


def _tell_of_nan(trainer: Trainer) -> None:
    """Print that a logged loss was NaN at the end: during training only a NaNWatch reads losses from the device."""
    if any(isinstance(callback, NaNWatch) for callback in trainer.callbacks):
        return
    for name, value in trainer.metrics.callback.items():
        if "loss" in name and math.isnan(float(value)):  # the run is over, so waiting for the device costs nothing
            trainer.say(
                f"{name} was nan at the end\n  callbacks=[NaNWatch()] stops at the first such step and names it"
            )
            return


def _stage(trainer: Trainer, fn: str, resumed: dict[str, Any] | None, **options: Any) -> Any:
    engine = trainer.engine
    engine.world.barrier(fn)
    trainer.model.zero_grad()
    if fn == "fit":
        _fit(trainer, resumed)
        return None
    kind = {"validate": "val", "test": "test", "predict": "predict"}[fn]
    feeding.setup(trainer, kind)
    feed = engine.feeds[kind]
    if not sum(feed.limits):
        return []
    with evaluate.without_gradients(trainer.config.inference_mode and engine.strategy.inference_mode):
        if fn == "predict":
            return evaluate.predict(trainer, engine.hooks, feed.source, feed.limits, options["return_predictions"])
        board = engine.board = engine.new_board(training=False)
        results = evaluate.evaluate(trainer, engine.hooks, board, feed.source, feed.limits, fn)
    if options["verbose"]:
        evaluate.print_results(trainer, results, fn)
    return [{name: _plain(value) for name, value in result.items()} for result in results]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _fit(trainer: Trainer, resumed: dict[str, Any] | None) -> None:
    """Run the sanity check, then train."""
    with contextlib.ExitStack() as stack:
        if trainer.config.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        stack.enter_context(torch.enable_grad())
        trainer.engine.loop = None
        trainer.engine.feeds["train"].source = None
        validates = trainer.enable_validation and checks.has_loader(trainer.engine, "val")
        if validates and resumed is None and trainer.config.num_sanity_val_steps:
            _sanity_check(trainer)
        train(trainer, resumed)


def train(trainer: Trainer, resumed: dict[str, Any] | None) -> None:
    """Train: build the loop, restore its position and gradients, and run it."""
    engine = trainer.engine
    if trainer.config.limit_train_batches == 0 or not engine.has_step("training_step"):
        return
    feeding.setup(trainer, "train")
    loop = engine.loop = FitLoop(trainer, engine.hooks, resumed)
    parameters = dict(trainer.model.named_parameters())
    for name, gradient in (resumed or {"gradients": {}})["gradients"].items():
        parameter = parameters[name]
        if not parameter.is_meta:  # a meta parameter belongs to another pipeline stage
            # Converted: FSDP may have gathered the gradient of a 16-bit parameter in float32.
            parameter.grad = share_of(gradient.to(parameter.device, parameter.dtype), parameter)
    engine.board = loop.board
    if trainer.validates_this_epoch and engine.feeds["val"].source is None:
        feeding.setup(trainer, "val")
    stage, trainer.stage.stage = trainer.stage.stage, "train"
    loop.resume_between_epochs()
    if loop.is_done():
        trainer.stage.stage = stage
        if trainer.current_epoch and resumed is None and engine.trained is not engine.model:
            trainer.warn(
                f"nothing was trained: this Trainer has done its {trainer.current_epoch} epochs, with another module;"
                " make a new Trainer for each"
            )
        return
    if engine.trained is not engine.model:
        engine.trained, engine.outermost = engine.model, None
    if resumed is not None and resumed.get("outermost") is not None:
        engine.change_again(resumed["outermost"])
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
    """Run a few validation batches before training, so that a mistake there shows early. Restores the random state."""
    engine, state = trainer.engine, rng.state()
    stage = trainer.stage.stage
    trainer.stage.stage = "sanity_check"
    for hook in engine.hooks.of_callbacks("on_sanity_check_start"):
        hook()
    feeding.setup(trainer, "val")
    limits = trainer.num_sanity_val_batches
    if sum(limits):
        board = engine.board = engine.new_board(training=False)
        with evaluate.without_gradients(False):
            evaluate.evaluate(trainer, engine.hooks, board, engine.feeds["val"].source, limits, "validate")
    for hook in engine.hooks.of_callbacks("on_sanity_check_end"):
        hook()
    trainer.metrics.clear()
    trainer.progress.evaluated_batches = 0
    trainer.stage.stage = stage
    rng.restore(state)


def _tear_down(trainer: Trainer) -> None:
    """Release what the stage held, whether it ended well or not."""
    engine = trainer.engine
    trainer.metrics.to_cpu()
    engine.optimizing.release()
    engine.strategy.release()
    engine.run.teardown()
    if engine.loop is not None:
        engine.loop.let_go()
    for feed in (engine.feeds["train"], engine.feeds["val"]):
        for position in feed.source.positions if feed.source is not None else ():
            position.end()
    trainer.checkpointing.release()
