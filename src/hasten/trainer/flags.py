"""Flags as attributes of a Trainer, and suggestions for arguments that are not flags."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hasten.trainer.errors import UnknownFlagError

OLD_FLAGS = {
    "epochs": "max_epochs=N",
    "num_epochs": "max_epochs=N",
    "n_epochs": "max_epochs=N",
    "steps": "max_steps=N",
    "gpu": 'accelerator="gpu", devices=N',
    "device": 'accelerator="cpu" or "gpu"',
    "grad_clip": "gradient_clip_val=NORM",
    "clip_grad_norm": "gradient_clip_val=NORM",
    "amp": 'precision="bf16-mixed" or "16-mixed"',
    "checkpoint_dir": "callbacks=[ModelCheckpoint(dirpath=PATH)]",
    "gpus": 'devices=N, accelerator="gpu"',
    "num_gpus": 'devices=N, accelerator="gpu"',
    "tpu_cores": "nothing: hasten trains on CPUs and NVIDIA GPUs",
    "num_processes": 'devices=N, accelerator="cpu"',
    "nb_gpu_nodes": "num_nodes=N",
    "num_gpu_nodes": "num_nodes=N",
    "distributed_backend": 'strategy="ddp"',
    "amp_level": 'precision="16-mixed" or "bf16-mixed"',
    "amp_backend": 'precision="16-mixed" or "bf16-mixed"',
    "use_amp": 'precision="16-mixed" or "bf16-mixed"',
    "fp16": 'precision="16-mixed"',
    "bf16": 'precision="bf16-mixed"',
    "max_nb_epochs": "max_epochs=N",
    "min_nb_epochs": "min_epochs=N",
    "num_train_epochs": "max_epochs=N",
    "train_percent_check": "limit_train_batches=SHARE",
    "val_percent_check": "limit_val_batches=SHARE",
    "test_percent_check": "limit_test_batches=SHARE",
    "overfit_pct": "overfit_batches=SHARE",
    "nb_sanity_val_steps": "num_sanity_val_steps=N",
    "accumulate_grad_steps": "accumulate_grad_batches=N",
    "gradient_accumulation_steps": "accumulate_grad_batches=N",
    "gradient_clip": "gradient_clip_val=NORM",
    "max_grad_norm": "gradient_clip_val=NORM",
    "checkpoint_callback": "enable_checkpointing=BOOL, or callbacks=[ModelCheckpoint(...)]",
    "early_stop_callback": "callbacks=[EarlyStopping(...)]",
    "resume_from_checkpoint": "fit(..., ckpt_path=PATH)",
    "progress_bar_refresh_rate": "callbacks=[Progress(refresh_rate=N)]",
    "weights_summary": "enable_model_summary=BOOL",
    "weights_save_path": "default_root_dir=PATH",
    "default_save_path": "default_root_dir=PATH",
    "row_log_interval": "log_every_n_steps=N",
    "log_save_interval": "log_every_n_steps=N",
    "auto_lr_find": "hasten.callbacks.LRFinder().find(trainer, model, loader) before fit",
    "auto_scale_batch_size": 'trainer.find_batch_size(model, loader) before fit, or microbatch="auto"',
    "replace_sampler_ddp": "use_distributed_sampler=BOOL",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "torch_compile": "compile=True",
    "gradient_checkpointing": "activation_checkpointing=True",
    "mixed_precision": 'precision="bf16-mixed" or "16-mixed"',
    "logging_steps": "log_every_n_steps=N",
    "eval_steps": "val_check_interval=N",
    "output_dir": "default_root_dir=PATH",
    "report_to": "logger=...",
    "learning_rate": "give it to the optimizer in configure_optimizers",
    "lr": "give it to the optimizer in configure_optimizers",
    "optimizer": "return it from configure_optimizers; for a plain network, give it to fit",
    "batch_size": "that of the DataLoader",
    "num_workers": "that of the DataLoader",
    "per_device_train_batch_size": "the batch_size of the DataLoader",
    "patience": "callbacks=[EarlyStopping(...)]",
    "checkpoint": "fit(..., ckpt_path=PATH)",
}
"""Flags of older Trainers and of similar tools -> what to use instead."""

_ELSEWHERE = {"plugins": "hasten has no plugins; precision and strategy are flags"}


def refuse_unknown(names: Iterable[str], known: list[str]) -> None:
    """Raise for an argument that is not a flag, and suggest the right one."""
    for name in names:
        if name in known:
            continue
        if name in OLD_FLAGS:
            raise UnknownFlagError(
                f"Trainer({name}=...) is not a flag of hasten's Trainer", f"instead: {OLD_FLAGS[name]}"
            )
        if name in _ELSEWHERE:
            raise UnknownFlagError(f"Trainer({name}=...) is another Trainer's, and not hasten's", _ELSEWHERE[name])
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        raise UnknownFlagError(f"Trainer.__init__() got an unexpected keyword argument {name!r}", hint)


class FlagAttribute:
    """Descriptor of a flag on a Trainer: reads it from the Config; setting it makes and checks a new Config."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = f"The flag `{name}`."

    def __get__(self, trainer: Any, kind: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer.config, self._name)

    def __set__(self, trainer: Any, value: Any) -> None:
        trainer.configure(**{self._name: value})


def set_by(from_environment: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Return a line for each flag set by the environment.

    Args:
        from_environment: Flag name -> (environment variable, value).
    """
    return [f"{variable} is set: {name}={value!r}" for name, (variable, value) in from_environment.items()]


@contextmanager
def note_environment(from_environment: Mapping[str, tuple[str, Any]]) -> Iterator[None]:
    """Add the flags set by the environment to any error raised inside: the script does not show them."""
    try:
        yield
    except Exception as error:
        for line in set_by(from_environment):
            error.add_note(line)
        raise
