"""A callback that writes down what a training did, to the last bit, whichever Trainer drives it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

HOOKS = (
    "setup teardown on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end "
    "on_train_start on_train_end on_train_epoch_start on_train_epoch_end on_train_batch_start on_train_batch_end "
    "on_validation_start on_validation_end on_validation_epoch_start on_validation_epoch_end "
    "on_validation_batch_start on_validation_batch_end "
    "on_test_start on_test_end on_test_epoch_start on_test_epoch_end on_test_batch_start on_test_batch_end "
    "on_predict_start on_predict_end on_predict_epoch_start on_predict_epoch_end "
    "on_predict_batch_start on_predict_batch_end "
    "on_before_backward on_after_backward on_before_optimizer_step on_before_zero_grad "
    "on_exception on_save_checkpoint on_load_checkpoint"
).split()


def exact(value: Any) -> Any:
    """A number as text that loses no bit; other things as short text."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return digest(value)
        value = value.detach().cpu().item()
    if isinstance(value, (int, float, bool)):
        return float(value).hex()
    return type(value).__name__


def digest(tree: Any) -> str:
    """SHA-256 of every tensor and number in a nested structure, by sorted keys."""
    sha = hashlib.sha256()

    def walk(item: Any) -> None:
        if isinstance(item, Mapping):
            for key in sorted(item, key=str):
                sha.update(str(key).encode())
                walk(item[key])
        elif isinstance(item, (list, tuple)):
            for part in item:
                walk(part)
        elif isinstance(item, torch.Tensor):
            sha.update(str((item.dtype, tuple(item.shape))).encode())
            sha.update(item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, np.ndarray):
            sha.update(np.ascontiguousarray(item).tobytes())
        elif isinstance(item, (int, float, bool, str)):
            sha.update(repr(item).encode())

    walk(tree)
    return sha.hexdigest()[:16]


def loss_of(outputs: Any) -> Any:
    """The loss in what `on_train_batch_end` is given: Lightning makes a bare loss `{"loss": loss}`."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    return None if outputs is None else exact(outputs)


def metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """A metrics dict with exact values, sorted by name."""
    return {name: exact(values[name]) for name in sorted(values)}


def recorder(base: type) -> Any:
    """A callback of class `base` (the Callback of whichever Lightning package the module uses).

    It keeps `hooks` (names in the order of the calls), `steps` (one dict a training batch: loss, learning rates,
    logged metrics), and `validations` (callback metrics at the end of each one, the sanity check excepted).
    """
    hooks: list[str] = []
    steps: list[dict[str, Any]] = []
    validations: list[dict[str, Any]] = []

    def plain(name: str) -> Callable[..., None]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> None:
            hooks.append(name)

        return hook

    def train_batch_end(self: Any, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        hooks.append("on_train_batch_end")
        steps.append(
            {
                "loss": loss_of(outputs),
                "lr": [exact(group["lr"]) for opt in trainer.optimizers for group in opt.param_groups],
                "global_step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "logged": metrics(trainer.callback_metrics),
            }
        )

    def validation_end(self: Any, trainer: Any, module: Any) -> None:
        hooks.append("on_validation_end")
        if not trainer.sanity_checking:
            validations.append(metrics(trainer.callback_metrics))

    body: dict[str, Any] = {name: plain(name) for name in HOOKS}
    body["on_train_batch_end"] = train_batch_end
    body["on_validation_end"] = validation_end
    kept = type("Recorder", (base,), body)()
    kept.hooks, kept.steps, kept.validations = hooks, steps, validations
    return kept


def random_states() -> str:
    """A hash of the states of Python's, NumPy's and torch's generators: another number drawn changes it."""
    # The modules draw from NumPy's one global generator, so its state is the one to look at.
    _, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    return digest([torch.get_rng_state(), list(random.getstate()[1]), keys, position, has_gauss, gauss])
