"""TensorBoardLogger: write metrics as TensorBoard event files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.trainer.loggers.base import FolderLogger, NoOpExperiment, flat_params, needs, plain_params


class TensorBoardLogger(FolderLogger):
    """Log for TensorBoard to `save_dir/name/version_N`; view it with `tensorboard --logdir save_dir`.

    Args:
        save_dir: Folder for all experiments.
        name: Subfolder of this experiment; None or "": none.
        version: Number or name; None: the next free number.
        log_graph: Log the model's graph, if the module has an `example_input_array`.
        default_hp_metric: Log `hp_metric` of -1 with hyperparameters that come without metrics.
        prefix: Prefix of metric names, joined with "-".
        sub_dir: Subfolder of the version's folder, for several writers.
        **kwargs: For `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        HastenError: tensorboard is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "hasten_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        from importlib.util import find_spec

        if find_spec("tensorboard") is None:  # fail now, not at the first step
            raise needs("tensorboard", "TensorBoardLogger")
        self.hparams: dict[str, Any] = {}
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = sub_dir
        self._kwargs = kwargs
        self._writer: Any = None

    @property
    def log_dir(self) -> str:
        """Folder of this run."""
        folder = super().log_dir
        return str(Path(folder) / self._sub_dir) if self._sub_dir else folder

    @property
    def experiment(self) -> Any:
        """The `SummaryWriter`, created on first access."""
        if not self.writes:
            return NoOpExperiment()
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self._made_log_dir()), **self._kwargs)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log each metric as a scalar."""
        if not self.writes:
            return
        for name, value in self._named(metrics).items():
            self.experiment.add_scalar(name, value, step)

    def log_hyperparams(
        self, params: Any, metrics: Mapping[str, float] | None = None, step: int | None = None, **kwargs: Any
    ) -> None:
        """Log hyperparameters for the HPARAMS tab.

        Args:
            params: Mapping, dataclass or Namespace.
            metrics: Metrics to compare runs by.
            step: Their step.
            **kwargs: Ignored.
        """
        from torch.utils.tensorboard.summary import hparams

        self.hparams.update(plain_params(params))
        if metrics is None and self._default_hp_metric:
            metrics = {"hp_metric": -1.0}
        if metrics and self.writes:
            self.log_metrics(metrics, step)
            writer = self.experiment._get_file_writer()
            for summary in hparams(flat_params(self.hparams), dict(metrics)):
                writer.add_summary(summary)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Log the model's graph, if `log_graph` was set in `__init__` and there is an example input to trace."""
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if self._log_graph and example is not None:
            import torch

            with torch.no_grad():
                self.experiment.add_graph(model, example)

    def save(self) -> None:
        """Write buffered events."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Write buffered events, and close the writer after a success."""
        if self._writer is not None:
            self._writer.flush()
            if status == "success":  # after a failure, the user's code may still log
                self._writer.close()
                self._writer = None
