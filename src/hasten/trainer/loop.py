"""The training loop of `fit`: epochs, batches, and the logging, validation and scheduler steps between them.

`FitLoop.run` calls `_epoch`, which calls `_batches`. Before the first batch it is settled which hooks are defined and
what a step consists of (`hooks.py`, `steps.py`), so an unused feature costs nothing per batch.

`progress.point` names how far the current batch or epoch is. A checkpoint stores it, and a resumed fit does only what
comes after that point, so a checkpoint may be saved in any hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.data import rng
from hasten.trainer import feeding, signals, sources, steps
from hasten.trainer.logged import LoggedValues
from hasten.trainer.optimizing import step_schedulers
from hasten.trainer.outputs import manual_outputs_of, outputs_of
from hasten.trainer.validation import Validation

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hook, Hooks
    from hasten.trainer.trainer import Trainer

    InputPipeline = tuple[Callable[[], Any], list[Callable[[Any, int], Any]], steps.Step, Callable[[Hook], Hook]]
    """Function that fetches a batch, functions that prepare it, the step, and an adapter for hooks around the step."""


class FitLoop:
    """Runs the epochs of one `fit`.

    Attributes:
        last: Whether the current batch is the epoch's last.
        resumed: State of the checkpoint to resume from, until its epoch has been entered.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks, resumed: dict[str, Any] | None) -> None:
        self.trainer = trainer
        self.hooks = hooks
        self.resumed = resumed
        self.engine = trainer.engine
        self.progress = trainer.progress
        self.feed = self.engine.feeds["train"]
        self.board: LoggedValues = self.engine.new_board(training=True)
        self.last = False
        self.ahead: feeding.Lookahead | None = None
        self.cut: dict[str, Any] | None = None  # state of an epoch that max_steps cut short
        self.validation = Validation(trainer, None if resumed is None else resumed.get("val_positions"))
        if resumed is None:
            self.progress.begin_fit()
        else:
            self.board.load_state_dict(resumed["board"], dict(trainer.model.named_modules()))

    # -- epochs ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until a limit is reached or somebody sets `should_stop`."""
        trainer, hooks = self.trainer, self.hooks
        torch.set_grad_enabled(True)
        hooks.call("on_train_start")
        step = (steps.automatic if trainer.model.automatic_optimization else steps.manual)(trainer, hooks)
        self.validation.restart_clock()
        while not self.is_done():
            self._epoch(step)
        hooks.call("on_train_end")

    def is_done(self) -> bool:
        """Return whether training is over; print which limit ended it."""
        trainer, progress, config = self.trainer, self.progress, self.trainer.config
        if self.feed.total == 0:
            trainer.say("fit stopped: there are no training batches")
            return True
        if config.max_steps != -1 and progress.global_step >= config.max_steps:
            trainer.say(f"fit stopped: max_steps={config.max_steps} reached")
            return True
        if config.max_epochs is not None and -1 != config.max_epochs <= progress.epochs_processed:
            progress.current_epoch = progress.epochs_processed
            trainer.say(f"fit stopped: max_epochs={config.max_epochs} reached")
            return True
        return progress.should_stop and self.may_stop()

    def may_stop(self) -> bool:
        """Return whether `min_epochs` and `min_steps` are reached."""
        progress, config = self.progress, self.trainer.config
        enough = not config.min_epochs or progress.epochs_processed >= config.min_epochs
        return bool(enough and (not config.min_steps or progress.global_step >= config.min_steps))

    def resume_between_epochs(self) -> None:
        """Resume from a checkpoint that was saved between two epochs: finish what is left of the first."""
        resumed = self.resumed
        if resumed is None or resumed["point"] not in ("epoch_end", "epoch_start"):
            return
        self.resumed = None
        for position, state in zip(self.feed.source.positions, resumed["positions"], strict=False):
            position.resume(state)
        rng.restore(resumed["rng"])
        if resumed["point"] == "epoch_end":
            self._epoch_is_over(resumed["whole"])

    def _epoch(self, step: steps.Step) -> None:
        """Run one epoch."""
        trainer, hooks, board, progress = self.trainer, self.hooks, self.board, self.progress
        source = self.engine.training_source()
        for leaf in source.leaves:
            sources.set_epoch(leaf, progress.epochs_processed)
        resumed, self.resumed = self.resumed, None
        if resumed is None:
            progress.batch_idx, self.last = 0, False
            hooks.call("on_train_epoch_start")
        self._begin_pass(source, resumed)
        try:
            self._batches(step)
        except StopIteration:
            # A step with `dataloader_iter` asked for more batches than there are. Any other step has a bug.
            if not feeding.draws_batches(trainer.model.training_step):
                raise
            self.last = True
        if not progress.batch_idx and self.ahead is not None and not progress.should_stop:
            trainer.warn(
                f"the training loader gave no batch in epoch {progress.current_epoch}: it is used up (a generator can"
                " be read only once; give an object whose __iter__ starts again)"
            )
        trainer.collect()  # the last step's values: once `stepping` is False, only epoch values are collected
        board.stepping = False
        trainer.collect()
        board.batch = None
        # An epoch cut short by max_steps: keep its state before the positions end. A checkpoint saved later, even
        # after `fit`, then resumes within the epoch (`fit` with a larger max_steps).
        self.cut = None if self._at_the_end() or progress.should_stop else self.state_dict()
        for position in source.positions:
            position.end()
        progress.epochs_processed += 1
        progress.point = "epoch_end"
        # Callbacks with a `monitor` (EarlyStopping, ModelCheckpoint) come last: the others and the module may log in
        # their hooks the value that is monitored.
        for hook in hooks.of_callbacks("on_train_epoch_end", monitoring=False):
            hook()
        if (module_hook := hooks.of_module("on_train_epoch_end")) is not None:
            module_hook()
        for hook in hooks.of_callbacks("on_train_epoch_end", monitoring=True):
            hook()
        self._epoch_is_over(self._at_the_end())

    def _epoch_is_over(self, complete: bool) -> None:
        """Do what follows the hooks of an epoch's end. Checkpoints saved in those hooks resume here."""
        trainer, board, progress = self.trainer, self.board, self.progress
        board.stepping = False
        trainer.collect()
        if complete:
            step_schedulers(trainer, "epoch", plateau=True)
        progress.logged_steps -= 1  # epoch values are logged at the epoch's last step
        trainer.log(board.collect(trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.bar))
        progress.logged_steps += 1
        board.reset()
        progress.current_epoch += 1
        progress.point = "epoch_start"
        signals.stop_if_asked(trainer, together=True)

    def _begin_pass(self, source: sources.Combined, resumed: dict[str, Any] | None) -> None:
        """Open this epoch's pass through the loaders, from its start or from a checkpoint's position."""
        resumed = None if resumed is None else source.as_now(resumed)
        self.fetch = source.begin(self.engine.run, None if resumed is None else resumed["positions"])
        self.ahead = None
        if math.isinf(self.feed.total):  # no length: only drawing one batch ahead tells which batch is the last
            self.ahead = feeding.Lookahead(self.fetch)
            self.fetch = self.ahead.fetch
        if resumed is None:
            return
        self.progress.enter_epoch(resumed)
        if self.ahead is not None and resumed["before_ahead"] is not None:
            rng.restore(resumed["before_ahead"])  # draw the batch ahead again, with the same random numbers
            self.ahead.draw()
        self.last = self._is_last()
        self.board.stepping = resumed.get("stepping", False)
        rng.restore(resumed["rng"])  # last: opening the pass and drawing ahead use random numbers

    def let_go(self) -> None:
        """Drop the last pass after training, so its workers and prefetched batches are freed."""
        self.fetch = feeding.nothing_left
        if self.ahead is not None:
            self.ahead.release()

    # -- batches ---------------------------------------------------------------------------------------

    def _batches(self, step: steps.Step) -> None:
        """Run the epoch's batches, from the current position on."""
        trainer, hooks, board, progress, engine = self.trainer, self.hooks, self.board, self.progress, self.engine
        total, ahead = self.feed.total, self.ahead
        fetch, preparing, step, adapt = self._input_pipeline(step)
        on_start = hooks.adapted_callbacks("on_train_batch_start", adapt)
        module_start = adapt(module_hook) if (module_hook := hooks.of_module("on_train_batch_start")) else None
        skipping, on_end = hooks.at_batch_end(adapt)
        next_look = progress.batch_idx  # the next batch at which a callback that skips batches is due
        automatic = trainer.model.automatic_optimization
        given_to_hooks = outputs_of if automatic else manual_outputs_of
        scheduled = automatic and bool(engine.optimizing.schedulers)
        run_step = engine.first_step(step)  # a first step that finds the outermost modules; once only
        self.validation.enabled = trainer.validates_this_epoch

        self._finish_resumed_batch()
        while not self._epoch_done():
            try:
                batch = fetch()
            except StopIteration:
                break
            progress.point = "batch"
            batch_idx = progress.batch_idx
            last = self.last = batch_idx + 1 == total or (ahead is not None and ahead.over)
            for prepare in preparing:
                batch = prepare(batch, 0)
            board.begin_batch(batch)
            output: Any = None
            every = trainer.config.accumulate_grad_batches  # per batch: a callback may change it
            ends_epoch = False
            if batch is None:
                messages.warn("train_dataloader yielded None: batch skipped", stacklevel=2)
            else:
                for hook in on_start:
                    hook(batch, batch_idx)
                ends_epoch = module_start is not None and module_start(batch, batch_idx) == -1
                if not ends_epoch:
                    output = run_step(batch, batch_idx, not batch_idx % every, last or not (batch_idx + 1) % every)
                    run_step = step
            # Counted before the hooks of the batch's end: a checkpoint saved in them resumes with the next batch.
            progress.batch_idx += 1
            progress.total_batches += 1
            if ends_epoch:  # on_train_batch_start returned -1
                self.last = True
            if scheduled:
                self._step_schedulers()
            if ends_epoch:
                break
            progress.point = "batch_end"
            over = progress.should_stop or progress.global_step == trainer.config.max_steps
            calls_skipping = over or last or batch_idx >= next_look
            if on_end or (calls_skipping and skipping):
                outputs = None if batch is None else given_to_hooks(output, every)
                if calls_skipping:
                    next_look = _call_skipping(skipping, outputs, batch, batch_idx)
                for hook in on_end:
                    hook(outputs, batch, batch_idx)
                outputs = None
            board.batch = batch = output = None  # free their memory before the next batch comes
            self._after_batch(progress.batch_idx - 1)
        trainer.model.__dict__["_current_fx_name"] = None

    def _input_pipeline(self, step: steps.Step) -> InputPipeline:
        """Return how batches reach the step; a step that takes `dataloader_iter` draws them itself."""
        if not feeding.draws_batches(self.trainer.model.training_step):
            return self.fetch, feeding.batch_transforms(self.trainer, "train"), step, lambda hook: hook
        drawn = feeding.DataLoaderIterator(self.fetch, self.progress.batch_idx)
        return drawn.itself, [], self._drawing(step, drawn), drawn.with_last_batch

    def _finish_resumed_batch(self) -> None:
        """Resume from a checkpoint that was saved in a hook at a batch's end: finish what is left of that batch."""
        progress = self.progress
        if progress.point in ("batch_end", "validated") and progress.batch_idx:
            self._after_batch(progress.batch_idx - 1, validates=progress.point == "batch_end")

    def _step_schedulers(self) -> None:
        """Step the schedulers that monitor no metric."""
        if not self.accumulating():
            step_schedulers(self.trainer, "step", plateau=False)
        if self.last:
            step_schedulers(self.trainer, "epoch", plateau=False)

    def _drawing(self, step: steps.Step, drawn: feeding.DataLoaderIterator) -> steps.Step:
        """Wrap a step that draws its batches itself: count each drawn batch, and end the epoch with the last."""

        def stepped(batch: Any, batch_idx: int, opens: bool, closes: bool) -> Any:
            output = step(batch, batch_idx, opens, closes)
            self.progress.batch_idx = drawn.count - 1  # the loop adds one after the step
            over = self.ahead is not None and self.ahead.over
            self.last = over or drawn.count >= self.feed.total
            return output

        return stepped

    def _after_batch(self, batch_idx: int, validates: bool = True) -> None:
        """Log, validate and step schedulers, after the batch-end hooks. Checkpoints saved in those resume here."""
        trainer, progress = self.trainer, self.progress
        accumulating = self.accumulating()
        if validates:
            if not accumulating or not trainer.model.automatic_optimization:
                every = trainer.config.log_every_n_steps
                logs_now = every and not (progress.logged_steps + 1) % every
                if logs_now or progress.should_stop or trainer.config.fast_dev_run:
                    trainer.log(trainer.collect())
            if self.validation.enabled:
                stops = progress.should_stop and self.may_stop()
                if self.validation.is_due(batch_idx, self.last, stops):
                    self._validate(accumulating)
        if self.engine.optimizing.schedulers and not accumulating:  # after validation, whose metrics they monitor
            step_schedulers(trainer, "step", plateau=True)
        if not accumulating:
            progress.logged_steps += 1
        progress.point = "between"
        if self.engine.stopping.signal:
            signals.stop_if_asked(trainer, stepped=not accumulating)

    def accumulating(self) -> bool:
        """Return whether the last batch's gradients wait for further batches before the optimizer steps."""
        return not self.last and bool(self.progress.batch_idx % self.trainer.config.accumulate_grad_batches)

    def _is_last(self) -> bool:
        """Return whether the epoch has no batch left."""
        over = self.ahead is not None and self.ahead.over
        return over or self.progress.batch_idx == self.feed.total

    def _at_the_end(self) -> bool:
        return self.last or self._is_last()

    def _epoch_done(self) -> bool:
        progress, config = self.progress, self.trainer.config
        if config.max_steps != -1 and progress.global_step >= config.max_steps:
            return True
        if progress.batch_idx >= self.feed.total:
            return True
        if progress.should_stop:
            if self.may_stop():
                return True
            self.trainer.say(
                f"asked to stop, but the required `min_epochs={config.min_epochs}` or `min_steps={config.min_steps}`"
                " has not been met. Training will continue",
                once=True,
            )
        return False

    # -- validation ------------------------------------------------------------------------------------

    def _validate(self, accumulating: bool) -> None:
        trainer, board = self.trainer, self.board
        trainer.collect()
        if not accumulating:  # validation gets the gradients' memory; an open accumulation window keeps them
            own = self.hooks.of_module("on_validation_model_zero_grad")
            own() if own is not None else trainer.model.zero_grad()
        stepping = board.stepping
        self.validation.run()
        board.stepping = stepping

    # -- resume ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the training's position: all that a resumed run needs to continue as if it had not stopped."""
        if self.cut is not None:
            return self.cut
        trainer, progress = self.trainer, self.progress
        within = progress.point in ("batch", "batch_end", "validated", "between")
        source = self.feed.source
        pending: dict[str, Any] = {}
        if within and self.accumulating():
            pending = self.engine.strategy.accumulated(trainer.model)
        elif not trainer.model.automatic_optimization:  # training_step may accumulate gradients by hand
            named = trainer.model.named_parameters()
            pending = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
        return {
            **progress.state_dict(),
            "whole": self._at_the_end(),
            "positions": source.state_dict(progress.batch_idx if within else 0),
            "before_ahead": None if self.ahead is None else self.ahead.before,
            "board": self.board.state_dict({id(part): name for name, part in trainer.model.named_modules()}),
            "stepping": self.board.stepping,
            "gradients": pending,
            "outermost": self.engine.outermost,
            **self.validation.state_dict(),
        }


def _call_skipping(skipping: Any, outputs: Any, batch: Any, batch_idx: int) -> int:
    """Call the hooks of callbacks that skip batches; return the next batch at which one of them is due."""
    for _, hook in skipping:
        hook(outputs, batch, batch_idx)
    return batch_idx + 1 + min((callback.skip_batches or 0 for callback, _ in skipping), default=0)
