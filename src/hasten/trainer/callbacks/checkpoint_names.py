"""Names of checkpoint files, filled in from templates such as `{epoch}-{val_loss:.2f}`, and their default folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import torch

from hasten.errors import HastenError


def checkpoint_name(template: str, metrics: Mapping[str, Any], insert_names: bool) -> str:
    """Return a template filled in with metrics; a metric that was not logged is 0.

    Args:
        template: Such as `"{epoch}-{val/loss:.2f}"`. Only the metrics that it names are read from the device.
        metrics: Numbers or 0-dim tensors by name.
        insert_names: Write `epoch=3` for `{epoch}`, not `3`.

    Raises:
        HastenError: The template is malformed, or a format does not fit its value.
    """
    parts = []
    try:
        for literal, name, spec, _ in Formatter().parse(template):
            parts.append(literal)
            if name is not None:
                value = metrics.get(name, 0)
                value = value.item() if isinstance(value, torch.Tensor) else value
                # A metric is a float, even a counter: `{val_count:d}` would fail on 3.0.
                if spec and spec[-1] == "d":
                    value = int(value)
                parts.append((f"{name}=" if insert_names else "") + format(value, spec or ""))
    except ValueError as error:
        raise HastenError(
            f"ModelCheckpoint(filename={template!r}): {error}", "write {name} or {name:.2f}, as in an f-string"
        ) from None
    return "".join(parts)


def default_folder(trainer: Any) -> Path:
    """Return the default folder for checkpoints: one per run, beside the first logger's files."""
    folder = _experiment_folder(trainer)
    if trainer.loggers and (version := trainer.loggers[0].version) is not None:
        folder /= version if isinstance(version, str) else f"version_{version}"
    return folder / "checkpoints"


def earlier_folders(trainer: Any) -> list[str]:
    """Return the default folders in which earlier runs may have left checkpoints. Creates none."""
    folders = [str(path) for path in _experiment_folder(trainer).glob("*/checkpoints")] if trainer.loggers else []
    return [*folders, str(Path(trainer.default_root_dir) / "checkpoints")]


def _experiment_folder(trainer: Any) -> Path:
    """Return the folder that holds the first logger's runs, one folder each: its `save_dir` and name."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name or "")
