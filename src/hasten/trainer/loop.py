"""The training loop: epochs, batches, and what happens between them. Set up once; then only what is installed runs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.data import rng
from hasten.trainer import feeding, sources, steps
from hasten.trainer.logged import Board

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.trainer import Trainer


class Ahead:
    """Looks one batch ahead, so that the last one is known where a loader has no length."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._next: list[Any] = []
        self.over = False
        self.before: dict[str, Any] | None = None  # the random state before the batch that is held was drawn

    def hold(self) -> None:
        """Draw the batch to come."""
        self.before = rng.state()
        try:
            self._next = [self._fetch()]
        except StopIteration:
            self._next, self.over = [], True

    def fetch(self) -> Any:
        """The next batch."""
        if not self._next and not self.over:
            self.hold()
        if not self._next:
            raise StopIteration
        batch = self._next.pop()
        self.hold()
        return batch

    def let_go(self) -> None:
        """Drop the pass and the batch that is held."""
        self._fetch, self._next = _nothing_left, []


def _nothing_left() -> Any:
    raise StopIteration


class FitLoop:
    """Runs the epochs of one `fit`.

    Attributes:
        batch_idx: Batches of this epoch done.
        epochs_processed: Epochs done; the hooks of the last one's end may still run.
        point: How far the current batch or epoch is ("batch", "batch_end", "validated", "between", "epoch_end"): where
            a checkpoint saved now goes on.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks, resumed: dict[str, Any] | None) -> None:
        self.trainer = trainer
        self.hooks = hooks
        self.resumed = resumed
        self.board: Board = trainer.new_board(training=True)
        self.batch_idx = 0
        self.epochs_processed = trainer.current_epoch
        self.point = "epoch_start"
        self.last = False
        self.may_validate = False  # in this epoch
        self.ahead: Ahead | None = None
        self.cut: dict[str, Any] | None = None  # the state of an epoch that max_steps cut short
        self.last_validated = time.monotonic()
        self.val_resumed: list[Any] | None = None  # where the validation loaders go on
        self.before_validation: dict[str, Any] = {}  # the state that a validation changes, while it runs
        if resumed is not None:
            self.val_resumed = resumed.get("val_positions")
            trainer.total_batches = resumed["total_batches"]
            trainer.logged_steps = resumed["logged_steps"]
            self.epochs_processed = resumed["epochs_processed"]
            trainer.batches_seen["fit_validate"] = Counter(dict(resumed["validated"]))
            self.board.load_state_dict(resumed["board"], dict(trainer.model.named_modules()))

    # -- epochs ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until a limit is reached or somebody asks to stop."""
        trainer, hooks = self.trainer, self.hooks
        torch.set_grad_enabled(True)
        hooks.call("on_train_start")
        step = (steps.automatic if trainer.model.automatic_optimization else steps.manual)(trainer, hooks)
        self.last_validated = time.monotonic()
        while not self.done():
            self._epoch(step)
        hooks.call("on_train_end")

    def done(self) -> bool:
        """Whether training is over, and why."""
        trainer = self.trainer
        if trainer.num_training_batches == 0:
            trainer.say("fit stopped: there are no training batches")
            return True
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            trainer.say(f"fit stopped: max_steps={trainer.max_steps} reached")
            return True
        if trainer.max_epochs not in (-1, None) and self.epochs_processed >= trainer.max_epochs:
            trainer.current_epoch = self.epochs_processed
            trainer.say(f"fit stopped: max_epochs={trainer.max_epochs} reached")
            return True
        return trainer.should_stop and self.may_stop()

    def may_stop(self) -> bool:
        """Whether the minimum of epochs and steps is reached."""
        trainer = self.trainer
        enough = not trainer.min_epochs or self.epochs_processed >= trainer.min_epochs
        return bool(enough and (not trainer.min_steps or trainer.global_step >= trainer.min_steps))

    def resume_between_epochs(self) -> None:
        """A checkpoint of an epoch's very end: do what was left of that epoch."""
        resumed = self.resumed
        if resumed is None or resumed["point"] not in ("epoch_end", "epoch_start"):
            return
        self.resumed = None
        for position, state in zip(self.trainer.train_source.positions, resumed["positions"], strict=False):
            position.resume(state)
        rng.restore(resumed["rng"])
        if resumed["point"] == "epoch_end":
            self._epoch_is_over(resumed["whole"])

    def _epoch(self, step: steps.Step) -> None:
        """Run one epoch."""
        trainer, hooks, board = self.trainer, self.hooks, self.board
        source = trainer.training_source()
        for leaf in source.leaves:
            sources.set_epoch(leaf, self.epochs_processed)
        resumed, self.resumed = self.resumed, None
        if resumed is None:
            self.batch_idx, self.last = 0, False
            hooks.call("on_train_epoch_start")
        self._begin_pass(source, resumed)
        self._batches(step)
        if not self.batch_idx and self.ahead is not None and not trainer.should_stop:
            trainer.warn(
                f"the training loader gave no batch in epoch {trainer.current_epoch}: it is used up (a generator can be"
                " read only once; give an object whose __iter__ begins anew)"
            )
        trainer.collect()  # values of the last step, which are gone once the epoch's are asked for
        board.stepping = False
        trainer.collect()
        board.batch = None
        self.cut = None if self._at_the_end() or trainer.should_stop else self.state_dict()
        for position in source.positions:
            position.end()
        self.epochs_processed += 1
        self.point = "epoch_end"
        for hook in hooks.of_callbacks("on_train_epoch_end", monitoring=False):
            hook()
        if (own := hooks.of_module("on_train_epoch_end")) is not None:
            own()
        for hook in hooks.of_callbacks("on_train_epoch_end", monitoring=True):
            hook()
        self._epoch_is_over(self._at_the_end())

    def _epoch_is_over(self, whole: bool) -> None:
        """What comes after the hooks of an epoch's end, and so after checkpoints made there."""
        trainer, board = self.trainer, self.board
        board.stepping = False
        trainer.collect()
        if whole:
            self._update_schedulers("epoch", plateau=True)
        trainer.logged_steps -= 1  # an epoch's values belong to its last step
        trainer.log(board.collect(trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.bar))
        trainer.logged_steps += 1
        board.reset()
        trainer.current_epoch += 1
        self.point = "epoch_start"
        trainer.stop_if_signalled(together=True)

    def _begin_pass(self, source: sources.Combined, resumed: dict[str, Any] | None) -> None:
        trainer = self.trainer
        self.fetch = source.begin(trainer.run, None if resumed is None else resumed["positions"])
        self.ahead = None
        if math.isinf(trainer.num_training_batches):
            self.ahead = Ahead(self.fetch)
            self.fetch = self.ahead.fetch
        if resumed is None:
            return
        self.batch_idx = resumed["batch_idx"]
        self.point = resumed["point"]
        if self.ahead is not None and resumed["before_ahead"] is not None:
            rng.restore(resumed["before_ahead"])
            self.ahead.hold()
        self.last = self._is_last()
        self.board.stepping = resumed.get("stepping", False)
        rng.restore(resumed["rng"])

    def let_go(self) -> None:
        """Training is over: drop the last pass, and with it its workers and batches that wait."""
        self.fetch = _nothing_left
        if self.ahead is not None:
            self.ahead.let_go()

    # -- batches ---------------------------------------------------------------------------------------

    def _batches(self, step: steps.Step) -> None:
        """The batches of an epoch, from where it stands."""
        trainer, hooks, board = self.trainer, self.hooks, self.board
        fetch, ahead = self.fetch, self.ahead
        preparing = feeding.preparing(trainer, "train")
        on_start = hooks.of_callbacks("on_train_batch_start")
        own_start = hooks.of_module("on_train_batch_start")
        now_and_then, on_end = hooks.at_batch_end()
        look = self.batch_idx  # the next batch at which those that look only now and then do
        total = trainer.num_training_batches
        automatic = trainer.model.automatic_optimization
        outputs_of = steps.outputs_of if automatic else steps.manual_outputs_of
        schedules = automatic and bool(trainer.lr_scheduler_configs)
        run_step = trainer.first_step(step)
        self.may_validate = trainer.validates_this_epoch

        if self.point in ("batch_end", "validated") and self.batch_idx:
            self._after_batch(self.batch_idx - 1, validates=self.point == "batch_end")
        while not self._epoch_done():
            try:
                batch = fetch()
            except StopIteration:
                break
            self.point = "batch"
            batch_idx = self.batch_idx
            last = self.last = batch_idx + 1 == total or (ahead is not None and ahead.over)
            for prepare in preparing:
                batch = prepare(batch, 0)
            board.begin_batch(batch)
            output: Any = None
            every = trainer.accumulate_grad_batches
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
            self.batch_idx = batch_idx + 1
            trainer.total_batches += 1
            if ends:
                self.last = True
            if schedules:
                if not self.accumulating():
                    self._update_schedulers("step", plateau=False)
                if last or ends:
                    self._update_schedulers("epoch", plateau=False)
            if ends:
                break
            self.point = "batch_end"
            looks = batch_idx >= look or last or trainer.should_stop or trainer.global_step == trainer.max_steps
            if on_end or (looks and now_and_then):
                outputs: dict[str, Any] | None = None if batch is None else outputs_of(output, every)
                if looks:
                    for _, hook in now_and_then:
                        hook(outputs, batch, batch_idx)
                    look = batch_idx + 1 + min((callback.skip_batches or 0 for callback, _ in now_and_then), default=0)
                for hook in on_end:
                    hook(outputs, batch, batch_idx)
                outputs = None
            board.batch = batch = output = None
            self._after_batch(batch_idx)
        trainer.model.__dict__["_current_fx_name"] = None

    def _after_batch(self, batch_idx: int, validates: bool = True) -> None:
        """What follows the hooks of a batch's end, and so checkpoints made there."""
        trainer = self.trainer
        accumulating = self.accumulating()
        if validates:
            if not accumulating or not trainer.model.automatic_optimization:
                every = trainer.log_every_n_steps
                if (every and not (trainer.logged_steps + 1) % every) or trainer.should_stop or trainer.fast_dev_run:
                    trainer.log(trainer.collect())
            if self.may_validate and self._validation_due(batch_idx):
                self._validate(accumulating)
        if trainer.lr_scheduler_configs and not accumulating:
            self._update_schedulers("step", plateau=True)
        if not accumulating:
            trainer.logged_steps += 1
        self.point = "between"
        if trainer.asked_to_stop:
            trainer.stop_if_signalled(stepped=not accumulating)

    def accumulating(self) -> bool:
        """Whether the gradients of the batch just done wait for more."""
        return not self.last and bool(self.batch_idx % self.trainer.accumulate_grad_batches)

    def _is_last(self) -> bool:
        over = self.ahead is not None and self.ahead.over
        return over or self.batch_idx == self.trainer.num_training_batches

    def _at_the_end(self) -> bool:
        return self.last or self._is_last()

    def _epoch_done(self) -> bool:
        trainer = self.trainer
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return True
        if self.batch_idx >= trainer.num_training_batches:
            return True
        if trainer.should_stop:
            if self.may_stop():
                return True
            trainer.say(
                f"asked to stop, but the required `min_epochs={trainer.min_epochs}` or `min_steps={trainer.min_steps}`"
                " has not been met. Training will continue",
                once=True,
            )
        return False

    # -- validation ------------------------------------------------------------------------------------

    def _validation_due(self, batch_idx: int) -> bool:
        trainer = self.trainer
        unknown = trainer.val_check_batch == math.inf and trainer.val_check_seconds is None
        if self.last and unknown:
            return True
        if trainer.should_stop and self.may_stop():
            return True
        if trainer.val_check_seconds is not None:
            return time.monotonic() - self.last_validated >= trainer.val_check_seconds
        if unknown:
            limit = trainer.limit_train_batches
            return isinstance(limit, int) and (batch_idx + 1) % limit == 0
        count = trainer.total_batches if trainer.check_val_every_n_epoch is None else batch_idx + 1
        return bool(count % trainer.val_check_batch == 0)

    def _validate(self, accumulating: bool) -> None:
        trainer, board = self.trainer, self.board
        trainer.collect()
        if not accumulating:
            own = self.hooks.of_module("on_validation_model_zero_grad")
            own() if own is not None else trainer.model.zero_grad()
        stepping = board.stepping
        trainer.validate_within_fit()
        self.validation_is_over()
        board.stepping = stepping
        self.last_validated = time.monotonic()

    def validation_begins(self) -> None:
        """Before anything of it is drawn: one that is cut short is run again as a whole."""
        source = self.trainer.val_source
        resumed, self.val_resumed = self.val_resumed, None
        for position, state in zip(source.positions, resumed or [], strict=False):
            position.resume(state)
        self.before_validation = {"rng": rng.state(), **self._of_validation()}

    def validation_is_over(self) -> None:
        """Only the hooks of its end are left, or not even those."""
        self.before_validation = {}
        self.point = "validated"

    def _of_validation(self) -> dict[str, Any]:
        """How far validations are, between two of them."""
        source, positions = self.trainer.val_source, self.val_resumed
        if positions is None and source is not None:
            positions = [position.state_dict(0) for position in source.positions]
        return {
            "validated": sorted(map(list, self.trainer.batches_seen["fit_validate"].items())),
            "val_positions": positions,
        }

    # -- schedulers ------------------------------------------------------------------------------------

    def _update_schedulers(self, interval: str, plateau: bool) -> None:
        trainer = self.trainer
        if not trainer.lr_scheduler_configs or not trainer.model.automatic_optimization:
            return
        own = self.hooks.of_module("lr_scheduler_step")
        count = self.batch_idx if interval == "step" else trainer.current_epoch + 1
        for config in trainer.lr_scheduler_configs:
            if config.interval != interval or config.reduce_on_plateau != plateau or count % config.frequency:
                continue
            value = None
            if config.reduce_on_plateau:
                value = trainer.callback_metrics.get(str(config.monitor))
                if value is None:
                    if config.strict:
                        raise trainer.misconfigured(
                            f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available."
                            f" Available metrics are: {sorted(trainer.callback_metrics)}",
                            'log it, or say "strict": False in the lr scheduler dict',
                        )
                    messages.warn(
                        f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available but strict is"
                        " False: it does not step",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    continue
            if own is not None:
                own(config.scheduler, value)
            elif value is None:
                config.scheduler.step()
            else:
                config.scheduler.step(value)

    # -- resume ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: all that a run needs to go on as if it had not been stopped."""
        if self.cut is not None:
            return self.cut
        trainer = self.trainer
        within = self.point in ("batch", "batch_end", "validated", "between")
        source = trainer.train_source
        pending: dict[str, Any] = {}
        if (within and self.accumulating()) or not trainer.model.automatic_optimization:  # who steps by hand may gather
            named = trainer.model.named_parameters()
            pending = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
        return {
            "point": self.point,
            "current_epoch": trainer.current_epoch,
            "epochs_processed": self.epochs_processed,
            "batch_idx": self.batch_idx,
            "total_batches": trainer.total_batches,
            "logged_steps": trainer.logged_steps,
            "whole": self._at_the_end(),
            "positions": source.state_dict(self.batch_idx if within else 0),
            "before_ahead": None if self.ahead is None else self.ahead.before,
            "board": self.board.state_dict({id(part): name for name, part in trainer.model.named_modules()}),
            "stepping": self.board.stepping,
            "gradients": pending,
            "outermost": trainer.outermost,
            **(self.before_validation or {"rng": rng.state(), **self._of_validation()}),
        }
