# ruff: noqa: RUF009  # `_flag` makes a field
"""Config: the Trainer's flags. Each is declared, documented and checked here, and nowhere else.

The Trainer's signature and docstring, and the tables of docs/trainer.md, are made from it by `config_docs.py`.
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
        default: What it is if nobody says.
        group: The table of docs/trainer.md in which it stands.
        doc: What it does, in Markdown.
        check: Refuses what it cannot be; returns it in its normal form.
        technique: The name of the technique that it is sugar for.
    """
    return field(default=default, metadata={"group": group, "doc": doc, "check": check, "technique": technique})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The flags of a Trainer, checked, in their normal form."""

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
    num_nodes: int = _flag(1, WHERE, "machines; more than one is started by torchrun or srun", values.whole(1))
    precision: Any = _flag(
        None,
        WHERE,
        '`"32-true"` (what None is), `"bf16-mixed"`, `"16-mixed"` (with loss scaling), `"bf16-true"`, `"16-true"`,'
        ' `"64-true"`; technique `precision`',
        values.precision,
        technique="precision",
    )
    use_distributed_sampler: bool = _flag(True, WHERE, "give each process its share of the data", values.switch)
    sync_batchnorm: bool = _flag(False, WHERE, "BatchNorm over all processes", values.switch)

    max_epochs: int | None = _flag(
        None,
        HOW_LONG,
        "stop after so many epochs; -1: never. None: 1000 if `max_steps` is not given either",
        values.whole(-1),
    )
    min_epochs: int | None = _flag(None, HOW_LONG, "let nothing stop the training earlier", values.whole(0))
    max_steps: int = _flag(
        -1, HOW_LONG, "stop after so many optimizer steps; -1: never", values.whole(-1, optional=False)
    )
    min_steps: int | None = _flag(None, HOW_LONG, "let nothing stop the training earlier", values.whole(0))
    max_time: Duration | None = _flag(
        None, HOW_LONG, 'stop after this long: a timedelta, `"DD:HH:MM:SS"` or `{"hours": 2}`', values.duration
    )
    limit_train_batches: int | float | None = _flag(
        None,
        HOW_LONG,
        "batches an epoch: an int counts them, a float is a share. None: all",
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
        "train and validate on so many training batches, the same in each epoch",
        values.share_or_count,
    )
    fast_dev_run: int | bool = _flag(
        False, HOW_LONG, "run so many batches of everything (True: 1), without logs and checkpoints", values.to_try
    )
    reload_dataloaders_every_n_epochs: int = _flag(
        0, HOW_LONG, "ask for new loaders every so many epochs; 0: never", values.whole(0, optional=False)
    )

    val_check_interval: Any = _flag(
        None,
        VALIDATION,
        "validate every so many training batches (int), after a share of the epoch (float), or after a duration (as"
        " `max_time`). None: after each epoch",
        values.interval,
    )
    check_val_every_n_epoch: int | None = _flag(
        1,
        VALIDATION,
        "validate in every n-th epoch only; None: `val_check_interval` counts over epochs",
        values.whole(1),
    )
    num_sanity_val_steps: float | None = _flag(
        None, VALIDATION, "validation batches tried before training begins; -1: all. None: 2", values.sanity_steps
    )
    inference_mode: bool = _flag(
        True,
        VALIDATION,
        "validate, test and predict under `torch.inference_mode`; False: under `no_grad` (a validation within `fit` is"
        " under `no_grad` anyway)",
        values.switch,
    )

    accumulate_grad_batches: Any = _flag(
        1, OPTIMIZATION, "step after so many batches; or a schedule by epoch, `{0: 8, 4: 1}`", values.accumulation
    )
    microbatch: int | str | None = _flag(
        None,
        OPTIMIZATION,
        "compute a batch in parts of so many samples, and step once: the gradient of the whole batch in less memory."
        ' `"auto"`: whole batches, [halved where memory runs out](#batches-in-parts)',
        values.microbatch,
    )
    optimizer_in_backward: bool = _flag(
        False,
        OPTIMIZATION,
        "step each parameter as soon as its gradient is there, and drop that: the same numbers, and never all gradients"
        " at once; see [optimizer in backward](#optimizer-in-backward)",
        values.switch,
    )
    gradient_clip_val: int | float | None = _flag(
        None, OPTIMIZATION, "largest gradient norm, or value; None: nothing is clipped", values.clip_value
    )
    gradient_clip_algorithm: str | None = _flag(
        None, OPTIMIZATION, '`"norm"` (what None is) or `"value"`', values.clip_algorithm
    )

    logger: Any = _flag(
        None, FILES, "a logger, several, or False. None: CSV files (beside another framework's modules: as that does)"
    )
    callbacks: Any = _flag(None, FILES, "one callback or a list of them; see [callbacks](#callbacks)")
    log_every_n_steps: Any = _flag(
        None, FILES, "loggers get step values every so many optimizer steps. None: 50", values.whole(0)
    )
    enable_progress_bar: bool | None = _flag(
        None, FILES, "a live line on a terminal, a line an epoch elsewhere; False: none", values.switch
    )
    enable_model_summary: bool | None = _flag(
        None, FILES, "print layers and parameters first; False: no", values.switch
    )
    enable_checkpointing: bool | None = _flag(
        None, FILES, "a checkpoint each epoch if `callbacks` has no ModelCheckpoint; False: none", values.switch
    )
    enable_autolog_hparams: bool = _flag(True, FILES, "give hyper-parameters to the loggers", values.switch)
    default_root_dir: str | Path | None = _flag(
        None, FILES, "where logs and checkpoints go. None: the current folder", values.folder
    )
    checkpoint_format: str = _flag(
        "hasten",
        FILES,
        'safetensors with a checksum; `"torch"`: a file for `torch.load`; see [checkpoints](checkpoints.md)',
        values.one_of("hasten", "torch"),
    )
    background_saves: bool = _flag(True, FILES, "write checkpoints while training goes on", values.switch)

    seed: int | None = _flag(
        None,
        MISTAKES,
        "seed Python, NumPy and torch before anything is drawn; None: they are left alone",
        values.seed,
    )
    deterministic: bool | str | None = _flag(
        None, MISTAKES, 'deterministic kernels only (True); `"warn"`: where there are any', values.deterministic
    )
    detect_anomaly: bool = _flag(False, MISTAKES, "find the operation that made a NaN; slow", values.switch)
    profiler: Any = _flag(None, MISTAKES, '`"simple"` or `"pytorch"`; see [profiler](#profiler)')
    barebones: bool = _flag(
        False,
        MISTAKES,
        "nothing but the loop: no logs, checkpoints, progress, summary, sanity check",
        values.switch,
    )

    plan: str | Path | Plan | None = _flag(
        None,
        SPEED,
        "a plan that `hasten tune` wrote: its file, or a `hasten.Plan`; installs its techniques."
        ' `"auto"`: [find out during `fit`](#tuning-during-fit)',
        values.plan,
    )
    compile: bool | str | dict[str, Any] | None = _flag(
        None,
        SPEED,
        "True, a mode of `torch.compile`, or a mode with an `activation_budget`; technique `compile`",
        technique="compile",
    )
    channels_last: bool | None = _flag(
        None, SPEED, "memory layout for convolutions; technique `channels_last`", technique="channels_last"
    )
    fused_optimizer: bool | None = _flag(
        None, SPEED, "one kernel for all parameters; technique `fused_optimizer`", technique="fused_optimizer"
    )
    matmul_precision: str | None = _flag(
        None,
        SPEED,
        '`"high"` (TF32) or `"medium"` (bf16) inside float32 matrix products; technique `matmul_precision`',
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
        None, SPEED, "let cuDNN try its algorithms; technique `cudnn_benchmark`", values.switch, "cudnn_benchmark"
    )
    device_prefetch: bool | None = _flag(
        None,
        SPEED,
        "copy the next batch to the GPU while this one computes, from pinned memory; techniques `device_prefetch` and"
        " `pin_memory`",
        values.switch,
        technique="device_prefetch",
    )
    batched_fetch: bool | None = _flag(
        None,
        SPEED,
        "gather batches of a TensorDataset at once rather than sample by sample; technique `batched_fetch`",
        technique="batched_fetch",
    )
    activation_checkpointing: bool | int | str | None = _flag(
        None,
        SPEED,
        'True, how many blocks, their class names or paths, or "sqrt": recompute activations in the backward; less'
        " memory, more time; technique `activation_checkpointing`",
        technique="activation_checkpointing",
    )

    activation_offload: bool | None = _flag(
        None,
        SPEED,
        "keep large activations in the host's memory between forward and backward (CUDA): less memory, more time;"
        " technique `activation_offload`",
        values.switch,
        technique="activation_offload",
    )
    host_embeddings: bool | int | None = _flag(
        None,
        SPEED,
        "keep embedding tables of 64 MiB or more (a number: of so many MiB) on the host, with their gradient and the"
        " optimizer's state, and move a batch's rows (CUDA); see [embeddings](embeddings.md); technique"
        " `host_embeddings`",
        technique="host_embeddings",
    )
    chunked_loss: bool | None = _flag(
        None,
        SPEED,
        "cross entropy of 2 million logits or more some rows at a time: one copy and one gradient of them less;"
        " technique `chunked_loss`",
        values.switch,
        technique="chunked_loss",
    )

    def __post_init__(self) -> None:
        if values.switch("barebones", self.barebones):
            self._refuse_beside_barebones()  # while values stand as they were given
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
        """Return the flags with what those not given come to: by default, and because of others.

        `fast_dev_run=3` limits everything to 3 batches, `overfit_batches=2` sets two limits, `barebones` leaves the
        loggers out. Done once: what somebody sets on the Trainer afterwards stays as it is.
        """
        changed: dict[str, Any] = {}
        for name in (f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict")):
            if getattr(self, name) is None:
                changed[name] = 1.0
        if self.val_check_interval is None:
            changed["val_check_interval"] = 1.0
        if isinstance(self.accumulate_grad_batches, Mapping):
            changed["accumulate_grad_batches"] = 1  # the callback that a schedule becomes sets it, epoch by epoch
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
        """The settings of techniques that flags are sugar for; None where a flag is not given."""
        prefetch = True if self.device_prefetch else self.device_prefetch
        chosen: dict[str, Setting | None] = {}
        for flag, name in sugar().items():
            if name == "device_prefetch":
                chosen["pin_memory"] = prefetch  # first: it copies from pinned memory
            chosen[name] = getattr(self, flag)
        return chosen | {
            "precision": None if self.precision == "32-true" else self.precision,
            "compile": "default" if self.compile is True else self.compile,
            "device_prefetch": prefetch,
            "cudnn_benchmark": True if self.benchmark else None,
        }


def sugar() -> dict[str, str]:
    """Return the techniques that flags are sugar for: flag -> technique."""
    return {flag.name: flag.metadata["technique"] for flag in fields(Config) if flag.metadata["technique"]}
