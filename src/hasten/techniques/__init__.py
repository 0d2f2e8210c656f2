"""The catalogue of techniques, and the check of a plan against it."""

from __future__ import annotations

import difflib

from hasten.errors import HastenError
from hasten.evidence import Machine
from hasten.plan import Plan, did_you_mean
from hasten.techniques.base import (
    Choices,
    Effect,
    Liveness,
    Refusal,
    Resource,
    Technique,
    build,
    overrides,
    toml_value,
)
from hasten.techniques.compute.attention import Attention
from hasten.techniques.compute.channels_last import ChannelsLast
from hasten.techniques.compute.compile import Compile
from hasten.techniques.compute.cpu_threads import CpuThreads
from hasten.techniques.compute.cudnn_benchmark import CudnnBenchmark
from hasten.techniques.compute.debug_off import DebugOff
from hasten.techniques.compute.fp8 import Fp8
from hasten.techniques.compute.fused_optimizer import FusedOptimizer
from hasten.techniques.compute.matmul_precision import MatmulPrecision
from hasten.techniques.compute.precision import Precision
from hasten.techniques.convergence.batch_scale import BatchScale
from hasten.techniques.convergence.lr_scale import LrScale
from hasten.techniques.convergence.schedule import Schedule
from hasten.techniques.data.batched_fetch import BatchedFetch
from hasten.techniques.data.loader_workers import LoaderWorkers
from hasten.techniques.data.read_ahead import ReadAhead
from hasten.techniques.data.sample_cache import SampleCache
from hasten.techniques.memory.activation_checkpointing import ActivationCheckpointing
from hasten.techniques.memory.activation_offload import ActivationOffload
from hasten.techniques.memory.allocator import Allocator
from hasten.techniques.memory.chunked_loss import ChunkedLoss
from hasten.techniques.memory.host_embeddings import HostEmbeddings
from hasten.techniques.memory.no_grad_validation import NoGradValidation
from hasten.techniques.memory.optimizer_in_backward import OptimizerInBackward
from hasten.techniques.memory.set_to_none import SetToNone
from hasten.techniques.transfer.device_prefetch import DevicePrefetch
from hasten.techniques.transfer.pin_memory import PinMemory

CATALOGUE: dict[str, type[Technique]] = {
    technique.name: technique
    for technique in (
        SampleCache,
        BatchedFetch,
        LoaderWorkers,
        ReadAhead,
        PinMemory,
        DevicePrefetch,
        DebugOff,
        NoGradValidation,
        Allocator,
        CpuThreads,
        CudnnBenchmark,
        MatmulPrecision,
        FusedOptimizer,
        SetToNone,
        Precision,
        Fp8,
        ChannelsLast,
        Attention,
        ActivationCheckpointing,
        ActivationOffload,
        HostEmbeddings,
        ChunkedLoss,
        BatchScale,
        LrScale,
        Schedule,
        OptimizerInBackward,
        Compile,
    )
}

__all__ = [
    "CATALOGUE",
    "Choices",
    "Effect",
    "Liveness",
    "Refusal",
    "Resource",
    "Technique",
    "build",
    "check",
    "overrides",
    "remarks",
    "toml_value",
]


def check(plan: Plan) -> None:
    """Check a plan's names and settings.

    Raises:
        HastenError: With `file:line` and what was probably meant.
    """
    for name, setting in plan.techniques.items():
        technique = CATALOGUE.get(name)
        if technique is None:
            hint = did_you_mean(name, CATALOGUE) or "`hasten techniques` lists them"
            raise HastenError(f"{plan.where(name)}: unknown technique {name!r}", hint)
        if setting is False:
            continue
        if wrong := technique.check(setting):
            hint = ""
            if isinstance(setting, str) and isinstance(technique.values, tuple):
                words = [value for value in technique.values if isinstance(value, str)]
                close = [word for word in words if word.startswith(setting)]  # "bf16" is "bf16-mixed", not "bf16-true"
                close = close or difflib.get_close_matches(setting, words, n=1)
                hint = f"did you mean {close[0]!r}?" if close else ""
            raise HastenError(f"{plan.where(name)}: {name} = {toml_value(setting)}: {name} {wrong}", hint)
        if why := technique.clashes(setting, plan.techniques):
            raise HastenError(f"{plan.where(name)}: {name} cannot act here: {why}", "leave one of them out")


def remarks(plan: Plan, machine: Machine) -> list[str]:
    """Settings of a plan that are harmless but can do nothing here, each with the reason."""
    lines = []
    for name, setting in plan.techniques.items():
        if setting is False:
            lines.append(f"{plan.where(name)}: {name} = false installs nothing; the line can go")
        elif why := CATALOGUE[name].useless(setting, machine):
            lines.append(f"{plan.where(name)}: {name} is of no use here: {why}")
    return lines
