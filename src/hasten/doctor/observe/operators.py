"""Reads a profile: operators by time, pointwise ones, attention by hand, how busy the GPU was. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from hasten.evidence import Operator, Phase

_KEPT = 40  # operators in the evidence
_REACH = 30  # operators between a softmax and its matrix products, at the most
# They only look at a tensor in another way, or make room for one.
_VIEW_NAMES = (
    "view reshape _reshape_alias _unsafe_view transpose t permute movedim swapaxes numpy_T mT expand expand_as "
    "as_strided as_strided_ slice select narrow split split_with_sizes chunk unbind unsqueeze squeeze flatten "
    "unflatten detach detach_ alias diagonal unfold view_as view_as_real view_as_complex real imag lift_fresh "
    "resolve_conj resolve_neg conj broadcast_tensors broadcast_to empty empty_like empty_strided resize_ set_ "
    "result_type to item is_nonzero _has_compatible_shallow_copy_type contiguous data requires_grad_"
)
_POINTWISE_NAMES = (
    "add add_ sub sub_ rsub mul mul_ div div_ neg neg_ pow pow_ square sqrt sqrt_ rsqrt rsqrt_ reciprocal abs exp "
    "exp_ expm1 log log_ log1p log2 sin cos tan erf erfc sigmoid sigmoid_ tanh tanh_ relu relu_ clamp clamp_ "
    "clamp_min clamp_min_ clamp_max clamp_max_ threshold threshold_ leaky_relu leaky_relu_ elu elu_ celu selu "
    "gelu gelu_ silu silu_ mish mish_ hardtanh hardtanh_ hardswish hardswish_ hardsigmoid softplus prelu "
    "_prelu_kernel glu where masked_fill masked_fill_ maximum minimum lerp addcmul addcdiv sign sgn bitwise_not "
    "logical_not eq ne lt le gt ge bitwise_and bitwise_or dropout native_dropout bernoulli_ rrelu "
    "sigmoid_backward tanh_backward threshold_backward leaky_relu_backward elu_backward gelu_backward "
    "silu_backward mish_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward "
    "_prelu_kernel_backward glu_backward native_dropout_backward"
)
_VIEWS = frozenset(f"aten::{name}" for name in _VIEW_NAMES.split())
_POINTWISE = frozenset(f"aten::{name}" for name in _POINTWISE_NAMES.split())
_NO_WORK = (Phase.DATA, Phase.VALIDATION, Phase.CHECKPOINT)
_PARTS = frozenset(("aten::_softmax", "aten::bmm", "aten::baddbmm"))  # of attention


@dataclass(frozen=True)
class ProfiledRow:
    """One operator, annotation or kernel that ran; times in nanoseconds.

    Attributes:
        thread: On which it ran; of a kernel, its stream.
        shapes: Of its arguments, () for those that are no tensors.
        device: It is a kernel on the GPU.
        note: It is an annotation (`Optimizer.step#Adam.step`), no operator.
        key: Its number; `caused_by`, of a kernel, that of the operator that started it.
    """

    name: str
    begin: int
    end: int
    thread: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()
    device: bool = False
    note: bool = False
    key: int = 0
    caused_by: int = 0


@dataclass(frozen=True)
class Span:
    """A part of a step, in nanoseconds."""

    phase: Phase
    begin: int
    end: int


@dataclass
class Call:
    """One call of an operator, with what it called taken out."""

    row: ProfiledRow
    above: Call | None
    own: int
    children: int = 0
    on_device: int = 0

    def within(self, *names: str) -> bool:
        """Whether it was called, however deep, by something whose name holds one of these."""
        at = self.above
        while at is not None:
            if any(name in at.row.name for name in names):
                return True
            at = at.above
        return False


@dataclass(frozen=True)
class SoftmaxAttention:
    """Softmax between two matrix products.

    Attributes:
        shape: Of the softmax.
        count: How often, in all the profiled steps.
        seconds: From the first product to the end of the second in the forward, all of them together.
    """

    shape: tuple[int, ...]
    count: int
    seconds: float


@dataclass(frozen=True)
class OperatorSummary:
    """Figures of the profiled steps, per step."""

    operators: tuple[Operator, ...] = ()
    calls: float = 0.0
    launches: float | None = None
    device_seconds: float | None = None
    pointwise_seconds: float = 0.0
    pointwise_calls: float = 0.0
    attention: tuple[SoftmaxAttention, ...] = ()


def summarise(rows: Sequence[ProfiledRow], spans: Sequence[Span], steps: int, cuda: bool) -> OperatorSummary:
    """Sum up a profile.

    Args:
        rows: What ran, by begin (an outer before an inner of the same begin).
        spans: The parts of the steps; what ran while a batch was made, and in validations, is left out.
        steps: How many steps were profiled.
        cuda: The GPU was profiled too.
    """
    skipped = _Within(span for span in spans if span.phase in _NO_WORK)
    calls = [call for call in nested(rows) if call.row.begin not in skipped]
    # Calls of the CUDA runtime are renumbered; they are caused by an operator themselves.
    by_key = {call.row.key: call for call in calls if not call.row.caused_by}
    kernels = [row for row in rows if row.device and not row.note]
    for kernel in kernels:
        if (cause := by_key.get(kernel.caused_by)) is not None:
            cause.on_device += kernel.end - kernel.begin
    operators = [call for call in calls if not call.row.note]
    optimizing = _Within(span for span in spans if span.phase == Phase.OPTIMIZER)
    pointwise = [call for call in operators if _is_pointwise(call) and call.row.begin not in optimizing]
    launched = [row for row in kernels if not row.name.startswith(("Memcpy", "Memset"))]
    return OperatorSummary(
        operators=_by_name(operators, steps),
        calls=sum(1 for call in operators if _computes(call)) / steps,
        launches=len(launched) / steps if cuda else None,
        device_seconds=_covered(kernels) / steps / 1e9 if cuda else None,
        pointwise_seconds=sum(call.on_device if cuda else call.own for call in pointwise) / steps / 1e9,
        pointwise_calls=sum(1 for call in pointwise if not _is_inside_pointwise(call)) / steps,
        attention=attention_by_hand(operators),
    )


def nested(rows: Iterable[ProfiledRow]) -> list[Call]:
    """The calls on the CPU, each with its own time: without what it called in the same thread."""
    calls = []
    open_calls: dict[int, list[Call]] = {}
    for row in rows:
        if row.device:
            continue
        above = open_calls.setdefault(row.thread, [])
        while above and above[-1].row.end <= row.begin:
            above.pop()
        call = Call(row, above[-1] if above else None, row.end - row.begin)
        if above:
            above[-1].own -= min(row.end, above[-1].row.end) - row.begin
            above[-1].children += row.name.startswith("aten::") and row.name not in _VIEWS
        above.append(call)
        calls.append(call)
    return calls


def attention_by_hand(calls: Sequence[Call]) -> tuple[SoftmaxAttention, ...]:
    """Softmaxes over a matrix product whose result goes into another one, by the shapes of all three."""
    order = [call for call in calls if call.row.name in _PARTS]
    found: dict[tuple[int, ...], list[int]] = {}
    for index, call in enumerate(order):
        shape = call.row.shapes[0] if call.row.shapes else ()
        if call.row.name != "aten::_softmax" or len(shape) not in (3, 4) or min(shape[-2:]) < 2:
            continue
        if call.within("scaled_dot_product", "_flash_attention", "_efficient_attention"):
            continue
        near = [c for c in order[max(0, index - _REACH) : index] if _product(c) == shape[-2:]]
        after = [c for c in order[index + 1 : index + 1 + _REACH] if _left(c) == shape[-2:]]
        if near and after:
            entry = found.setdefault(shape, [0, 0])
            entry[0] += 1
            entry[1] += _time(calls, near[-1].row.begin, after[0].row.end)
    return tuple(SoftmaxAttention(shape, count, time / 1e9) for shape, (count, time) in found.items())


def _time(calls: Sequence[Call], begin: int, end: int) -> int:
    """Return the nanoseconds between two moments: of work on the GPU, if any ran there."""
    return sum(call.on_device for call in calls if begin <= call.row.begin < end) or end - begin


def _left(call: Call) -> tuple[int, ...] | None:
    """The last two sizes of a batched product's left factor."""
    shapes = call.row.shapes
    at = {"aten::bmm": 0, "aten::baddbmm": 1}.get(call.row.name)
    return shapes[at][-2:] if at is not None and len(shapes) > at + 1 else None


def _product(call: Call) -> tuple[int, ...] | None:
    """The last two sizes of a batched product."""
    left = _left(call)
    if not left:
        return None
    right = call.row.shapes[1 if call.row.name == "aten::bmm" else 2]
    return (left[-2], right[-1]) if len(right) == 3 else None


def _computes(call: Call) -> bool:
    """Whether an operator does something itself: no view, and nothing below it but views."""
    return call.row.name.startswith("aten::") and call.row.name not in _VIEWS and not call.children


def _is_pointwise(call: Call) -> bool:
    sized = any(prod(shape) > 1 for shape in call.row.shapes if shape)  # a counter is no work
    return call.row.name in _POINTWISE and sized and not call.within("Optimizer.", "AccumulateGrad")


def _is_inside_pointwise(call: Call) -> bool:
    return call.above is not None and call.above.row.name in _POINTWISE


def _by_name(calls: Iterable[Call], steps: int) -> tuple[Operator, ...]:
    sums: dict[str, _Sum] = {}
    for call in calls:
        if not call.row.name.startswith("autograd::engine::evaluate_function"):
            sums.setdefault(call.row.name, _Sum()).add(call)
    worst = sorted(sums.items(), key=lambda one: -max(one[1].own, one[1].on_device))[:_KEPT]
    return tuple(
        Operator(
            name=name,
            calls=one.count / steps,
            seconds=one.own / steps / 1e9,
            device_seconds=one.on_device / steps / 1e9,
            shapes=" x ".join(str(list(shape)) for shape in one.biggest if shape),
        )
        for name, one in worst
    )


@dataclass
class _Sum:
    count: int = 0
    own: int = 0
    on_device: int = 0
    size: int = -1
    biggest: tuple[tuple[int, ...], ...] = field(default=())

    def add(self, call: Call) -> None:
        self.count += 1
        self.own += call.own
        self.on_device += call.on_device
        if (size := sum(prod(shape) for shape in call.row.shapes if shape)) > self.size:
            self.size, self.biggest = size, call.row.shapes


def _covered(rows: Iterable[ProfiledRow]) -> int:
    """Nanoseconds in which at least one of the rows ran."""
    covered = reached = 0
    for row in sorted(rows, key=lambda row: row.begin):
        covered += max(0, row.end - max(reached, row.begin))
        reached = max(reached, row.end)
    return covered


class _Within:
    """Whether a moment lies in one of some spans that do not overlap."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted((span.begin, span.end) for span in spans)

    def __contains__(self, at: object) -> bool:
        if not isinstance(at, int):
            return False
        index = bisect_right(self._spans, (at, float("inf"))) - 1
        return index >= 0 and at < self._spans[index][1]
