"""StepMonitor: measure where each step's time goes, and write it as evidence that `hasten` can report on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hasten.evidence import Evidence
from hasten.evidence.live import LiveFile, live_path
from hasten.evidence.recorded import recorded
from hasten.evidence.recorder import Recorder
from hasten.trainer.callbacks.shared import say
from hasten.trainer.callbacks.step_clock import StepClock


class StepMonitor(StepClock):
    """Record how long each step waited for data and spent in forward, backward, optimizer and validation.

    Rank 0 writes the evidence when `fit` ends, even if an exception ends it. During the training, a live file beside it
    (`evidence.live.json`) is rewritten about once a second for `hasten watch`, and removed at the end. Costs tens of
    microseconds per step and reads nothing from the device until the end. On a GPU, kernels run asynchronously, so a
    phase is the time that its calls took, and waiting for kernels shows up where something is read.

    Args:
        path: File to write; default: `evidence.json` in the Trainer's `log_dir`, else in `default_root_dir`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.path = Path(path) if path else None
        self._file = Path()  # the evidence file of this run
        self._live: LiveFile | None = None
        self.skipped: list[str] = []  # what could not be recorded, and why

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start recording, on rank 0."""
        self.listen_no_more()
        self._file = (
            self.path or Path(trainer.log_dir or trainer.default_root_dir) / "evidence.json"
        )  # on all ranks: reading log_dir may broadcast
        if not trainer.is_global_zero:
            return
        self.skipped = []
        file = self._file.absolute()
        file.parent.mkdir(parents=True, exist_ok=True)
        recorder = Recorder()
        self._live = LiveFile(live_path(file), tuple(sys.argv), str(file))
        self._live.start(recorder, self.skipped)
        self.listen(trainer, recorder)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._write(trainer, "")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._write(trainer, f"{type(exception).__name__}: {exception}".splitlines()[0])

    def _write(self, trainer: Any, error: str) -> None:
        """Stop recording and write the evidence."""
        recorder = self.listen_no_more()
        if recorder is None:
            return
        if self._live is not None:
            self._live.remove()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._evidence(trainer, recorder, error).write(self._file)
        say(trainer, f"evidence of {recorder.steps} steps: {self._file}")

    def _evidence(self, trainer: Any, recorder: Recorder, error: str) -> Evidence:
        """Return the evidence of the recording."""
        recorder.close()
        return Evidence(
            command=tuple(sys.argv),
            **self.built(trainer, recorder),
            **recorded(recorder),
            ended="failed" if error else "finished",
            error=error,
            skipped=tuple(self.skipped),
            listened="trainer",
        )
