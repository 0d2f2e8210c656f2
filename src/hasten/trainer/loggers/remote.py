"""Loggers for services: Weights & Biases and MLflow. Thin wrappers: use `experiment` for their other features."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Any

from hasten.trainer.loggers.base import Logger, NoOpExperiment, flat_params, needs, plain_params


class WandbLogger(Logger):
    """Log to Weights & Biases.

    Args:
        name: Name of the run.
        save_dir: Folder for its files.
        version: Id of the run, to continue an earlier one.
        offline: Keep the run on this machine; `wandb sync` uploads it later.
        project: Project; default: `WANDB_PROJECT` of the environment, else "hasten".
        log_model: Upload checkpoints at the end: "all" that were kept, or True: only the best.
        prefix: Prefix of metric names, joined with "-".
        experiment: A run that `wandb.init` returned already.
        **kwargs: For `wandb.init`.

    Raises:
        HastenError: wandb is not installed.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        project: str | None = None,
        log_model: bool | str = False,
        prefix: str = "",
        experiment: Any = None,
        **kwargs: Any,
    ) -> None:
        if find_spec("wandb") is None:
            raise needs("wandb", "WandbLogger")
        self._name = name
        self._save_dir = os.fspath(save_dir)
        self._id = version
        self._offline = offline
        self._project = project or os.environ.get("WANDB_PROJECT", "hasten")
        self._log_model = log_model
        self._prefix = f"{prefix}-" if prefix else ""
        self._run = experiment
        self._kwargs = kwargs
        self._checkpoint_callback: Any = None

    @property
    def name(self) -> str:
        """Name of the project."""
        return self._project

    @property
    def version(self) -> str | None:
        """Id of the run; None before it has begun."""
        return self._run.id if self._run is not None else self._id

    @property
    def save_dir(self) -> str:
        """Folder for its files."""
        return self._save_dir

    @property
    def experiment(self) -> Any:
        """The run, begun on first access."""
        if not self.writes:
            return NoOpExperiment()
        if self._run is None:
            wandb = import_module("wandb")
            Path(self._save_dir).mkdir(parents=True, exist_ok=True)
            mode = "offline" if self._offline else None
            self._run = wandb.run or wandb.init(
                name=self._name,
                project=self._project,
                dir=self._save_dir,
                id=self._id,
                resume="allow",
                mode=mode,
                **self._kwargs,
            )
            self._run.define_metric("trainer/global_step")
            self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return self._run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers. The step is logged as a metric, so that several logs of one step do not conflict."""
        values = {self._prefix + name: value for name, value in metrics.items()}
        self.experiment.log(values if step is None else {**values, "trainer/global_step": step})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Add hyperparameters to the run's config."""
        self.experiment.config.update(flat_params(plain_params(params)), allow_val_change=True)

    def watch(self, model: Any, log: str = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Log gradients or parameters as histograms; costs time at each logged step."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Remember the callback: checkpoints are uploaded at the end, when they are surely on disk."""
        self._checkpoint_callback = checkpoint_callback

    def finalize(self, status: str) -> None:
        """Upload checkpoints, if `log_model` is set and the run succeeded."""
        callback = self._checkpoint_callback
        if status != "success" or callback is None or not self._log_model or not self.writes:
            return
        wandb = import_module("wandb")
        paths = list(callback.best_k_models) if self._log_model == "all" else []
        for path in paths or [callback.best_model_path]:
            if path and Path(path).exists():
                artifact = wandb.Artifact(f"model-{self.experiment.id}", type="model")
                if Path(path).is_dir():
                    artifact.add_dir(path)
                else:
                    artifact.add_file(path, name="model.ckpt")
                self.experiment.log_artifact(artifact, aliases=["best"] if path == callback.best_model_path else None)


class MLFlowLogger(Logger):
    """Log to MLflow.

    Args:
        experiment_name: Name of the experiment.
        run_name: Name of the run.
        tracking_uri: Where MLflow stores runs; default: `MLFLOW_TRACKING_URI` of the environment, else the folder
            `save_dir`.
        tags: Tags of the run.
        save_dir: Folder, if there is no `tracking_uri`.
        prefix: Prefix of metric names, joined with "-".
        run_id: Id of a run to continue.

    Raises:
        HastenError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "hasten_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str = "./mlruns",
        prefix: str = "",
        run_id: str | None = None,
    ) -> None:
        if find_spec("mlflow") is None:
            raise needs("mlflow", "MLFlowLogger")
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{save_dir}"
        self._tags = dict(tags or {})
        self._prefix = f"{prefix}-" if prefix else ""
        self._run_id = run_id
        self._client: Any = None

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._experiment_name

    @property
    def version(self) -> str | None:
        """Id of the run; None before it has begun."""
        return self._run_id

    @property
    def save_dir(self) -> str | None:
        """Folder in which MLflow stores runs; None if it is not a folder."""
        return self._uri.removeprefix("file:") if self._uri.startswith("file:") else None

    @property
    def experiment(self) -> Any:
        """The `MlflowClient`; the first access begins the run."""
        if not self.writes:
            return NoOpExperiment()
        if self._client is None:
            self._client = import_module("mlflow.tracking").MlflowClient(self._uri)
            if self._run_id is None:
                experiment = self._client.get_experiment_by_name(self._experiment_name)
                identifier = (
                    experiment.experiment_id if experiment else self._client.create_experiment(self._experiment_name)
                )
                run = self._client.create_run(identifier, tags=self._tags, run_name=self._run_name)
                self._run_id = run.info.run_id
        return self._client

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers in one request."""
        if not self.writes:
            return
        client, now = self.experiment, int(time() * 1000)
        metric = import_module("mlflow.entities").Metric
        values = [metric(self._prefix + name, float(value), now, step or 0) for name, value in metrics.items()]
        client.log_batch(self._run_id, metrics=values)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log hyperparameters, 100 per request and cut to 500 characters each: MLflow's limits."""
        if not self.writes:
            return
        client = self.experiment
        param = import_module("mlflow.entities").Param
        items = [param(name, str(value)[:500]) for name, value in flat_params(plain_params(params)).items()]
        for start in range(0, len(items), 100):
            client.log_batch(self._run_id, params=items[start : start + 100])

    def finalize(self, status: str) -> None:
        """End the run."""
        if self._client is not None:
            names = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
            self._client.set_terminated(self._run_id, names.get(status, "FINISHED"))
