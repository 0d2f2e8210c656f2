"""Progress: one live line on a terminal, otherwise one plain line per epoch."""

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
    """Show the epoch, batches, speed, time left, the loss and values logged with `prog_bar=True`.

    On a terminal: one live line, and another for validation while it runs, redrawn at most `refresh_rate` times per
    second. Values are read from the device only for a redraw. Elsewhere: one plain line per epoch. Between two redraws,
    a batch costs one comparison.

    Args:
        refresh_rate: Maximum redraws per second; 0 shows nothing.
        leave: Keep each epoch's line on the terminal.
    """

    skip_batches = 0

    def __init__(self, refresh_rate: float = 10.0, leave: bool = True) -> None:
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._enabled = refresh_rate > 0
        self._live: Any = None  # rich.live.Live while something is drawn on a terminal
        self._on_terminal = False
        self._next_look = 0  # the next batch at which to look at the clock
        self._drawn_at = 0.0
        self._epoch_started = 0.0
        self._first_batch = 0  # first batch of this epoch in this run; not 0 if a resumed run began in the middle
        self._evaluation_seconds = 0.0  # seconds of validation within the epoch
        self._evaluation_began = 0.0
        self._outputs: Any = None
        self._train_line = ""
        self._batches_per_second = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown."""
        return self._enabled

    def enable(self) -> None:
        """Show progress."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing, as on ranks other than 0."""
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
        """Turn off progress, rather than end training, if the terminal is gone (`train.py | head`)."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._enabled, live, self._live = False, self._live, None
            with contextlib.suppress(OSError, ValueError):  # stop() restores sys.stdout even though it cannot write
                if live is not None:
                    live.stop()
            messages.settle()
            messages.tell(f"hasten: progress is not shown any more: {error}")

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        """Return the values shown besides the loss: numbers or tensors by name. Override it to show others."""
        return dict(trainer.progress_bar_metrics)

    # -- training --------------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Show progress on rank 0 only, and a live line only on a terminal."""
        self._enabled = self._enabled and trainer.is_global_zero
        self._on_terminal = self._enabled and messages.is_terminal(sys.stdout)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Remove the live line from the terminal."""
        self._close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Remove the live line from the terminal, so that the traceback can be read."""
        self._close()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start an epoch: a run resumed in the middle of one gets no `on_train_epoch_start`."""
        self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._epoch_started = self._drawn_at = perf_counter()
        self._next_look, self._first_batch, self._evaluation_seconds = 0, -1, 0.0
        self._outputs, self._batches_per_second, self.skip_batches = None, 0.0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._outputs = outputs
        if batch_idx < self._next_look:
            return
        self._measure(trainer, module, batch_idx)

    def _measure(self, trainer: Any, module: Any, batch_idx: int) -> None:
        """Measure the speed, redraw if it is time to, and choose the batch of the next measurement."""
        now = perf_counter()
        if self._first_batch < 0:
            self._first_batch = batch_idx
        interval = 1 / self.refresh_rate if self.refresh_rate > 0 else math.inf
        seconds = now - self._epoch_started - self._evaluation_seconds
        self._batches_per_second = (batch_idx + 1 - self._first_batch) / seconds if seconds > 0 else 0.0
        if self._on_terminal and self._enabled and now - self._drawn_at >= interval:
            self._draw_training(trainer, module, batch_idx + 1)
            self._drawn_at = now
        # Faster batches need fewer looks. Aim at half an interval, so that an epoch that slows down is still redrawn
        # within two; and at most at twice the batches seen so far, since the first rates of an epoch are rough.
        skipped = min(self._batches_per_second * interval / 2, 2.0 * (batch_idx + 1 - self._first_batch), 1e6)
        self._next_look = batch_idx + 1 + int(skipped)
        self.skip_batches = int(skipped)

    def _draw_training(self, trainer: Any, module: Any, batches: int) -> None:
        """Redraw the training line."""
        self._train_line = self._line(_epoch(trainer), batches, trainer.num_training_batches, self._batches_per_second)
        self._train_line += self._values(trainer, module)
        self._draw(self._train_line)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Show the epoch's final line: on a terminal the finished bar, elsewhere the epoch's only line."""
        if not self._enabled:
            return
        seconds = perf_counter() - self._epoch_started
        total = trainer.num_training_batches
        batches = trainer.progress.batch_idx
        trained = seconds - self._evaluation_seconds
        rate = (batches - max(self._first_batch, 0)) / trained if trained > 0 else 0.0
        values = self._values(trainer, module)
        if self._on_terminal:
            line = self._line(_epoch(trainer), batches, total, rate) + values
            self._draw(line)
            if self.leave:
                self.print(line)
        else:
            self.print(f"{_epoch(trainer)}  {_of(batches, total)} batches  {rate:.1f} it/s  {_time(seconds)}{values}")

    def _values(self, trainer: Any, module: Any) -> str:
        """Return the loss and logged values as text; reads them from the device."""
        values = self.get_metrics(trainer, module)
        if not any(name in values for name in ("loss", "train_loss", "train/loss")):
            loss = self._outputs.get("loss") if isinstance(self._outputs, dict) else self._outputs
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                if module.automatic_optimization:  # hooks get loss / accumulate_grad_batches; show the full loss
                    loss = loss * trainer.accumulate_grad_batches
                values = {"loss": loss.detach(), **values}
        return "".join(f"  {name} {_number(value)}" for name, value in values.items() if name != "v_num")

    # -- evaluation ------------------------------------------------------------------------------------

    def _evaluation_batch(self, trainer: Any, stage: str, batches: Any, batch_idx: int, loader: int) -> None:
        """Redraw the line of an evaluation, if it is time to."""
        if not self._on_terminal or not self._enabled:
            return
        now = perf_counter()
        if now - self._drawn_at < 1 / self.refresh_rate:
            return
        self._drawn_at = now
        total = batches[loader] if isinstance(batches, list) and loader < len(batches) else batches
        name = f"{stage} {loader}" if isinstance(batches, list) and len(batches) > 1 else stage
        line = self._line(name, batch_idx + 1, total, 0.0)
        self._draw(f"{self._train_line}\n{line}" if self._train_line and stage == "validation" else line)

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Clear the training line: no epoch has begun."""
        self._train_line = ""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Start an evaluation's clock: its time is subtracted from the training time."""
        self._evaluation_began = self._drawn_at = perf_counter()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        what = "sanity check" if trainer.sanity_checking else "validation"
        self._evaluation_batch(trainer, what, batches, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._evaluation_seconds += perf_counter() - self._evaluation_began

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluation_batch(trainer, "test", trainer.num_test_batches, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluation_batch(trainer, "predict", trainer.num_predict_batches, batch_idx, dataloader_idx)

    # -- drawing ---------------------------------------------------------------------------------------

    def _line(self, name: str, count: int, total: float, rate: float) -> str:
        """Return a line with bar, counts, speed and time left."""
        bar = ""
        if math.isfinite(total) and total > 0:
            full = int(_WIDTH * count / total)
            bar = "█" * full + "░" * (_WIDTH - full) + " "
        line = f"{name} {bar}{_of(count, total)}"
        if rate > 0:
            line += f"  {rate:.1f} it/s"
            if math.isfinite(total) and total > count:
                line += f"  {_time((total - count) / rate)} left"
        return line

    def _draw(self, lines: str) -> None:
        """Draw lines in place of those drawn before."""
        from rich.live import Live
        from rich.text import Text

        with self._harmless():
            if self._live is None:
                self._live = Live(auto_refresh=False, transient=True)  # no refresh thread: the loop redraws
                self._live.start()
            self._live.update(Text(lines, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _close(self) -> None:
        """Stop drawing and restore the terminal."""
        with self._harmless():
            if self._live is not None:
                self._live.stop()
        self._live = None
        self._train_line = ""


def _epoch(trainer: Any) -> str:
    """Return the epoch as text, such as "epoch 3/10"; counts from 1."""
    last = trainer.max_epochs
    return f"epoch {trainer.current_epoch + 1}" + (f"/{last}" if last is not None and last > 0 else "")


def _of(count: int, total: float) -> str:
    """Return counts as text, "3/10", or "3" where the total is unknown."""
    return f"{count}/{int(total)}" if math.isfinite(total) else str(count)


def _time(seconds: float) -> str:
    """Return seconds as M:SS or H:MM:SS."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _number(value: Any) -> str:
    """Return a value in few characters; reads a tensor from its device."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
