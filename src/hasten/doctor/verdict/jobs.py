"""Choose which changes to benchmark on the machine after a run, and with which of its shapes. Plain data, no torch.

Each maker (`_precision`, `_channels`...) belongs to one finding: it looks for layers, optimizers or operators that the
finding could be about, and yields a `Job` with the case as it ran (`before`) and with the change (`after`). `measure`
times the jobs; the findings read the result from `Evidence.measured`.
"""

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
    attention_shape,
    case_of,
    groups,
    preferred_multiples,
    type_of,
)
from hasten.evidence import Evidence, OptimizerFacts, Phase
from hasten.evidence.weigh import COMPUTE, on_gpu, seconds_of, share_of, size_of, steady_seconds

PRODUCTS = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d"})
_MOST_GROUPS = 3  # groups of layers to try for one finding
_LONG = 0.06  # seconds of a layer's forward and backward from which it is tried on fewer samples
_BF16 = frozenset({"avx512_bf16", "amx_bf16"})  # CPU flags; without one, bfloat16 is emulated and slower


def jobs(evidence: Evidence) -> list[Job]:
    """Return all changes worth trying for this run; those that may save most come first."""
    if steady_seconds(evidence) <= 0:
        return []
    makers = (_optimizers, _double, _precision, _channels, _attention, _odd_sizes, _switches, _bias, _batch, _tools)
    return [job for maker in makers for job in maker(evidence)]


def _job(finding: str, change: str, group: Group, before: Case, after: Case, detail: str = "") -> Job:
    """Return a job for a group of layers; if one call takes long, it runs on a part of the batch only."""
    suffix = f" and {group.others} like it" if group.others else ""
    what = f"{size_of(group.layer)}: {change}"
    time_factor = 1.0
    if group.seconds / group.calls > _LONG and before.shape[0] > 1:
        full = before.shape[0]
        reduced = max(1, int(full * _LONG * group.calls / group.seconds))
        # A multiple of 8, so that the smaller batch does not itself get slower kernels.
        reduced = reduced - reduced % 8 or reduced
        time_factor = full / reduced
        before = dataclasses.replace(before, shape=(reduced, *before.shape[1:]))
        after = dataclasses.replace(after, shape=(reduced, *after.shape[1:]))
    return Job(
        finding, what, before, after, f"{group.layer.path}{suffix}", group.calls, detail, time_factor=time_factor
    )


def _double(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that compute float64 layers in float32."""
    for group in groups(evidence, PRODUCTS)[:_MOST_GROUPS]:
        if type_of(evidence, group.layer) == "float64":
            before = case_of(evidence, group.layer)
            after = dataclasses.replace(before, dtype="float32")
            yield _job("double_precision", "computed in float32", group, before, after)


def _precision(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that compute float32 layers in bfloat16, float16 or TF32, whichever the device supports."""
    machine = evidence.machine
    gpu = on_gpu(evidence)
    if not gpu and not _BF16 & set(machine.cpu_flags):
        return
    narrow = "bfloat16" if not gpu or evidence.flags.bf16 else "float16"
    for group in groups(evidence, PRODUCTS)[:_MOST_GROUPS]:
        if type_of(evidence, group.layer) != "float32" or group.layer.dtype not in ("float32", ""):
            continue
        before = case_of(evidence, group.layer)
        after = dataclasses.replace(before, autocast=narrow)
        yield _job("full_precision", f"computed in {narrow}", group, before, after, narrow)
        if gpu and evidence.flags.matmul_precision == "highest" and group.layer.kind == "Linear":
            after = dataclasses.replace(before, matmul_precision="high")
            yield _job("tf32_off", "computed in TF32", group, before, after)


def _channels(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that lay out 2-D convolutions in the channels-last memory format, with their BatchNorm if any."""
    for group in groups(evidence, frozenset({"Conv2d"}))[: _MOST_GROUPS + 1]:
        if group.layer.channels_last or len(group.layer.shape) != 4:
            continue
        norm = "BatchNorm2d" if norm_of(evidence, group.layer).startswith("BatchNorm") else ""
        before = dataclasses.replace(case_of(evidence, group.layer), norm=norm)
        after = dataclasses.replace(before, channels_last=True)
        yield _job("channels_first", "channels last", group, before, after)


def _switches(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that let cuDNN benchmark its kernels for a convolution."""
    if not on_gpu(evidence) or evidence.flags.cudnn_benchmark or evidence.flags.deterministic:
        return
    for group in groups(evidence, PRODUCTS - {"Linear"})[:_MOST_GROUPS]:
        before = case_of(evidence, group.layer)
        after = dataclasses.replace(before, cudnn_benchmark=True)
        yield _job("cudnn_benchmark_off", "cuDNN's fastest kernel", group, before, after)


def _odd_sizes(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that round a layer's size up to a multiple that the device computes faster.

    The first two sizes are tried with every multiple of `preferred_multiples`, later ones with the smallest only, to
    save time. Sizes that would grow by more than 13 % are not tried.
    """
    layer_kinds = PRODUCTS | {"Embedding", "LSTM", "GRU"}
    sizes_tried = 0
    for group in groups(evidence, layer_kinds):
        layer = group.layer
        for name in ("out_features", "in_features", "out_channels", "in_channels", "hidden_size", "num_embeddings"):
            size, multiples = layer.sizes.get(name, 0), preferred_multiples(evidence, type_of(evidence, layer))
            if size < 32 or size % multiples[0] == 0 or layer.sizes.get("groups", 1) > 1:
                continue
            sizes_tried += 1
            rounded = dict.fromkeys(
                -(-size // multiple) * multiple for multiple in (multiples if sizes_tried <= 2 else multiples[:1])
            )
            for new_size in [larger for larger in rounded if larger <= 1.13 * size]:
                before = case_of(evidence, layer)
                change = f"{name} {size} -> {new_size}"
                yield _job("odd_sizes", change, group, before, _resized(before, name, new_size), f"{name}={new_size}")
        if sizes_tried >= _MOST_GROUPS:
            return


def _resized(case: Case, name: str, size: int) -> Case:
    """Return the same layer with another size, and an input that fits it."""
    shape = case.shape
    if name == "in_features":
        shape = (*shape[:-1], size)
    elif name == "in_channels":
        shape = (shape[0], size, *shape[2:])
    return dataclasses.replace(case, sizes={**case.sizes, name: size}, shape=shape)


def _batch(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that round the batch size to the nearest multiple of 8, for the costliest layers.

    A smaller batch is compared per sample (`after_factor`). A larger batch is not: it must take no more time than the
    smaller batch as a whole, since per sample any larger batch tends to look faster.
    """
    loader = evidence.train_loader
    size = loader.batch_size if loader else None
    if not size or size < 16 or size % 8 == 0:
        return
    rounded_size = size - size % 8 if size % 8 <= 4 else size + 8 - size % 8
    for group in groups(evidence, PRODUCTS)[:_MOST_GROUPS]:
        layer = group.layer
        if layer.shape[0] != size or group.seconds > _LONG * group.calls:
            continue
        before = case_of(evidence, layer)
        after = dataclasses.replace(before, shape=(rounded_size, *layer.shape[1:]))
        job = _job("odd_sizes", f"batch {size} -> {rounded_size}", group, before, after, f"batch_size={rounded_size}")
        yield dataclasses.replace(job, after_factor=max(1.0, size / rounded_size))


def _bias(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that leave out the bias of layers whose output goes into a BatchNorm, which cancels it."""
    biased = [group for group in groups(evidence, PRODUCTS) if group.layer.bias]
    for group in [g for g in biased if norm_of(evidence, g.layer).startswith(("BatchNorm", "SyncBatchNorm"))][:2]:
        norm = f"BatchNorm{group.layer.kind[4]}d" if group.layer.kind.startswith("Conv") else "BatchNorm1d"
        if norm == "BatchNorm1d" and group.layer.kind == "Linear" and len(group.layer.shape) != 2:
            continue  # BatchNorm1d takes the channels from dimension 1, and a Linear has them in the last
        before = dataclasses.replace(case_of(evidence, group.layer), norm=norm)
        yield _job("bias_before_norm", "without its bias", group, before, dataclasses.replace(before, bias=False))


def _optimizers(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that use the fused kernel of an optimizer, if the optimizer takes 1 % of the step or more."""
    share = share_of(evidence, seconds_of(evidence, Phase.OPTIMIZER))
    if share < 0.01:
        return
    for optimizer in evidence.optimizers:
        if not optimizer.fusable or optimizer.fused or not optimizer.shapes or not optimizer.steps:
            continue
        shapes, options = _shapes(optimizer), _options(optimizer)
        before = Case(optimizer.name, parameters=shapes, foreach=optimizer.foreach, options=options)
        after = dataclasses.replace(before, fused=True, foreach=None)
        what = f"{optimizer.name} on {optimizer.parameters} tensors: fused"
        calls = optimizer.steps / max(1, evidence.steps)
        yield Job("per_tensor_optimizer", what, before, after, optimizer.where, calls)


def _options(optimizer: OptimizerFacts) -> dict[str, bool | float]:
    """Return the options that change how much an optimizer computes; values kept as text are left out."""
    relevant = ("momentum", "weight_decay", "amsgrad", "nesterov")
    return {name: value for name in relevant if not isinstance(value := optimizer.options.get(name, ""), str)}


def _shapes(optimizer: OptimizerFacts) -> tuple[tuple[int, ...], ...]:
    """Return the parameters' shapes; above 12 million numbers only every n-th, to limit the trial's time and memory."""
    stride = 1
    while sum(map(math.prod, optimizer.shapes[::stride])) > 12_000_000 and stride < len(optimizer.shapes):
        stride += 1
    return optimizer.shapes[::stride]


def _attention(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that replace the script's own attention by `scaled_dot_product_attention`."""
    for event in evidence.events_of("attention")[:2]:
        shape = attention_shape(event.detail, evidence.layers)
        if not shape or not event.steps:
            continue
        autocast = next((model.autocast for model in evidence.models if model.autocast), "")
        case = Case("attention", shape=shape, autocast=autocast)
        sizes = " x ".join(map(str, shape))
        after = dataclasses.replace(case, kind="sdpa")
        calls = event.count / event.steps
        yield Job("attention_by_hand", f"attention of {sizes}", case, after, event.where, calls)


def _tools(evidence: Evidence) -> Iterator[Job]:
    """Yield jobs that time the cost of a debug tool per operator, and of an operator that computes almost nothing."""
    tiny, time_factor = Case("tiny", shape=(8, 8)), 1 / TINY_OPERATORS
    calls = evidence.sampled.calls if evidence.sampled else 0.0
    if evidence.flags.anomaly or evidence.events_of("anomaly"):
        before = dataclasses.replace(tiny, anomaly=True)
        yield Job(
            "debug_tools_on",
            "an operator without anomaly detection",
            before,
            tiny,
            "anomaly",
            calls,
            time_factor=time_factor,
        )
    if evidence.flags.profiler or evidence.events_of("profiler"):
        before = dataclasses.replace(tiny, profiler=True)
        yield Job(
            "debug_tools_on",
            "an operator without the profiler",
            before,
            tiny,
            "profiler",
            calls,
            time_factor=time_factor,
        )
    compute = seconds_of(evidence, *COMPUTE)
    # Before and after are the same case: the finding only needs the seconds of such an operator. A step with longer
    # operators on average cannot spend much of its time on starting them.
    if calls and compute / calls < 40e-6:
        yield Job("launch_bound", "an operator on 64 numbers", tiny, tiny, "", calls, time_factor=time_factor)
