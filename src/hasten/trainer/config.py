# ruff: noqa: RUF009  # `_flag` makes a field
"""Config: the Trainer's flags. Each flag is declared, documented and checked here, and nowhere else.

`config_docs.py` makes the Trainer's signature and docstring, and the tables of docs/trainer.md, from it. To add a flag,
add a field with `_flag`; its check comes from `flag_values.py`. Checks run when a Config is made, so a Trainer never
holds an invalid value; `settled` then fills in the defaults that depend on other flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec

from hasten.plan import Plan, Setting
from hasten.trainer import flag_values as values
from hasten.trainer.errors import ContradictionError, misconfigured
from hasten.trainer.flag_values import ClipAlgorithm as ClipAlgorithm

_P = ParamSpec("_P")

Duration = str | timedelta | dict[str, int]

WHERE = "Where it runs"
HOW_LONG = "How long, and on how much"
VALIDATION = "Validation"
OPTIMIZATION = "Optimization"
FILES = "Logs, progress, files"
MISTAKES = "Looking for mistakes, and repeating"
SPEED = "Speed"


def _flag(default: Any, group: str, doc: str, check: values.Check | None = None, technique: str = "") -> Any:
    """Declare a flag.

    Args:
        default: The value if the flag is not given.
        group: The title of its table in docs/trainer.md.
        doc: What the flag does, in Markdown.
        check: Raises for an invalid value; returns a valid one in its normal form.
        technique: The technique that the flag is shorthand for; "" for none.
    """
    return field(default=default, metadata={"group": group, "doc": doc, "check": check, "technique": technique})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags of a Trainer, checked and in their normal form."""

    accelerator: str = _flag(
        "auto", WHERE, '`"cpu"`, `"gpu"` or `"cuda"`; auto: GPUs if there are any', values.accelerator
    )
    devices: Any = _flag(
        "auto", WHERE, "a number, or a list of GPU numbers; auto: all GPUs, or one CPU process", values.devices
    )
    strategy: Any = _flag(
        "auto",
        WHERE,
        '`"ddp"`, `"ddp_find_unused_parameters_true"`, `"ddp_fork"`, `"ddp_spawn"`, `"fsdp"`, or an object of'
        " `hasten.strategies`; see [strategies](strategies.md)",
        values.strategy,
    )
    num_nodes: int = _flag(1, WHERE, "number of machines; torchrun or srun starts more than one", values.at_least(1))
    precision: Any = _flag(
        None,
        WHERE,
        '`"32-true"` (same as None), `"bf16-mixed"`, `"16-mixed"` (with loss scaling), `"bf16-true"`, `"16-true"`,'
        ' `"64-true"`; technique `precision`',
        values.precision,
        technique="precision",
    )
    use_distributed_sampler: bool = _flag(True, WHERE, "give each process its own share of the data", values.switch)
    sync_batchnorm: bool = _flag(False, WHERE, "compute BatchNorm statistics over all processes", values.switch)

    max_epochs: int | None = _flag(
        None,
        HOW_LONG,
        "stop after this many epochs; -1: no limit. None: 1000 if `max_steps` is not given either",
        values.at_least(-1),
    )
    min_epochs: int | None = _flag(
        None, HOW_LONG, "train at least this many epochs, even if a callback asks to stop", values.at_least(0)
    )
    max_steps: int = _flag(
        -1, HOW_LONG, "stop after this many optimizer steps; -1: no limit", values.at_least(-1, optional=False)
    )
    min_steps: int | None = _flag(
        None, HOW_LONG, "train at least this many optimizer steps, even if a callback asks to stop", values.at_least(0)
    )
    max_time: Duration | None = _flag(
        None, HOW_LONG, 'stop after this long: a timedelta, `"DD:HH:MM:SS"` or `{"hours": 2}`', values.duration
    )
    limit_train_batches: int | float | None = _flag(
        None,
        HOW_LONG,
        "training batches per epoch: an int is a number, a float a share. None: all",
        values.share_or_count,
    )
    limit_val_batches: int | float | None = _flag(
        None, HOW_LONG, "the same for validation; 0: no validation", values.share_or_count
    )
    limit_test_batches: int | float | None = _flag(None, HOW_LONG, "the same for test", values.share_or_count)
    limit_predict_batches: int | float | None = _flag(None, HOW_LONG, "the same for predict", values.share_or_count)
    overfit_batches: int | float = _flag(
        0.0,
        HOW_LONG,
        "train and validate on this many batches (int) or this share (float), the same in each epoch",
        values.share_or_count,
    )
    fast_dev_run: int | bool = _flag(
        False, HOW_LONG, "run this many batches of every loop (True: 1), without logs and checkpoints", values.to_try
    )
    reload_dataloaders_every_n_epochs: int = _flag(
        0, HOW_LONG, "request new loaders every n epochs; 0: never", values.at_least(0, optional=False)
    )

    val_check_interval: Any = _flag(
        None,
        VALIDATION,
        "validate every n training batches (int), after a share of the epoch (float), or after a duration (as"
        " `max_time`). None: after each epoch",
        values.interval,
    )
    check_val_every_n_epoch: int | None = _flag(
        1,
        VALIDATION,
        "validate only in every n-th epoch; None: `val_check_interval` counts batches across epochs",
        values.at_least(1),
    )
    num_sanity_val_steps: float | None = _flag(
        None, VALIDATION, "validation batches to try before training begins; -1: all. None: 2", values.sanity_steps
    )
    inference_mode: bool = _flag(
        True,
        VALIDATION,
        "validate, test and predict under `torch.inference_mode`; False: under `no_grad` (validation within `fit`"
        " always runs under `no_grad`)",
        values.switch,
    )

    accumulate_grad_batches: Any = _flag(
        1, OPTIMIZATION, "step after this many batches; or a schedule by epoch, `{0: 8, 4: 1}`", values.accumulation
    )
    microbatch: int | str | None = _flag(
        None,
        OPTIMIZATION,
        "compute a batch in parts of this many samples, and step once: the whole batch's gradient in less memory."
        ' `"auto"`: whole batches, [halved when memory runs out](#batches-in-parts)',
        values.microbatch,
    )
    optimizer_in_backward: bool = _flag(
        False,
        OPTIMIZATION,
        "step each parameter as soon as its gradient is computed, then drop the gradient: the same numbers, without all"
        " gradients in memory at once; see [optimizer in backward](#optimizer-in-backward)",
        values.switch,
    )
    gradient_clip_val: int | float | None = _flag(
        None, OPTIMIZATION, "largest gradient norm, or value; None: no clipping", values.clip_value
    )
    gradient_clip_algorithm: str | None = _flag(
        None, OPTIMIZATION, '`"norm"` (same as None) or `"value"`', values.clip_algorithm
    )

    logger: Any = _flag(
        None,
        FILES,
        "a logger, a list of loggers, or False. None: CSV files (with another framework's modules: its default)",
    )
    callbacks: Any = _flag(None, FILES, "one callback or a list of them; see [callbacks](#callbacks)")
    log_every_n_steps: Any = _flag(None, FILES, "log step values every n optimizer steps. None: 50", values.at_least(0))
    enable_progress_bar: bool | None = _flag(
        None, FILES, "a live line on a terminal, a line per epoch elsewhere; False: none", values.switch
    )
    enable_model_summary: bool | None = _flag(
        None, FILES, "print layers and parameter counts before training; False: none", values.switch
    )
    enable_checkpointing: bool | None = _flag(
        None, FILES, "save a checkpoint each epoch if `callbacks` has no ModelCheckpoint; False: none", values.switch
    )
    enable_autolog_hparams: bool = _flag(True, FILES, "log hyper-parameters", values.switch)
    default_root_dir: str | Path | None = _flag(
        None, FILES, "folder for logs and checkpoints. None: the current folder", values.folder
    )
    checkpoint_format: str = _flag(
        "hasten",
        FILES,
        '`"hasten"`: safetensors with a checksum; `"torch"`: a file for `torch.load`;'
        " see [checkpoints](checkpoints.md)",
        values.one_of("hasten", "torch"),
    )
    background_saves: bool = _flag(
        True, FILES, "write checkpoints in the background, while training continues", values.switch
    )

    seed: int | None = _flag(
        None,
        MISTAKES,
        "seed Python, NumPy and torch when the Trainer is made; None: do not seed",
        values.seed,
    )
    deterministic: bool | str | None = _flag(
        None,
        MISTAKES,
        'True: deterministic kernels only; `"warn"`: warn for operations that have none',
        values.deterministic,
    )
    detect_anomaly: bool = _flag(False, MISTAKES, "find the operation that produced a NaN; slow", values.switch)
    profiler: Any = _flag(None, MISTAKES, '`"simple"` or `"pytorch"`; see [profiler](#profiler)')
    barebones: bool = _flag(
        False,
        MISTAKES,
        "only the training loop: no logs, checkpoints, progress, summary or sanity check",
        values.switch,
    )

    plan: str | Path | Plan | None = _flag(
        None,
        SPEED,
        "a plan from `hasten tune`, as a file or a `hasten.Plan`; installs its techniques."
        ' `"auto"`: [tune during `fit`](#tuning-during-fit)',
        values.plan,
    )
    compile: bool | str | dict[str, Any] | None = _flag(
        None,
        SPEED,
        "True, a mode of `torch.compile`, or a mode with an `activation_budget`; technique `compile`",
        technique="compile",
    )
    channels_last: bool | None = _flag(
        None,
        SPEED,
        "channels-last memory format for convolutions; technique `channels_last`",
        technique="channels_last",
    )
    fused_optimizer: bool | None = _flag(
        None, SPEED, "step all parameters in one kernel; technique `fused_optimizer`", technique="fused_optimizer"
    )
    matmul_precision: str | None = _flag(
        None,
        SPEED,
        '`"high"` (TF32) or `"medium"` (bf16) inside float32 matrix multiplications; technique `matmul_precision`',
        technique="matmul_precision",
    )
    fp8: str | None = _flag(
        None,
        SPEED,
        'linear layers in float8 by torchao, on GPUs of compute capability 8.9 or newer: `"tensorwise"`, `"rowwise"` or'
        ' `"rowwise_with_gw_hp"`; technique `fp8`',
        technique="fp8",
    )
    benchmark: bool | None = _flag(
        None,
        SPEED,
        "let cuDNN time its algorithms and pick the best; technique `cudnn_benchmark`",
        values.switch,
        "cudnn_benchmark",
    )
    device_prefetch: bool | None = _flag(
        None,
        SPEED,
        "copy the next batch to the GPU from pinned memory while the current one computes; techniques `device_prefetch`"
        " and `pin_memory`",
        values.switch,
        technique="device_prefetch",
    )
    batched_fetch: bool | None = _flag(
        None,
        SPEED,
        "gather each batch of a TensorDataset at once instead of sample by sample; technique `batched_fetch`",
        technique="batched_fetch",
    )
    activation_checkpointing: bool | int | str | None = _flag(
        None,
        SPEED,
        "recompute activations in the backward pass, of all blocks (True), a number of blocks, class names or paths, or"
        ' "sqrt": less memory, more time; technique `activation_checkpointing`',
        technique="activation_checkpointing",
    )

    activation_offload: bool | None = _flag(
        None,
        SPEED,
        "keep large activations in host memory between forward and backward (CUDA): less GPU memory, more time;"
        " technique `activation_offload`",
        values.switch,
        technique="activation_offload",
    )
    host_embeddings: bool | int | None = _flag(
        None,
        SPEED,
        "keep embedding tables of at least 64 MiB (a number: of at least that many MiB) on the host, with their"
        " gradients and optimizer state, and move only a batch's rows (CUDA); see [embeddings](embeddings.md);"
        " technique `host_embeddings`",
        technique="host_embeddings",
    )
    chunked_loss: bool | None = _flag(
        None,
        SPEED,
        "compute cross entropy of 2 million logits or more in chunks of rows: one copy and one gradient of the logits"
        " less; technique `chunked_loss`",
        values.switch,
        technique="chunked_loss",
    )

    def __post_init__(self) -> None:
        if values.switch("barebones", self.barebones):
            self._refuse_beside_barebones()  # before checks normalize the values
        for flag in fields(self):
            if (check := flag.metadata["check"]) is not None:
                object.__setattr__(self, flag.name, check(flag.name, getattr(self, flag.name)))
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise misconfigured(
                "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS',"
                " datetime.timedelta, or dict kwargs for timedelta) when `check_val_every_n_epoch=None`.",
                f"val_check_interval={self.val_check_interval} is a share of an epoch, and batches are counted over"
                " epochs then",
            )

    def _refuse_beside_barebones(self) -> None:
        """Raise for flags that ask for what `barebones` leaves out."""
        left_out: dict[str, tuple[Any, ...]] = {
            **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), (None, False)),
            "enable_model_summary": (None, False),
            **dict.fromkeys(("log_every_n_steps", "num_sanity_val_steps"), (None, 0)),
            **dict.fromkeys(("fast_dev_run", "detect_anomaly"), (False,)),
            "profiler": (None,),
        }
        for name, allowed in left_out.items():
            value = getattr(self, name)
            if not any(value is fine or value == fine for fine in allowed):
                raise ContradictionError(
                    f"`Trainer(barebones=True, {name}={value!r})` was passed: these contradict each other",
                    f"drop {name}",
                )

    def settled(self) -> Config:
        """Return the flags with the values that follow from defaults and from other flags.

        `fast_dev_run=3` limits every loop to 3 batches, `overfit_batches=2` sets two limits, `barebones` turns the
        loggers off. The Trainer does this once: a flag that is set on it afterwards keeps the value set.
        """
        changed: dict[str, Any] = {}
        for name in (f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict")):
            if getattr(self, name) is None:
                changed[name] = 1.0
        if self.val_check_interval is None:
            changed["val_check_interval"] = 1.0
        if isinstance(self.accumulate_grad_batches, Mapping):
            changed["accumulate_grad_batches"] = 1  # the callback made from the schedule sets it each epoch
        if self.num_sanity_val_steps is None:
            changed["num_sanity_val_steps"] = 2
        if self.log_every_n_steps is None:
            changed["log_every_n_steps"] = 50
        if self.barebones:
            changed.update(log_every_n_steps=0, num_sanity_val_steps=0, logger=False)
            changed.update(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        if self.overfit_batches:
            changed.update(limit_train_batches=self.overfit_batches, limit_val_batches=self.overfit_batches)
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            changed.update({f"limit_{kind}_batches": batches for kind in ("train", "val", "test", "predict")})
            changed.update(max_steps=batches, max_epochs=1, min_steps=None, min_epochs=None)
            changed.update(num_sanity_val_steps=0, val_check_interval=1.0, check_val_every_n_epoch=1)
            changed.update(enable_checkpointing=False)
        return dataclasses.replace(self, **changed)

    @property
    def techniques(self) -> dict[str, Setting | None]:
        """Settings of the techniques that flags are shorthand for; None where a flag is not given."""
        prefetch = True if self.device_prefetch else self.device_prefetch
        chosen: dict[str, Setting | None] = {}
        for flag, name in sugar().items():
            if name == "device_prefetch":
                chosen["pin_memory"] = prefetch  # first: device_prefetch copies from pinned memory
            chosen[name] = getattr(self, flag)
        return chosen | {
            "precision": None if self.precision == "32-true" else self.precision,
            "compile": "default" if self.compile is True else self.compile,
            "device_prefetch": prefetch,
            "cudnn_benchmark": True if self.benchmark else None,
        }


def sugar() -> dict[str, str]:
    """Return the techniques that flags are shorthand for: flag -> technique."""
    return {flag.name: flag.metadata["technique"] for flag in fields(Config) if flag.metadata["technique"]}
