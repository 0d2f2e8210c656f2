"""The Trainer's flags: what may be said, what contradicts itself, and which technique a flag is sugar for."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.plan import Plan, Setting
from hasten.techniques import CATALOGUE, check, remarks, toml_value

PRECISIONS = {
    **{name: name for name in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")},
    "32": "32-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "64": "64-true",
}

# Flags of Trainers of earlier years, and of neighbours, with what to say today.
OF_OLD = {
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
    "auto_lr_find": "nothing yet",
    "auto_scale_batch_size": "nothing yet",
    "replace_sampler_ddp": "use_distributed_sampler=BOOL",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs=1",
    "torch_compile": "compile=True",
    "gradient_checkpointing": "activation_checkpointing=True",
}


def uses_lightning() -> bool:
    """Whether this process has imported Lightning, under one of its names."""
    return "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules


def warning_kind() -> type[Warning]:
    """The category of warnings about what may be meant: where Lightning is in use, the one that people filter there."""
    if not uses_lightning():
        return UserWarning
    from hasten.trainer.lightning import warning_kind as kind_there

    return kind_there()


def misconfigured(message: str, fix: str = "") -> HastenError:
    """The error for flags and modules that contradict themselves.

    Where Lightning is in use it is a MisconfigurationException too, so code that catches that goes on to work.
    """
    if uses_lightning():
        from hasten.trainer.lightning import misconfigured as made_misconfigured

        return made_misconfigured(message, fix)
    return HastenError(message, fix)


_ELSEWHERE = {"plugins": "hasten has no plugins; precision and strategy are flags"}


def refuse_unknown(unknown: Mapping[str, Any], trainer: type) -> None:
    """Raise for arguments that the Trainer does not have, with what was probably meant."""
    for name in unknown:
        if name in OF_OLD:
            raise _unknown(f"Trainer({name}=...) is no flag, or one of an earlier day", f"today's: {OF_OLD[name]}")
        if name in _ELSEWHERE:
            raise _unknown(f"Trainer({name}=...) is Lightning's, and not hasten's", _ELSEWHERE[name])
        known = [parameter for parameter in inspect.signature(trainer).parameters if parameter != "unknown"]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        raise _unknown(f"Trainer.__init__() got an unexpected keyword argument {name!r}", hint)


class _UnknownFlagError(HastenError, TypeError):
    """Unknown keyword arguments are TypeErrors in Python."""


def _unknown(message: str, fix: str) -> HastenError:
    return _UnknownFlagError(message, fix)


def precision_of(given: Any) -> str:
    """A precision by its full name; the short names of earlier days are understood.

    Raises:
        HastenError: There is no such precision.
    """
    if given is None:
        return "32-true"
    found = PRECISIONS.get(str(given))
    if found is None:
        close = difflib.get_close_matches(str(given), PRECISIONS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise _value_error(
            f"Precision {given!r} is invalid", f"{hint}there are: {', '.join(dict.fromkeys(PRECISIONS.values()))}"
        )
    return found


class _WrongValueError(HastenError, ValueError):
    """A value outside what a flag takes is a ValueError too."""


def _value_error(message: str, fix: str = "") -> HastenError:
    return _WrongValueError(message, fix)


def whole(name: str, value: Any, least: int, optional: bool = True) -> None:
    """Check a flag that counts something."""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        count = "must be a non-negative integer or -1" if least == -1 else f"should be an int >= {least}"
        raise misconfigured(f"`{name}` {count}, not {value!r}", "-1 means no limit" if least == -1 else "")


def refuse_class(what: str, given: Any) -> None:
    """Raise for a class where one of its objects is meant."""
    if isinstance(given, type):
        raise NotAModuleError(f"{what} is the class {given.__name__}", f"give one that is built: {given.__name__}(...)")


def batches_to_try(given: Any) -> int | bool:
    """`fast_dev_run`: a number of batches; True is one."""
    if not isinstance(given, int) or given < 0:
        raise misconfigured(f"fast_dev_run={given!r} should be >= 0", "it is a number of batches")
    return True if given == 1 else given


def share_or_count(name: str, value: Any) -> None:
    """Check a flag that limits batches: an int counts them, a float is a share of them."""
    if value is None:
        return
    fine = (isinstance(value, int) and not isinstance(value, bool) and value >= 0) or (
        isinstance(value, float) and 0.0 <= value <= 1.0
    )
    if not fine:
        raise misconfigured(
            f"You have passed invalid value {value!r} for {name}",
            "it must be a number of batches (int) or a share of them (0.0 to 1.0)",
        )


def accumulation(given: Any) -> tuple[int, dict[int, int] | None]:
    """`accumulate_grad_batches`: a number, or a schedule {epoch: number}."""
    if isinstance(given, Mapping):
        schedule = dict(given)
        for epoch, every in schedule.items():
            whole("accumulate_grad_batches: epoch", epoch, 0, optional=False)
            whole(f"accumulate_grad_batches at epoch {epoch}", every, 1, optional=False)
        return 1, schedule  # the callback that a schedule becomes sets it, epoch by epoch
    whole("accumulate_grad_batches", given, 1, optional=False)
    return given, None


class ClipAlgorithm(StrEnum):
    """Ways to clip gradients."""

    NORM = "norm"
    VALUE = "value"


def clipping(value: Any, algorithm: Any) -> None:
    """Check the two flags that clip gradients."""
    if value is not None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"`gradient_clip_val` should be an int or a float, not {value!r}")
        if value < 0:
            raise misconfigured(f"gradient_clip_val={value} is negative", "give the largest norm allowed, such as 1.0")
    if algorithm is not None and word(algorithm) not in list(ClipAlgorithm):
        raise misconfigured(f"`gradient_clip_algorithm` {algorithm} is invalid", 'there are "norm" and "value"')


def seconds(name: str, given: Any) -> float | None:
    """A duration: a timedelta, "DD:HH:MM:SS" or a dict of timedelta's arguments, in seconds."""
    if given is None:
        return None
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, Mapping):
        try:
            return timedelta(**given).total_seconds()
        except TypeError as error:
            raise misconfigured(f"{name}={dict(given)!r}: {error}", 'such as {"hours": 2, "minutes": 30}') from None
    if isinstance(given, str):
        parts = given.strip().split(":")
        if len(parts) == 4 and all(part.isdecimal() for part in parts):
            days, hours, minutes, secs = map(int, parts)
            if hours < 24 and minutes < 60 and secs < 60:
                return timedelta(days=days, hours=hours, minutes=minutes, seconds=secs).total_seconds()
    raise misconfigured(f"{name}={given!r} is no duration", 'give a timedelta, "DD:HH:MM:SS" or {"hours": 2}')


def techniques(
    flags: Mapping[str, Setting | None], plan: str | Path | Plan | None
) -> tuple[dict[str, Setting], list[str]]:
    """The techniques to install, of the plan and of the flags, and what to say about those that can do nothing here.

    Args:
        flags: Technique name -> setting, for the flags that were given; None for those that were not.
        plan: A plan, or the file it stands in.

    Raises:
        HastenError: A setting is unknown, or a flag and the plan contradict each other.
    """
    given = Plan() if plan is None else plan if isinstance(plan, Plan) else Plan.read(plan)
    check(given)
    chosen = dict(given.techniques)
    for name, setting in flags.items():
        if setting is None:
            continue
        if name in chosen and chosen[name] != setting:
            raise misconfigured(
                f"the plan says {name} = {toml_value(chosen[name])} ({given.where(name)}), the flag says"
                f" {toml_value(setting)}",
                "leave one of them out",
            )
        chosen[name] = setting
    own = {name: setting for name, setting in flags.items() if setting is not None and setting is not False}
    for name, setting in own.items():
        if wrong := CATALOGUE[name].check(setting):
            raise _value_error(f"{name}={setting!r}: {wrong}")
    machine = this_machine()
    said = remarks(given, machine)
    said += [
        f"{name}={setting!r} is of no use here: {why}"
        for name, setting in own.items()
        if (why := CATALOGUE[name].useless(setting, machine))
    ]
    return {name: setting for name, setting in chosen.items() if setting is not False}, said


NEEDS_NOTHING = {
    "no_grad_validation": "the Trainer validates without graphs anyway",
    "set_to_none": "the Trainer drops gradients anyway",
    "debug_off": "the Trainer leaves detect_anomaly and profiler to its flags",
    "allocator": "it is chosen when a process starts: use `hasten run`",
}
"""Techniques that the Trainer has built in, or that come too late in a running process."""


def said_of_plan(names: Mapping[str, Setting]) -> list[str]:
    """What to say about techniques of a plan that the Trainer does not install."""
    return [f"{name} of the plan is not installed: {NEEDS_NOTHING[name]}" for name in names if name in NEEDS_NOTHING]


Say = Callable[[str], None]


def word(given: Any) -> str:
    return str(getattr(given, "value", given)).lower()


def limit(name: str, given: int | float | None) -> int | float | None:
    """A limit of batches; by default all."""
    share_or_count(name, given)
    return 1.0 if given is None else given


def one_or_all(given: Mapping[str, Any]) -> list[str]:
    """What to say about flags that are 1 or 1.0, which are easily taken for each other."""
    said = []
    for name, value in given.items():
        if type(value) in (int, float) and value == 1:
            if name == "val_check_interval":
                meaning = "validation will run after " + ("every batch" if type(value) is int else "an epoch")
            else:
                meaning = "1 batch will be used" if type(value) is int else "100% of the batches will be used"
            said.append(f"`Trainer({name}={value})` was configured so {meaning}")
    return said


def devices(accelerator: Any, given: Any) -> None:
    """Check that there is at least one device to train on."""
    if given in (0, "0") or (isinstance(given, list | tuple) and not given):
        raise misconfigured(
            f"devices={given!r}: the value is not a valid input using accelerator={accelerator!r}",
            'give a number of at least 1, a list of GPU numbers, or "auto"',
        )


SWITCHES = (
    "benchmark",
    "inference_mode",
    "use_distributed_sampler",
    "detect_anomaly",
    "barebones",
    "sync_batchnorm",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "enable_autolog_hparams",
    "device_prefetch",
    "background_saves",
)
"""Flags that are True or False (or None, for the default)."""


def switches(given: Mapping[str, Any]) -> None:
    """Check the flags that are True or False: a text such as "no" would be taken for True."""
    for name in SWITCHES:
        if given[name] not in (True, False, None):
            raise _value_error(f"{name}={given[name]!r} must be True or False")
    if given["deterministic"] not in (True, False, None, "warn"):
        raise _value_error(f'deterministic={given["deterministic"]!r} must be True, False or "warn"')


def path(name: str, given: Any, *others: type) -> None:
    """Check a flag that names a file or folder."""
    if given is not None and not isinstance(given, (str, os.PathLike, *others)):
        raise _value_error(f"{name}={given!r} is a {type(given).__name__}, not a path")


def strategy(given: Any) -> str:
    """The strategy's name; an object of Lightning's is named by what it does."""
    if not isinstance(given, str):
        name = ""
        if uses_lightning():
            from hasten.trainer.lightning import strategy_name

            name = strategy_name(given)
        if not name:
            kind = type(given).__name__
            raise _value_error(f"strategy={kind}(...) is none of hasten's", f"there are: {', '.join(_STRATEGIES)}")
        return name
    if not re.fullmatch(r"auto|ddp(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?", given):
        close = difflib.get_close_matches(given, _STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(_STRATEGIES)}"
        raise _value_error(f"You selected an invalid strategy name: `strategy={given!r}`", hint)
    return given


_STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_fork", "ddp_spawn", "ddp_notebook")


def accelerator(given: Any) -> None:
    """Check the accelerator's name."""
    if given not in ("auto", "cpu", "gpu", "cuda"):
        raise _value_error(
            f"You selected an invalid accelerator name: `accelerator={given!r}`",
            'there are "auto", "cpu", "gpu" and "cuda": hasten trains on CPUs and NVIDIA GPUs',
        )


def val_check(given: Any, every_n_epoch: int | None) -> tuple[int | float, float | None]:
    """`val_check_interval` as a number of batches or a share, or else in seconds."""
    if given is None:
        given = 1.0
    if isinstance(given, str | timedelta | Mapping):
        return 1.0, seconds("val_check_interval", given)
    share_or_count("val_check_interval", given)
    if not given:
        raise misconfigured(
            f"val_check_interval={given!r} never comes", "to switch validation off: limit_val_batches=0"
        )
    if every_n_epoch is None and isinstance(given, float):
        raise misconfigured(
            "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS', datetime.timedelta,"
            " or dict kwargs for timedelta) when `check_val_every_n_epoch=None`.",
            f"val_check_interval={given} is a share of an epoch, and batches are counted over epochs then",
        )
    return given, None


def refuse_beside_barebones(given: dict[str, Any]) -> None:
    """`barebones` switches these off; asking for one of them beside it contradicts itself."""
    off = {
        "logger": (None, False),
        "enable_checkpointing": (None, False),
        "enable_progress_bar": (None, False),
        "enable_model_summary": (None, False),
        "log_every_n_steps": (None, 0),
        "num_sanity_val_steps": (None, 0),
        "fast_dev_run": (False,),
        "detect_anomaly": (False,),
        "profiler": (None,),
    }
    for name, allowed in off.items():
        if not any(given[name] is value or given[name] == value for value in allowed):
            raise ContradictionError(
                f"`Trainer(barebones=True, {name}={given[name]!r})` was passed: these contradict each other",
                f"drop {name}",
            )


class ContradictionError(HastenError, ValueError):
    """Two flags that contradict each other are a ValueError too."""


class NotAModuleError(HastenError, TypeError):
    """The wrong kind of thing as a model is a TypeError in Python."""


def log_name() -> str:
    """The name under which the Trainer logs: where Lightning is in use, one that its users have set up."""
    return "lightning.pytorch.trainer.trainer" if uses_lightning() else "hasten"
