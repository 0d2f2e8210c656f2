"""Cases that can be built and timed: a layer as it ran, an optimizer, and what of a run is worth building. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hasten.evidence import Evidence, Layer
from hasten.evidence.weigh import on_gpu, share_of

NO_TIME = "no time was left for it"  # why a change was not tried
TINY_OPERATORS = 120  # that one call of the case "tiny" runs: forward and backward


@dataclass(frozen=True)
class Case:
    """Something that can be built and timed.

    Attributes:
        kind: A class of torch.nn or torch.optim; "attention" by hand or "sdpa"; "tiny" for a row of tiny operators.
        sizes, bias, shape: As in `Layer`. For attention the shape is that of the query: batch, heads, length, width.
        dtype: Of its weights and its input.
        first: Its input is the batch, which needs no gradient.
        autocast: Type to compute in, or "".
        channels_last: Weights and input lie so.
        norm: Class of a normalisation behind it, or "".
        matmul_precision, cudnn_benchmark, anomaly, profiler: Global switches while it runs.
        parameters: Shapes that an optimizer updates; `fused`, `foreach` and `options` are what it is built with.
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
        before, after: What to time.
        scale: What one of `after`'s seconds counts, where it does less work than `before`.
        times: How many of what is timed make one of the run's: more where its whole batch would take too long, less
            where many of it are timed at once.
    """

    finding: str
    what: str
    before: Case
    after: Case
    where: str = ""
    calls: float = 1.0
    detail: str = ""
    scale: float = 1.0
    times: float = 1.0


@dataclass(frozen=True)
class Group:
    """Layers that are alike. `calls` and `seconds` (of forward and backward) are per step, of all together."""

    layer: Layer
    others: int
    calls: float
    seconds: float


def groups(evidence: Evidence, kinds: frozenset[str]) -> list[Group]:
    """The layers of these classes, those that are alike as one, the costliest first.

    Layers that were timed and take less than 1 % of the step are left out: nothing about them can matter.
    """
    alike: dict[object, list[Layer]] = {}
    for layer in evidence.layers:
        if layer.kind in kinds and _complete(layer):
            key = (layer.kind, tuple(layer.sizes.items()), layer.shape, layer.bias, bool(layer.normed_by))
            alike.setdefault(key, []).append(layer)
    found = []
    for layers in alike.values():
        seconds = 3 * sum(layer.seconds for layer in layers)  # the backward makes two products for the forward's one
        if not seconds or share_of(evidence, seconds) >= 0.01:
            calls = sum(layer.calls or 1.0 for layer in layers)
            found.append(Group(layers[0], len(layers) - 1, calls, seconds))
    return sorted(found, key=lambda group: (-group.seconds, -_work(group.layer)))


def aims(evidence: Evidence, dtype: str) -> tuple[int, ...]:
    """Multiples that sizes shall be of, on this device and in this type; the mildest first.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, table 1: 16 bytes are what tensor cores need,
    128 bytes what an A100 or later is best with. On a CPU 64 bytes are one vector and one cache line; 64 numbers are
    what the blocks of its matrix products are mostly made of.
    """
    wide = dtype in ("bfloat16", "float16")
    if on_gpu(evidence):
        new = re.search(r"\b(A100|A30|H100|H200|GH200|H800|A800|B100|B200|GB200)\b", " ".join(evidence.machine.gpus))
        return (8, 64) if wide and new else (8,) if wide else (4, 32) if new else (4,)
    return (8, 32) if wide else (8, 16, 64)


def type_of(evidence: Evidence, layer: Layer) -> str:
    """The type that a layer computes in: autocast's, where the script uses it."""
    autocast = next((model.autocast for model in evidence.models if model.autocast), "")
    name = autocast or layer.dtype
    return name if name in ("bfloat16", "float16", "float64") else "float32"


def case_of(evidence: Evidence, layer: Layer) -> Case:
    """A layer as it ran."""
    batches = {shape for shape, _ in evidence.inputs.shapes} if evidence.inputs else set()
    dtype = layer.dtype if layer.dtype in ("float32", "bfloat16", "float16", "float64") else "float32"
    narrow = type_of(evidence, layer)
    return Case(
        layer.kind, dict(layer.sizes), layer.bias, layer.shape, dtype,
        first=layer is evidence.layers[0] or layer.shape in batches,
        autocast=narrow if narrow != dtype else "",
        channels_last=layer.channels_last,
        matmul_precision=evidence.flags.matmul_precision,
        cudnn_benchmark=evidence.flags.cudnn_benchmark,
    )  # fmt: skip


def attention_shape(detail: str, layers: Sequence[Layer] = ()) -> tuple[int, ...]:
    """The query's shape (batch, heads, length, width) from that of a softmax, and the layers beside it.

    Args:
        detail: Of an event: "batch x heads x length x length in path", or without heads.
        layers: A linear layer under that path, else one that takes batch x length x width, tells how wide all heads
            are together; 64 each without.

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
    under = [layer for layer in linear if path and layer.path.startswith(f"{path}.")]
    beside = [layer for layer in linear if layer.shape[:-1] == (scores[0], scores[2])]
    width = (under or beside)[0].sizes["in_features"] // scores[1] if under or beside else 64
    return (*scores[:3], width)


def _complete(layer: Layer) -> bool:
    """Whether enough is known of a layer to rebuild it."""
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
    """Something that grows with a layer's multiplications, to sort those that were not timed."""
    sizes = (layer.sizes.get(name, 1) for name in ("in_features", "out_features", "in_channels", "out_channels"))
    return math.prod(sizes) * math.prod(layer.shape) // max(1, layer.shape[-1] if layer.kind == "Linear" else 1)
