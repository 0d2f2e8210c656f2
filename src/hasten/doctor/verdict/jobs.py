"""Benchmarks to run on the machine after a run, and on which of its shapes. Plain data, no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from hasten.doctor.figures import norm_of
from hasten.doctor.verdict.measure_cases import (
    TINY_OPERATORS,
    Case,
    Group,
    Job,
    aims,
    attention_shape,
    case_of,
    groups,
    type_of,
)
from hasten.evidence import Evidence, OptimizerFacts, Phase
from hasten.evidence.weigh import COMPUTE, on_gpu, seconds_of, share_of, size_of, steady_seconds

PRODUCTS = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d"})
_MANY = 3  # kinds of layer looked at for one rule
_LONG = 0.06  # seconds of a layer's forward and backward, over which fewer samples are tried
_BF16 = frozenset({"avx512_bf16", "amx_bf16"})


def jobs(evidence: Evidence) -> list[Job]:
    """Everything worth trying for this run; what may bring most comes first."""
    if steady_seconds(evidence) <= 0:
        return []
    makers = (_optimizers, _double, _precision, _channels, _attention, _odd_sizes, _switches, _bias, _batch, _tools)
    return [job for maker in makers for job in maker(evidence)]


def _job(finding: str, change: str, group: Group, before: Case, after: Case, detail: str = "") -> Job:
    more = f" and {group.others} like it" if group.others else ""
    what = f"{size_of(group.layer)}: {change}"
    times = 1.0
    if group.seconds / group.calls > _LONG and before.shape[0] > 1:
        full = before.shape[0]
        few = max(1, int(full * _LONG * group.calls / group.seconds))
        few = few - few % 8 or few
        times = full / few
        before = dataclasses.replace(before, shape=(few, *before.shape[1:]))
        after = dataclasses.replace(after, shape=(few, *after.shape[1:]))
    return Job(finding, what, before, after, f"{group.layer.path}{more}", group.calls, detail, times=times)


def _double(evidence: Evidence) -> Iterator[Job]:
    for group in groups(evidence, PRODUCTS)[:_MANY]:
        if type_of(evidence, group.layer) == "float64":
            before = case_of(evidence, group.layer)
            after = dataclasses.replace(before, dtype="float32")
            yield _job("double_precision", "computed in float32", group, before, after)


def _precision(evidence: Evidence) -> Iterator[Job]:
    machine = evidence.machine
    gpu = on_gpu(evidence)
    if not gpu and not _BF16 & set(machine.cpu_flags):
        return
    narrow = "bfloat16" if not gpu or evidence.flags.bf16 else "float16"
    for group in groups(evidence, PRODUCTS)[:_MANY]:
        if type_of(evidence, group.layer) != "float32" or group.layer.dtype not in ("float32", ""):
            continue
        before = case_of(evidence, group.layer)
        after = dataclasses.replace(before, autocast=narrow)
        yield _job("full_precision", f"computed in {narrow}", group, before, after, narrow)
        if gpu and evidence.flags.matmul_precision == "highest" and group.layer.kind == "Linear":
            after = dataclasses.replace(before, matmul_precision="high")
            yield _job("tf32_off", "computed in TF32", group, before, after)


def _channels(evidence: Evidence) -> Iterator[Job]:
    for group in groups(evidence, frozenset({"Conv2d"}))[: _MANY + 1]:
        if group.layer.channels_last or len(group.layer.shape) != 4:
            continue
        norm = "BatchNorm2d" if norm_of(evidence, group.layer).startswith("BatchNorm") else ""
        before = dataclasses.replace(case_of(evidence, group.layer), norm=norm)
        after = dataclasses.replace(before, channels_last=True)
        yield _job("channels_first", "channels last", group, before, after)


def _switches(evidence: Evidence) -> Iterator[Job]:
    """cuDNN's choice of kernels."""
    if not on_gpu(evidence) or evidence.flags.cudnn_benchmark or evidence.flags.deterministic:
        return
    for group in groups(evidence, PRODUCTS - {"Linear"})[:_MANY]:
        before = case_of(evidence, group.layer)
        after = dataclasses.replace(before, cudnn_benchmark=True)
        yield _job("cudnn_benchmark_off", "cuDNN's fastest kernel", group, before, after)


def _odd_sizes(evidence: Evidence) -> Iterator[Job]:
    kinds = PRODUCTS | {"Embedding", "LSTM", "GRU"}
    found = 0
    for group in groups(evidence, kinds):
        layer = group.layer
        for name in ("out_features", "in_features", "out_channels", "in_channels", "hidden_size", "num_embeddings"):
            size, targets = layer.sizes.get(name, 0), aims(evidence, type_of(evidence, layer))
            if size < 32 or size % targets[0] == 0 or layer.sizes.get("groups", 1) > 1:
                continue
            found += 1
            rounded = dict.fromkeys(-(-size // aim) * aim for aim in (targets if found <= 2 else targets[:1]))
            for wanted in [one for one in rounded if one <= 1.13 * size]:
                before = case_of(evidence, layer)
                change = f"{name} {size} -> {wanted}"
                yield _job("odd_sizes", change, group, before, _resized(before, name, wanted), f"{name}={wanted}")
        if found >= _MANY:
            return


def _resized(case: Case, name: str, size: int) -> Case:
    """The same layer with another size, and an input that fits it."""
    shape = case.shape
    if name == "in_features":
        shape = (*shape[:-1], size)
    elif name == "in_channels":
        shape = (shape[0], size, *shape[2:])
    return dataclasses.replace(case, sizes={**case.sizes, name: size}, shape=shape)


def _batch(evidence: Evidence) -> Iterator[Job]:
    """The batch size, rounded to the nearest multiple of 8, over the costliest layers.

    Rounded up, the bigger batch must take no more time than the smaller one took; else a batch that is merely bigger
    would look better.
    """
    loader = evidence.train_loader
    size = loader.batch_size if loader else None
    if not size or size < 16 or size % 8 == 0:
        return
    near = size - size % 8 if size % 8 <= 4 else size + 8 - size % 8
    for group in groups(evidence, PRODUCTS)[:_MANY]:
        layer = group.layer
        if layer.shape[0] != size or group.seconds > _LONG * group.calls:
            continue
        before = case_of(evidence, layer)
        after = dataclasses.replace(before, shape=(near, *layer.shape[1:]))
        job = _job("odd_sizes", f"batch {size} -> {near}", group, before, after, f"batch_size={near}")
        yield dataclasses.replace(job, scale=max(1.0, size / near))


def _bias(evidence: Evidence) -> Iterator[Job]:
    biased = [group for group in groups(evidence, PRODUCTS) if group.layer.bias]
    for group in [g for g in biased if norm_of(evidence, g.layer).startswith(("BatchNorm", "SyncBatchNorm"))][:2]:
        norm = f"BatchNorm{group.layer.kind[4]}d" if group.layer.kind.startswith("Conv") else "BatchNorm1d"
        if norm == "BatchNorm1d" and group.layer.kind == "Linear" and len(group.layer.shape) != 2:
            continue
        before = dataclasses.replace(case_of(evidence, group.layer), norm=norm)
        yield _job("bias_before_norm", "without its bias", group, before, dataclasses.replace(before, bias=False))


def _optimizers(evidence: Evidence) -> Iterator[Job]:
    share = share_of(evidence, seconds_of(evidence, Phase.OPTIMIZER))
    if share < 0.01:
        return
    for optimizer in evidence.optimizers:
        if not optimizer.fusable or optimizer.fused or not optimizer.shapes or not optimizer.steps:
            continue
        shapes, options = _some(optimizer), _options(optimizer)
        before = Case(optimizer.name, parameters=shapes, foreach=optimizer.foreach, options=options)
        after = dataclasses.replace(before, fused=True, foreach=None)
        what = f"{optimizer.name} on {optimizer.parameters} tensors: fused"
        calls = optimizer.steps / max(1, evidence.steps)
        yield Job("per_tensor_optimizer", what, before, after, optimizer.where, calls)


def _options(optimizer: OptimizerFacts) -> dict[str, bool | float]:
    kept = ("momentum", "weight_decay", "amsgrad", "nesterov")
    return {name: value for name in kept if not isinstance(value := optimizer.options.get(name, ""), str)}


def _some(optimizer: OptimizerFacts) -> tuple[tuple[int, ...], ...]:
    """Shapes of the parameters; where there are many numbers in them, every so manieth, so that time and memory do."""
    every = 1
    while sum(map(math.prod, optimizer.shapes[::every])) > 12_000_000 and every < len(optimizer.shapes):
        every += 1
    return optimizer.shapes[::every]


def _attention(evidence: Evidence) -> Iterator[Job]:
    for event in evidence.events_of("attention")[:2]:
        shape = attention_shape(event.detail, evidence.layers)
        if not shape or not event.steps:
            continue
        autocast = next((model.autocast for model in evidence.models if model.autocast), "")
        case = Case("attention", shape=shape, autocast=autocast)
        words = " x ".join(map(str, shape))
        after = dataclasses.replace(case, kind="sdpa")
        calls = event.count / event.steps
        yield Job("attention_by_hand", f"attention of {words}", case, after, event.where, calls)


def _tools(evidence: Evidence) -> Iterator[Job]:
    """Try what a debug tool costs an operator, and what an operator costs that has next to nothing to do."""
    tiny, one = Case("tiny", shape=(8, 8)), 1 / TINY_OPERATORS
    calls = evidence.sampled.calls if evidence.sampled else 0.0
    if evidence.flags.anomaly or evidence.events_of("anomaly"):
        before = dataclasses.replace(tiny, anomaly=True)
        yield Job("debug_tools_on", "an operator without anomaly detection", before, tiny, "anomaly", calls, times=one)
    if evidence.flags.profiler or evidence.events_of("profiler"):
        before = dataclasses.replace(tiny, profiler=True)
        yield Job("debug_tools_on", "an operator without the profiler", before, tiny, "profiler", calls, times=one)
    compute = seconds_of(evidence, *COMPUTE)
    if calls and compute / calls < 40e-6:
        yield Job("launch_bound", "an operator on 64 numbers", tiny, tiny, "", calls, times=one)
