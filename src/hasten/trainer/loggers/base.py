"""Logger: the base class of loggers; and FolderLogger, which gives each run a version folder that no other run gets."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import HastenError


class Logger:
    """Base class of loggers, which write metrics and hyperparameters. All methods do nothing; override those you need.

    `metrics` are plain numbers: the Trainer read them from the device, all together, when it was time to log. The
    loggers here write on rank 0 only, so any rank may call them.
    """

    group_separator = "/"  # separates the parts of a metric's name
    writes = True  # whether this process writes: rank 0 does

    @property
    def name(self) -> str | None:
        """Name of the experiment."""
        return None

    @property
    def version(self) -> int | str | None:
        """Number or name of this run of the experiment."""
        return None

    @property
    def save_dir(self) -> str | None:
        """Folder given by the user."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Folder of the experiment."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Folder of this run of the experiment."""
        return None

    @property
    def experiment(self) -> Any:
        """The logging library's own object, for features that this class has no method for."""
        return None

    def agree(self, world: Any) -> None:
        """Agree on one version for all ranks. Every rank calls it, once, before anything else.

        Args:
            world: `hasten.parallel.World`.
        """
        self.writes = world.is_zero

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers at an optimizer step."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log hyperparameters: a mapping, dataclass or Namespace."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Log the model's graph."""

    def save(self) -> None:
        """Write buffered values."""

    def finalize(self, status: str) -> None:
        """End the run. `status`: "success", "failed" or "interrupted"."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called after `checkpoint_callback` has saved a checkpoint."""


class NoOpExperiment:
    """Stand-in for `experiment` on ranks that do not write: every attribute, call and item does nothing."""

    def __getattr__(self, name: str) -> NoOpExperiment:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoOpExperiment:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> NoOpExperiment:
        return self


class FolderLogger(Logger):
    """Base class of loggers with a folder per run: `save_dir/name/version_0`, `version_1`, ...

    The folder is created with `mkdir`, which fails if it exists: so two runs that start at the same moment get
    different versions. A version given by the user is used as it is.

    Args:
        save_dir: Folder for all experiments.
        name: Subfolder of this experiment; None or "": none.
        version: Number or name; None: the next free number.
        prefix: Prefix of metric names, joined with "-".
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "hasten_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        self._save_dir = os.fspath(save_dir)
        self._name = name or ""
        self._version = version
        self._prefix = prefix

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._name

    @property
    def save_dir(self) -> str:
        """Folder of all experiments."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """Folder of the experiment."""
        return str(Path(self._save_dir) / self._name)

    @property
    def version(self) -> int | str:
        """Number or name of this run. If none was given, the first access claims the next free number."""
        if self._version is None:
            self._version = claim_version(Path(self.root_dir))
        return self._version

    @property
    def log_dir(self) -> str:
        """Folder of this run."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return str(Path(self.root_dir) / version)

    def agree(self, world: Any) -> None:
        """Use rank 0's version on all ranks."""
        super().agree(world)
        self._version = world.broadcast(self.version if world.is_zero else None)

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics as floats, with prefixed names."""
        start = f"{self._prefix}-" if self._prefix else ""
        return {start + name: float(value) for name, value in metrics.items()}

    def _made_log_dir(self) -> Path:
        """Create the run's folder, and return it."""
        folder = Path(self.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HastenError(f"cannot make {folder}: {error.strerror}", "give another save_dir") from None
        return folder


def claim_version(root: Path) -> int:
    """Create `root/version_N` with the smallest N above the existing ones, and return N.

    Raises:
        HastenError: The folder cannot be created.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        versions = [int(match[1]) for entry in root.iterdir() if (match := re.fullmatch(r"version_(\d+)", entry.name))]
        version = max(versions, default=-1) + 1
        while True:
            try:
                (root / f"version_{version}").mkdir()
                return version
            except FileExistsError:  # another run was faster
                version += 1
    except OSError as error:
        raise HastenError(
            f"cannot make a folder for logs in {root}: {error.strerror}", "give another default_root_dir or save_dir"
        ) from None


def plain_params(params: Any) -> dict[str, Any]:
    """Return hyperparameters as a dict, from a mapping, a dataclass, a Namespace, or None."""
    if params is None:
        return {}
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return dataclasses.asdict(params)
    return dict(params if isinstance(params, Mapping) else vars(params))


def flat_params(params: Mapping[str, Any], start: str = "") -> dict[str, int | float | str | bool]:
    """Return nested hyperparameters as one level (`model/width`); values other than numbers, text and bool as text."""
    flat: dict[str, int | float | str | bool] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat.update(flat_params(value, f"{start}{name}/"))
        else:
            flat[f"{start}{name}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat


def needs(package: str, logger: str) -> HastenError:
    """Return the error for a logger whose library is not installed."""
    return HastenError(f"{logger} needs {package}, which is not installed", f"pip install {package}")
