"""The training loop: epochs, batches, and what happens between them. Set up once; then only what is installed runs."""

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

    Fed = tuple[Callable[[], Any], list[Callable[[Any, int], Any]], steps.Step, Callable[[Hook], Hook]]
    """What gives a batch, what each goes through, the step, and what hooks around it are made into."""


class FitLoop:
    """Runs the epochs of one `fit`.

    Attributes:
        last: Whether the batch at hand is the epoch's last.
        resumed: Where a checkpoint goes on, until its epoch has been entered.
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
        self.cut: dict[str, Any] | None = None  # the state of an epoch that max_steps cut short
        self.validation = Validation(trainer, None if resumed is None else resumed.get("val_positions"))
        if resumed is None:
            self.progress.begin_fit()
        else:
            self.board.load_state_dict(resumed["board"], dict(trainer.model.named_modules()))

    # -- epochs ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until a limit is reached or somebody asks to stop."""
        trainer, hooks = self.trainer, self.hooks
        torch.set_grad_enabled(True)
        hooks.call("on_train_start")
        step = (steps.automatic if trainer.model.automatic_optimization else steps.manual)(trainer, hooks)
        self.validation.restart_clock()
        while not self.done():
            self._epoch(step)
        hooks.call("on_train_end")

    def done(self) -> bool:
        """Whether training is over, and why."""
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
        """Whether the minimum of epochs and steps is reached."""
        progress, config = self.progress, self.trainer.config
        enough = not config.min_epochs or progress.epochs_processed >= config.min_epochs
        return bool(enough and (not config.min_steps or progress.global_step >= config.min_steps))

    def resume_between_epochs(self) -> None:
        """A checkpoint of an epoch's very end: do what was left of that epoch."""
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
        except StopIteration:  # of a step that draws its batches itself, and more than there are
            if not feeding.draws(trainer.model.training_step):
                raise
            self.last = True
        if not progress.batch_idx and self.ahead is not None and not progress.should_stop:
            trainer.warn(
                f"the training loader gave no batch in epoch {progress.current_epoch}: it is used up (a generator can"
                " be read only once; give an object whose __iter__ starts again)"
            )
        trainer.collect()  # values of the last step, which are gone once the epoch's are asked for
        board.stepping = False
        trainer.collect()
        board.batch = None
        self.cut = None if self._at_the_end() or progress.should_stop else self.state_dict()
        for position in source.positions:
            position.end()
        progress.epochs_processed += 1
        progress.point = "epoch_end"
        for hook in hooks.of_callbacks("on_train_epoch_end", monitoring=False):
            hook()
        if (own := hooks.of_module("on_train_epoch_end")) is not None:
            own()
        for hook in hooks.of_callbacks("on_train_epoch_end", monitoring=True):
            hook()
        self._epoch_is_over(self._at_the_end())

    def _epoch_is_over(self, whole: bool) -> None:
        """Do what comes after the hooks of an epoch's end, and so after checkpoints made there."""
        trainer, board, progress = self.trainer, self.board, self.progress
        board.stepping = False
        trainer.collect()
        if whole:
            step_schedulers(trainer, "epoch", plateau=True)
        progress.logged_steps -= 1  # an epoch's values belong to its last step
        trainer.log(board.collect(trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.bar))
        progress.logged_steps += 1
        board.reset()
        progress.current_epoch += 1
        progress.point = "epoch_start"
        signals.stop_if_asked(trainer, together=True)

    def _begin_pass(self, source: sources.Combined, resumed: dict[str, Any] | None) -> None:
        resumed = None if resumed is None else source.as_now(resumed)
        self.fetch = source.begin(self.engine.run, None if resumed is None else resumed["positions"])
        self.ahead = None
        if math.isinf(self.feed.total):
            self.ahead = feeding.Lookahead(self.fetch)
            self.fetch = self.ahead.fetch
        if resumed is None:
            return
        self.progress.enter_epoch(resumed)
        if self.ahead is not None and resumed["before_ahead"] is not None:
            rng.restore(resumed["before_ahead"])
            self.ahead.draw()
        self.last = self._is_last()
        self.board.stepping = resumed.get("stepping", False)
        rng.restore(resumed["rng"])

    def let_go(self) -> None:
        """Training is over: drop the last pass, and with it its workers and batches that wait."""
        self.fetch = feeding.nothing_left
        if self.ahead is not None:
            self.ahead.release()

    # -- batches ---------------------------------------------------------------------------------------

    def _batches(self, step: steps.Step) -> None:
        """The batches of an epoch, from where it stands."""
        trainer, hooks, board, progress, engine = self.trainer, self.hooks, self.board, self.progress, self.engine
        total, ahead = self.feed.total, self.ahead
        fetch, preparing, step, told = self._fed(step)
        on_start = hooks.told_callbacks("on_train_batch_start", told)
        own_start = told(own) if (own := hooks.of_module("on_train_batch_start")) else None
        now_and_then, on_end = hooks.at_batch_end(told)
        look = progress.batch_idx  # the next batch at which those that look only now and then do
        automatic = trainer.model.automatic_optimization
        given_to_hooks = outputs_of if automatic else manual_outputs_of
        scheduled = automatic and bool(engine.optimizing.schedulers)
        run_step = engine.first_step(step)
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
            every = trainer.config.accumulate_grad_batches
            ends = False
            if batch is None:
                messages.warn("train_dataloader yielded None: batch skipped", stacklevel=2)
            else:
                for hook in on_start:
                    hook(batch, batch_idx)
                ends = own_start is not None and own_start(batch, batch_idx) == -1
                if not ends:
                    output = run_step(batch, batch_idx, not batch_idx % every, last or not (batch_idx + 1) % every)
                    run_step = step
            progress.batch_idx += 1
            progress.total_batches += 1
            if ends:
                self.last = True
            if scheduled:
                self._step_schedulers()
            if ends:
                break
            progress.point = "batch_end"
            over = progress.should_stop or progress.global_step == trainer.config.max_steps
            looks = over or last or batch_idx >= look
            if on_end or (looks and now_and_then):
                outputs = None if batch is None else given_to_hooks(output, every)
                if looks:
                    look = _tell_now_and_then(now_and_then, outputs, batch, batch_idx)
                for hook in on_end:
                    hook(outputs, batch, batch_idx)
                outputs = None
            board.batch = batch = output = None
            self._after_batch(progress.batch_idx - 1)
        trainer.model.__dict__["_current_fx_name"] = None

    def _fed(self, step: steps.Step) -> Fed:
        """Return how batches come to the step; one that takes `dataloader_iter` draws them itself."""
        if not feeding.draws(self.trainer.model.training_step):
            return self.fetch, feeding.preparing(self.trainer, "train"), step, lambda hook: hook
        drawn = feeding.DataLoaderIterator(self.fetch, self.progress.batch_idx)
        return drawn.itself, [], self._drawing(step, drawn), drawn.told

    def _finish_resumed_batch(self) -> None:
        """A checkpoint that was made between a batch's hooks: do what was left of that batch."""
        progress = self.progress
        if progress.point in ("batch_end", "validated") and progress.batch_idx:
            self._after_batch(progress.batch_idx - 1, validates=progress.point == "batch_end")

    def _step_schedulers(self) -> None:
        """Step those that look at no metric."""
        if not self.accumulating():
            step_schedulers(self.trainer, "step", plateau=False)
        if self.last:
            step_schedulers(self.trainer, "epoch", plateau=False)

    def _drawing(self, step: steps.Step, drawn: feeding.DataLoaderIterator) -> steps.Step:
        """Return a step that draws its batches itself: each of them counts, and the last one ends the epoch."""

        def stepped(batch: Any, batch_idx: int, opens: bool, closes: bool) -> Any:
            output = step(batch, batch_idx, opens, closes)
            self.progress.batch_idx = drawn.done - 1  # the loop counts one more
            over = self.ahead is not None and self.ahead.over
            self.last = over or drawn.done >= self.feed.total
            return output

        return stepped

    def _after_batch(self, batch_idx: int, validates: bool = True) -> None:
        """Do what follows the hooks of a batch's end, and so checkpoints made there."""
        trainer, progress = self.trainer, self.progress
        accumulating = self.accumulating()
        if validates:
            if not accumulating or not trainer.model.automatic_optimization:
                every = trainer.config.log_every_n_steps
                due = every and not (progress.logged_steps + 1) % every
                if due or progress.should_stop or trainer.config.fast_dev_run:
                    trainer.log(trainer.collect())
            if self.validation.enabled:
                stops = progress.should_stop and self.may_stop()
                if self.validation.is_due(batch_idx, self.last, stops):
                    self._validate(accumulating)
        if self.engine.optimizing.schedulers and not accumulating:
            step_schedulers(trainer, "step", plateau=True)
        if not accumulating:
            progress.logged_steps += 1
        progress.point = "between"
        if self.engine.stopping.signal:
            signals.stop_if_asked(trainer, stepped=not accumulating)

    def accumulating(self) -> bool:
        """Whether the gradients of the batch just done wait for more."""
        return not self.last and bool(self.progress.batch_idx % self.trainer.config.accumulate_grad_batches)

    def _is_last(self) -> bool:
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
        if not accumulating:
            own = self.hooks.of_module("on_validation_model_zero_grad")
            own() if own is not None else trainer.model.zero_grad()
        stepping = board.stepping
        self.validation.run()
        board.stepping = stepping

    # -- resume ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: all that a run needs to go on as if it had not been stopped."""
        if self.cut is not None:
            return self.cut
        trainer, progress = self.trainer, self.progress
        within = progress.point in ("batch", "batch_end", "validated", "between")
        source = self.feed.source
        pending: dict[str, Any] = {}
        if within and self.accumulating():
            pending = self.engine.strategy.accumulated(trainer.model)
        elif not trainer.model.automatic_optimization:  # who steps by hand may gather
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


def _tell_now_and_then(hooks: Any, outputs: Any, batch: Any, batch_idx: int) -> int:
    """Call the hooks that look only now and then: the next batch at which one of them wants to."""
    for _, hook in hooks:
        hook(outputs, batch, batch_idx)
    return batch_idx + 1 + min((callback.skip_batches or 0 for callback, _ in hooks), default=0)
