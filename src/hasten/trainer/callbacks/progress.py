"""Progress: one live line on a terminal, one plain line an epoch elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from hasten import messages
from hasten.trainer.callbacks.base import Callback

_WIDTH = 24  # characters of the bar


class Progress(Callback):
    """Show epoch, batches, speed, time left, the loss and what was logged with `prog_bar=True`.

    On a terminal: one live line, and one for validation while it runs, redrawn at most `refresh_rate` times a second;
    only then are values read from the device. Elsewhere: one plain line an epoch. Between two redraws a batch costs
    one comparison.

    Args:
        refresh_rate: Redraws per second at the most; 0 shows nothing.
        leave: Keep each epoch's line on the terminal.
    """

    skip_batches = 0

    def __init__(self, refresh_rate: float = 10.0, leave: bool = True) -> None:
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._enabled = refresh_rate > 0
        self._live: Any = None  # rich.live.Live while there is a terminal and something runs
        self._on_terminal = False
        self._next = 0  # the next batch at which to look at the clock
        self._drawn_at = 0.0
        self._began = 0.0
        self._first = 0  # batch of the epoch with which this run of it began: a resumed one begins in the middle
        self._evaluated = 0.0  # seconds of validation within the epoch
        self._evaluation_began = 0.0
        self._outputs: Any = None
        self._train_line = ""
        self._rate = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown."""
        return self._enabled

    def enable(self) -> None:
        """Show progress."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing, as ranks other than 0 do."""
        self._enabled = False
        self._close()

    def print(self, *args: Any, sep: str = " ", end: str = "\n") -> None:
        """Print above the live line."""
        with self._harmless():
            if self._live is not None:
                text = sep.join(map(str, args))
                self._live.console.print(text, end=end, markup=False, highlight=False, soft_wrap=True)
            elif self._enabled:
                print(*args, sep=sep, end=end, flush=True)

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """A terminal that is gone (`train.py | head`) ends what is shown, not the training."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._enabled, live, self._live = False, self._live, None
            with contextlib.suppress(OSError, ValueError):  # it gives sys.stdout back, though it cannot write
                if live is not None:
                    live.stop()
            messages.settle()
            messages.tell(f"hasten: progress is not shown any more: {error}")

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        """Return what is shown besides the loss: name -> number or tensor. To be overridden to show something else."""
        return dict(trainer.progress_bar_metrics)

    # -- training --------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Only rank 0 shows progress; only a terminal gets a live line."""
        self._enabled = self._enabled and trainer.is_global_zero
        self._on_terminal = self._enabled and messages.is_terminal(sys.stdout)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Leave the terminal as it was."""
        self._close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Leave the terminal as it was, so that the traceback can be read."""
        self._close()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """A resumed run may begin in the middle of an epoch, whose start it does not see."""
        self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._began = self._drawn_at = perf_counter()
        self._next, self._first, self._evaluated = 0, -1, 0.0
        self._outputs, self._rate, self.skip_batches = None, 0.0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._outputs = outputs
        if batch_idx < self._next:
            return
        self._look(trainer, module, batch_idx)

    def _look(self, trainer: Any, module: Any, batch_idx: int) -> None:
        """Look at the clock, redraw if it is time to, and say when to look again."""
        now = perf_counter()
        if self._first < 0:
            self._first = batch_idx
        interval = 1 / self.refresh_rate if self.refresh_rate > 0 else math.inf
        seconds = now - self._began - self._evaluated
        self._rate = (batch_idx + 1 - self._first) / seconds if seconds > 0 else 0.0
        if self._on_terminal and self._enabled and now - self._drawn_at >= interval:
            self._draw_training(trainer, module, batch_idx + 1)
            self._drawn_at = now
        # Looks become rarer as batches become faster, and an epoch that slows down is seen to after two intervals.
        ahead = min(self._rate * interval / 2, 2.0 * (batch_idx + 1 - self._first), 1e6)
        self._next = batch_idx + 1 + int(ahead)
        self.skip_batches = int(ahead)

    def _draw_training(self, trainer: Any, module: Any, done: int) -> None:
        self._train_line = self._line(_epoch(trainer), done, trainer.num_training_batches, self._rate)
        self._train_line += self._values(trainer, module)
        self._draw(self._train_line)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """The epoch's last word: on a terminal the finished line, elsewhere the only one."""
        if not self._enabled:
            return
        seconds = perf_counter() - self._began
        total = trainer.num_training_batches
        done = trainer.progress.batch_idx
        trained = seconds - self._evaluated
        rate = (done - max(self._first, 0)) / trained if trained > 0 else 0.0
        values = self._values(trainer, module)
        if self._on_terminal:
            line = self._line(_epoch(trainer), done, total, rate) + values
            self._draw(line)
            if self.leave:
                self.print(line)
        else:
            self.print(f"{_epoch(trainer)}  {_of(done, total)} batches  {rate:.1f} it/s  {_time(seconds)}{values}")

    def _values(self, trainer: Any, module: Any) -> str:
        values = self.get_metrics(trainer, module)
        if not any(name in values for name in ("loss", "train_loss", "train/loss")):
            loss = self._outputs.get("loss") if isinstance(self._outputs, dict) else self._outputs
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                if module.automatic_optimization:  # hooks get a batch's share in the step; people know the loss
                    loss = loss * trainer.accumulate_grad_batches
                values = {"loss": loss.detach(), **values}
        return "".join(f"  {name} {_number(value)}" for name, value in values.items() if name != "v_num")

    # -- evaluation ------------------------------------------------------------------------------------

    def _evaluation_batch(self, trainer: Any, what: str, batches: Any, batch_idx: int, loader: int) -> None:
        if not self._on_terminal or not self._enabled:
            return
        now = perf_counter()
        if now - self._drawn_at < 1 / self.refresh_rate:
            return
        self._drawn_at = now
        total = batches[loader] if isinstance(batches, list) and loader < len(batches) else batches
        name = f"{what} {loader}" if isinstance(batches, list) and len(batches) > 1 else what
        line = self._line(name, batch_idx + 1, total, 0.0)
        self._draw(f"{self._train_line}\n{line}" if self._train_line and what == "validation" else line)

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """No epoch goes on yet."""
        self._train_line = ""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Start the clock of an evaluation, whose time is not the training's."""
        self._evaluation_began = self._drawn_at = perf_counter()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        what = "sanity check" if trainer.sanity_checking else "validation"
        self._evaluation_batch(trainer, what, batches, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._evaluated += perf_counter() - self._evaluation_began

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluation_batch(trainer, "test", trainer.num_test_batches, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluation_batch(trainer, "predict", trainer.num_predict_batches, batch_idx, dataloader_idx)

    # -- drawing ---------------------------------------------------------------------------------------

    def _line(self, what: str, done: int, total: float, rate: float) -> str:
        bar = ""
        if math.isfinite(total) and total > 0:
            full = int(_WIDTH * done / total)
            bar = "█" * full + "░" * (_WIDTH - full) + " "
        line = f"{what} {bar}{_of(done, total)}"
        if rate > 0:
            line += f"  {rate:.1f} it/s"
            if math.isfinite(total) and total > done:
                line += f"  {_time((total - done) / rate)} left"
        return line

    def _draw(self, lines: str) -> None:
        from rich.live import Live
        from rich.text import Text

        with self._harmless():
            if self._live is None:
                self._live = Live(auto_refresh=False, transient=True)  # no thread of its own
                self._live.start()
            self._live.update(Text(lines, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _close(self) -> None:
        with self._harmless():
            if self._live is not None:
                self._live.stop()
        self._live = None
        self._train_line = ""


def _epoch(trainer: Any) -> str:
    last = trainer.max_epochs
    return f"epoch {trainer.current_epoch + 1}" + (f"/{last}" if last is not None and last > 0 else "")


def _of(done: int, total: float) -> str:
    return f"{done}/{int(total)}" if math.isfinite(total) else str(done)


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _number(value: Any) -> str:
    """A value in few characters; reads a tensor from its device."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
