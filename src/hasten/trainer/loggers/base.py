"""Logger: where metrics and hyperparameters go. Also the version folder, which two runs never share."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import HastenError


class Logger:
    """Writes metrics and hyperparameters. All methods do nothing here; override those that are wanted.

    `metrics` are plain numbers: they were read from the device, all together, when it was time to log. The loggers
    here write on rank 0 only, so any rank may call them.
    """

    group_separator = "/"  # between the parts of a metric's name
    writes = True  # whether this process is the one that writes

    @property
    def name(self) -> str | None:
        """Name of the experiment."""
        return None

    @property
    def version(self) -> int | str | None:
        """Number or name of this run of it."""
        return None

    @property
    def save_dir(self) -> str | None:
        """Folder given by the person."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Folder of the experiment."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Folder of this run of it."""
        return None

    @property
    def experiment(self) -> Any:
        """The library's own object, for what this class has no method for."""
        return None

    def agree(self, world: Any) -> None:
        """Settle on one version for all ranks. Every rank calls it, once, before anything else.

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
        """Write what is still in memory."""

    def finalize(self, status: str) -> None:
        """The run is over: "success", "failed" or "interrupted"."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """`checkpoint_callback` has saved a checkpoint."""


class Nothing:
    """Stands for `experiment` on the ranks that do not write: whatever is asked of it, it does nothing."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        """Nothing."""
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self


class FolderLogger(Logger):
    """A logger with a folder for each run: `save_dir/name/version_0`, `version_1`, ...

    The folder is made with `mkdir`, which fails where it exists already: so two runs that start at the same moment
    get two versions. A version that is named by the person is used as it is.

    Args:
        save_dir: Folder for all experiments.
        name: Folder in it for this one; None or "": none.
        version: Number or name; None: the next number that is free.
        prefix: Put in front of metrics' names, with a "-".
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
        """Number or name of this run; asking for it claims the next free number, if none was given."""
        if self._version is None:
            self._version = claim_version(Path(self.root_dir))
        return self._version

    @property
    def log_dir(self) -> str:
        """Folder of this run."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return str(Path(self.root_dir) / version)

    def agree(self, world: Any) -> None:
        """Rank 0's version, on all ranks."""
        super().agree(world)
        self._version = world.broadcast(self.version if world.is_zero else None)

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        start = f"{self._prefix}-" if self._prefix else ""
        return {start + name: float(value) for name, value in metrics.items()}

    def _made_log_dir(self) -> Path:
        folder = Path(self.log_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HastenError(f"cannot make {folder}: {error.strerror}", "give another save_dir") from None
        return folder


def claim_version(root: Path) -> int:
    """Make `root/version_N` with the smallest N above those there are, and return N.

    Raises:
        HastenError: The folder cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        taken = [int(match[1]) for entry in root.iterdir() if (match := re.fullmatch(r"version_(\d+)", entry.name))]
        version = max(taken, default=-1) + 1
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
    """Hyperparameters as a dict: of a mapping, a dataclass, a Namespace, or None."""
    if params is None:
        return {}
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return dataclasses.asdict(params)
    return dict(params if isinstance(params, Mapping) else vars(params))


def flat_params(params: Mapping[str, Any], start: str = "") -> dict[str, int | float | str | bool]:
    """Nested hyperparameters as one level, `model/width`; what is no number, text or bool, as text."""
    flat: dict[str, int | float | str | bool] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat.update(flat_params(value, f"{start}{name}/"))
        else:
            flat[f"{start}{name}"] = value if isinstance(value, int | float | str | bool) else str(value)
    return flat


def needs(package: str, logger: str) -> HastenError:
    """The error for a logger whose library is not installed."""
    return HastenError(f"{logger} needs {package}, which is not installed", f"pip install {package}")
