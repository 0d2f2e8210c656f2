"""Translate Lightning's strategy objects to hasten's strategies."""

from __future__ import annotations

from typing import Any

from hasten.errors import HastenError
from hasten.trainer.lightning import names

_STARTS = {"popen": "ddp", "spawn": "ddp_spawn", "fork": "ddp_fork", "forkserver": "ddp_spawn"}
_DDP = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")


def strategy(instance: Any) -> tuple[str, dict[str, Any]] | None:
    """Return a strategy's kind ("auto", "ddp", "fsdp") and options; None if hasten has no such strategy.

    Raises:
        HastenError: An option has no counterpart here, and leaving it out would change the training.
    """
    kind = type(instance).__name__
    if kind == "SingleDeviceStrategy":
        return "auto", {}
    if kind == "DDPStrategy":
        return "ddp", _of_ddp(instance)
    return ("fsdp", _of_fsdp(instance)) if kind == "FSDPStrategy" else None


def _of_ddp(lightning_strategy: Any) -> dict[str, Any]:
    """Return the options of a DDPStrategy."""
    options = dict(getattr(lightning_strategy, "_ddp_kwargs", {}))
    if unknown := [name for name in options if name not in _DDP]:
        raise _without("DDPStrategy", unknown[0])
    for attribute, name in (("_ddp_comm_wrapper", "ddp_comm_wrapper"), ("_model_averaging_period",) * 2):
        if getattr(lightning_strategy, attribute, None) is not None:
            raise _without("DDPStrategy", name.strip("_"))
    for name in ("ddp_comm_hook", "ddp_comm_state"):
        if (value := getattr(lightning_strategy, f"_{name}", None)) is not None:
            options[name] = value
    return {**options, "start": _STARTS[getattr(lightning_strategy, "_start_method", "popen")]}


def _of_fsdp(lightning_strategy: Any) -> dict[str, Any]:
    """Return the options of an FSDPStrategy."""
    kwargs = dict(lightning_strategy.kwargs)
    sharding = getattr(lightning_strategy.sharding_strategy, "name", lightning_strategy.sharding_strategy)
    if sharding not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise _without("FSDPStrategy", f"sharding_strategy={sharding!r}")
    if getattr(lightning_strategy.cpu_offload, "offload_params", False):
        raise _without("FSDPStrategy", "cpu_offload")
    if lightning_strategy._activation_checkpointing_kwargs:
        raise _without(
            "FSDPStrategy", "activation_checkpointing_policy", 'say Trainer(activation_checkpointing="Block")'
        )
    policy = kwargs.pop("auto_wrap_policy", None)
    blocks = getattr(policy, "_module_classes", None)
    if policy is not None and not blocks:
        raise _without("FSDPStrategy", "auto_wrap_policy", "give a set of classes")
    for name in ("use_orig_params", "forward_prefetch", "limit_all_gathers", "sync_module_states"):
        kwargs.pop(name, None)  # they do not change the result, and FSDP2 decides for itself
    if kwargs:
        raise _without("FSDPStrategy", next(iter(kwargs)))
    options: dict[str, Any] = {} if sharding == "FULL_SHARD" else {"reshard_after_forward": False}
    if blocks:
        options["blocks"] = list(blocks)
    if lightning_strategy.mixed_precision is not None:
        options["mp_policy"] = _policy(lightning_strategy.mixed_precision)
    return options


def _policy(mixed_precision: Any) -> Any:
    """Return FSDP2's mixed-precision policy for FSDP1's. FSDP2 does not cast buffers."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if mixed_precision.buffer_dtype is not None:
        raise _without("FSDPStrategy", "mixed_precision=MixedPrecision(buffer_dtype=...)")
    cast = bool(mixed_precision.cast_forward_inputs)
    return MixedPrecisionPolicy(mixed_precision.param_dtype, mixed_precision.reduce_dtype, cast_forward_inputs=cast)


def _without(kind: str, option: str, instead: str = "") -> HastenError:
    """Return the error for an option without a counterpart."""
    return names.misconfigured(
        f"{kind}({option}) has no counterpart in hasten, and without it the training would be another one",
        instead or f"leave it out, or see hasten.strategies.{kind}",
    )
