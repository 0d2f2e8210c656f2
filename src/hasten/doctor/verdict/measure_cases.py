"""Describe what `measure_process` builds and times: layers as they ran, optimizers, attention. Plain data, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hasten.evidence import Evidence, Layer
from hasten.evidence.weigh import on_gpu, share_of

NO_TIME = "no time was left for it"  # why a change was not tried
TINY_OPERATORS = 120  # operators in one call of the case "tiny", forward and backward together


@dataclass(frozen=True)
class Case:
    """Something that can be built and timed.

    Attributes:
        kind: Name of a class in torch.nn or torch.optim; "attention" (matrix products and a softmax) or "sdpa"
            (`scaled_dot_product_attention`); "tiny" for a sequence of tiny operators.
        sizes, bias, shape: As in `Layer`. For attention the shape is that of the query: batch, heads, length, width.
        dtype: Dtype of its weights and its input.
        first: Whether its input is the batch itself, which needs no gradient.
        autocast: Dtype for autocast, or "".
        channels_last: Whether weights and input are in the channels-last memory format.
        norm: Class of a normalisation layer after it, or "".
        matmul_precision, cudnn_benchmark, anomaly, profiler: Global settings while it runs.
        parameters: Shapes of the parameters that an optimizer updates; `fused`, `foreach` and `options` are the
            optimizer's arguments.
    """

    kind: str
    sizes: dict[str, int] = field(default_factory=dict)
    bias: bool = True
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    first: bool = False
    autocast: str = ""
    channels_last: bool = False
    norm: str = ""
    matmul_precision: str = "highest"
    cudnn_benchmark: bool = False
    anomaly: bool = False
    profiler: bool = False
    parameters: tuple[tuple[int, ...], ...] = ()
    fused: bool = False
    foreach: bool | None = None
    options: dict[str, bool | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One change to try.

    Attributes:
        finding, what, where, calls, detail: As in `Measurement`.
        before, after: The cases to time.
        after_factor: Factor for the seconds of `after`, more than 1 if it does less work than `before`.
        time_factor: Factor for the seconds of both, from the timed call to one call in the run: more than 1 if only a
            part of the batch is timed, less than 1 if one timed call runs many operators.
    """

    finding: str
    what: str
    before: Case
    after: Case
    where: str = ""
    calls: float = 1.0
    detail: str = ""
    after_factor: float = 1.0
    time_factor: float = 1.0


@dataclass(frozen=True)
class Group:
    """Identical layers: one of them, and the number of others.

    `calls` and `seconds` (of forward and backward) are per step, for all of them together.
    """

    layer: Layer
    others: int
    calls: float
    seconds: float


def groups(evidence: Evidence, kinds: frozenset[str]) -> list[Group]:
    """Return the layers of these classes, grouped if identical, the costliest group first.

    Groups that were timed and take less than 1 % of the step are left out, since no change to them can matter.
    """
    identical: dict[object, list[Layer]] = {}
    for layer in evidence.layers:
        if layer.kind in kinds and _complete(layer):
            key = (layer.kind, tuple(layer.sizes.items()), layer.shape, layer.bias, bool(layer.normed_by))
            identical.setdefault(key, []).append(layer)
    matching = []
    for layers in identical.values():
        # Only forwards are timed; a backward takes about twice as long, with two matrix products for the forward's one.
        seconds = 3 * sum(layer.seconds for layer in layers)
        if not seconds or share_of(evidence, seconds) >= 0.01:
            calls = sum(layer.calls or 1.0 for layer in layers)
            matching.append(Group(layers[0], len(layers) - 1, calls, seconds))
    return sorted(matching, key=lambda group: (-group.seconds, -_work(group.layer)))


def preferred_multiples(evidence: Evidence, dtype: str) -> tuple[int, ...]:
    """Return the multiples that sizes should be rounded to on this device and in this dtype, the smallest first.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, table 1: tensor cores need multiples of 16 bytes, and
    an A100 or later is fastest with 128 bytes. On a CPU, 64 bytes are one vector and one cache line, and its matrix
    products are mostly computed in blocks of 64 numbers.
    """
    wide = dtype in ("bfloat16", "float16")
    if on_gpu(evidence):
        new = re.search(r"\b(A100|A30|H100|H200|GH200|H800|A800|B100|B200|GB200)\b", " ".join(evidence.machine.gpus))
        return (8, 64) if wide and new else (8,) if wide else (4, 32) if new else (4,)
    return (8, 32) if wide else (8, 16, 64)


def type_of(evidence: Evidence, layer: Layer) -> str:
    """Return the dtype that a layer computes in: autocast's, if the script uses autocast."""
    autocast = next((model.autocast for model in evidence.models if model.autocast), "")
    name = autocast or layer.dtype
    return name if name in ("bfloat16", "float16", "float64") else "float32"


def case_of(evidence: Evidence, layer: Layer) -> Case:
    """Return the case of a layer as it ran."""
    batches = {shape for shape, _ in evidence.inputs.shapes} if evidence.inputs else set()
    dtype = layer.dtype if layer.dtype in ("float32", "bfloat16", "float16", "float64") else "float32"
    narrow = type_of(evidence, layer)
    return Case(
        layer.kind, dict(layer.sizes), layer.bias, layer.shape, dtype,
        # Whether its input is the batch is a guess from the shape: a layer whose input merely has a batch's shape is
        # timed without the gradient of its input, before and after alike.
        first=layer is evidence.layers[0] or layer.shape in batches,
        autocast=narrow if narrow != dtype else "",
        channels_last=layer.channels_last,
        matmul_precision=evidence.flags.matmul_precision,
        cudnn_benchmark=evidence.flags.cudnn_benchmark,
    )  # fmt: skip


def attention_shape(detail: str, layers: Sequence[Layer] = ()) -> tuple[int, ...]:
    """Return the query's shape (batch, heads, length, width), from the shape of a softmax; () if that has another form.

    The softmax does not show the width of a head. It is the input width of a linear layer, divided by the number of
    heads: of the first one under the event's path, else of the first whose input has the same batch and length. Without
    such a layer, assume 64 per head.

    Args:
        detail: An event's detail: "batch x heads x length x length in path", or without heads.
        layers: The run's layers.

    >>> attention_shape("8 x 6 x 64 x 64")
    (8, 6, 64, 64)
    """
    sizes, _, path = detail.partition(" in ")
    scores = tuple(map(int, re.findall(r"\d+", sizes)))
    if len(scores) == 3:
        scores = (scores[0], 1, *scores[1:])
    if len(scores) != 4 or 0 in scores:
        return ()
    linear = [
        layer for layer in layers if layer.kind == "Linear" and layer.sizes.get("in_features", 1) % scores[1] == 0
    ]
    in_module = [layer for layer in linear if path and layer.path.startswith(f"{path}.")]
    same_batch = [layer for layer in linear if layer.shape[:-1] == (scores[0], scores[2])]
    width = (in_module or same_batch)[0].sizes["in_features"] // scores[1] if in_module or same_batch else 64
    return (*scores[:3], width)


def _complete(layer: Layer) -> bool:
    """Return whether enough is known of a layer to rebuild it."""
    sizes, shape = layer.sizes, layer.shape
    if not shape or 0 in shape:
        return False
    if layer.kind == "Linear":
        return "out_features" in sizes and shape[-1] == sizes.get("in_features")
    if layer.kind == "Embedding":
        return {"num_embeddings", "embedding_dim"} <= sizes.keys()
    if layer.kind in ("LSTM", "GRU"):
        return "hidden_size" in sizes and len(shape) == 3
    return "out_channels" in sizes and len(shape) == int(layer.kind[4]) + 2 and shape[1] == sizes.get("in_channels")


def _work(layer: Layer) -> int:
    """Return an estimate of a layer's multiplications, up to a factor, to sort layers that were not timed."""
    sizes = (layer.sizes.get(name, 1) for name in ("in_features", "out_features", "in_channels", "out_channels"))
    return math.prod(sizes) * math.prod(layer.shape) // max(1, layer.shape[-1] if layer.kind == "Linear" else 1)
