"""Let Lightning read hasten's checkpoints."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from hasten.trainer.checkpoint.files import is_hasten, read


def _with_configs(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with its omegaconf hyperparameters as configs again, if omegaconf is installed."""
    for prefix in ("", "datamodule_"):
        if saved.get(f"{prefix}hparams_type") == "omegaconf" and importlib.util.find_spec("omegaconf"):
            omegaconf = importlib.import_module("omegaconf")
            config = saved[f"{prefix}hyper_parameters"] = omegaconf.OmegaConf.create(saved[f"{prefix}hyper_parameters"])
            saved[f"{prefix}hparams_type"] = type(config)
    return saved


@functools.cache
def teach_loading() -> None:
    """Patch `torch.load`, and so Lightning's `load_from_checkpoint`, to read hasten's checkpoints in this process."""
    load = torch.load

    @functools.wraps(load)
    def load_either(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
        if isinstance(path, str | os.PathLike) and is_hasten(path):
            saved = read(Path(path), map_location if isinstance(map_location, str | torch.device) else "cpu")
            return _with_configs(saved)
        return load(f, map_location, *args, **kwargs)

    torch.load = load_either
