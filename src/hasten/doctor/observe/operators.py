"""Summarize a profile: operators by time, pointwise operators, hand-written attention, how busy the GPU was.

The profile comes as plain rows, so nothing here imports torch. Rows on the CPU are nested into calls by their times;
each call's own time excludes what it called, and kernels on the GPU are added to the call that launched them. Attention
written by hand is recognised by shapes: a softmax between two batched matrix products.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from hasten.evidence import Operator, Phase

_MOST_OPERATORS = 40  # operators in the evidence
_REACH = 30  # operators between a softmax and its matrix products, at most; only those in `_PARTS` count
# These make a view of a tensor, allocate one or query it, and compute nothing.
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
_NO_WORK = (Phase.DATA, Phase.VALIDATION, Phase.CHECKPOINT)  # phases to leave out: no training on a batch
_PARTS = frozenset(("aten::_softmax", "aten::bmm", "aten::baddbmm"))  # the operators that attention is made of


@dataclass(frozen=True)
class ProfiledRow:
    """One operator, annotation or kernel that ran; times in nanoseconds.

    Attributes:
        thread: The thread it ran in; for a kernel, its stream.
        shapes: Shapes of its arguments; () for an argument that is no tensor.
        device: Whether it is a kernel on the GPU.
        note: Whether it is an annotation (`Optimizer.step#Adam.step`) instead of an operator.
        key: Its number.
        caused_by: For a kernel, the `key` of the operator that launched it.
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
    """One call of an operator.

    Attributes:
        parent: The call that called it.
        own_time: Nanoseconds in it, without the calls it made.
        children: How many operators it called, views left out.
        on_device: Nanoseconds of the kernels it launched.
    """

    row: ProfiledRow
    parent: Call | None
    own_time: int
    children: int = 0
    on_device: int = 0

    def within(self, *names: str) -> bool:
        """Return whether any call above this one has one of these strings in its name."""
        call = self.parent
        while call is not None:
            if any(name in call.row.name for name in names):
                return True
            call = call.parent
        return False


@dataclass(frozen=True)
class SoftmaxAttention:
    """Attention as a softmax between two matrix products.

    Attributes:
        shape: Shape of the softmax.
        count: How often it ran in all the profiled steps.
        seconds: From the begin of the first product to the end of the second, in the forward, summed over all.
    """

    shape: tuple[int, ...]
    count: int
    seconds: float


@dataclass(frozen=True)
class OperatorSummary:
    """Figures of the profiled steps, per step (those of `attention` are sums over all steps)."""

    operators: tuple[Operator, ...] = ()
    calls: float = 0.0
    launches: float | None = None
    device_seconds: float | None = None
    pointwise_seconds: float = 0.0
    pointwise_calls: float = 0.0
    attention: tuple[SoftmaxAttention, ...] = ()


def summarise(rows: Sequence[ProfiledRow], spans: Sequence[Span], steps: int, cuda: bool) -> OperatorSummary:
    """Summarize a profile.

    Args:
        rows: What ran, sorted by begin (an outer row before an inner one with the same begin).
        spans: The phases of the steps; rows within data wait, validation and checkpoints are left out.
        steps: How many steps were profiled.
        cuda: Whether the GPU was profiled too.
    """
    skipped = _Spans(span for span in spans if span.phase in _NO_WORK)
    calls = [call for call in nested(rows) if call.row.begin not in skipped]
    # Calls of the CUDA runtime are numbered differently, so a number may equal an operator's. They are left out; unlike
    # operators, they have a `caused_by`.
    by_key = {call.row.key: call for call in calls if not call.row.caused_by}
    kernels = [row for row in rows if row.device and not row.note]
    for kernel in kernels:
        if (cause := by_key.get(kernel.caused_by)) is not None:
            cause.on_device += kernel.end - kernel.begin
    operators = [call for call in calls if not call.row.note]
    optimizing = _Spans(span for span in spans if span.phase == Phase.OPTIMIZER)
    pointwise = [call for call in operators if _is_pointwise(call) and call.row.begin not in optimizing]
    launched = [row for row in kernels if not row.name.startswith(("Memcpy", "Memset"))]
    return OperatorSummary(
        operators=_by_name(operators, steps),
        calls=sum(1 for call in operators if _computes(call)) / steps,
        launches=len(launched) / steps if cuda else None,
        device_seconds=_covered(kernels) / steps / 1e9 if cuda else None,
        pointwise_seconds=sum(call.on_device if cuda else call.own_time for call in pointwise) / steps / 1e9,
        pointwise_calls=sum(1 for call in pointwise if not _is_inside_pointwise(call)) / steps,
        attention=attention_by_hand(operators),
    )


def nested(rows: Iterable[ProfiledRow]) -> list[Call]:
    """Return the calls on the CPU, nested by thread, each with its own time."""
    calls = []
    open_calls: dict[int, list[Call]] = {}
    for row in rows:
        if row.device:
            continue
        stack = open_calls.setdefault(row.thread, [])
        while stack and stack[-1].row.end <= row.begin:
            stack.pop()
        call = Call(row, stack[-1] if stack else None, row.end - row.begin)
        if stack:
            stack[-1].own_time -= min(row.end, stack[-1].row.end) - row.begin
            stack[-1].children += row.name.startswith("aten::") and row.name not in _VIEWS
        stack.append(call)
        calls.append(call)
    return calls


def attention_by_hand(calls: Sequence[Call]) -> tuple[SoftmaxAttention, ...]:
    """Return the softmaxes that stand between two matrix products of matching shapes, grouped by shape.

    Calls inside torch's own attention operators do not count.
    """
    order = [call for call in calls if call.row.name in _PARTS]
    by_shape: dict[tuple[int, ...], list[int]] = {}  # shape -> count, nanoseconds
    for index, call in enumerate(order):
        shape = call.row.shapes[0] if call.row.shapes else ()
        if call.row.name != "aten::_softmax" or len(shape) not in (3, 4) or min(shape[-2:]) < 2:
            continue
        if call.within("scaled_dot_product", "_flash_attention", "_efficient_attention"):
            continue
        products_before = [c for c in order[max(0, index - _REACH) : index] if _product(c) == shape[-2:]]
        products_after = [c for c in order[index + 1 : index + 1 + _REACH] if _left_factor(c) == shape[-2:]]
        if products_before and products_after:
            entry = by_shape.setdefault(shape, [0, 0])
            entry[0] += 1
            entry[1] += _time(calls, products_before[-1].row.begin, products_after[0].row.end)
    return tuple(SoftmaxAttention(shape, count, time / 1e9) for shape, (count, time) in by_shape.items())


def _time(calls: Sequence[Call], begin: int, end: int) -> int:
    """Return the nanoseconds of GPU work launched between two moments; without any, the time between them."""
    return sum(call.on_device for call in calls if begin <= call.row.begin < end) or end - begin


def _left_factor(call: Call) -> tuple[int, ...] | None:
    """Return the last two sizes of a batched product's left factor; None for other operators."""
    shapes = call.row.shapes
    position = {"aten::bmm": 0, "aten::baddbmm": 1}.get(call.row.name)
    return shapes[position][-2:] if position is not None and len(shapes) > position + 1 else None


def _product(call: Call) -> tuple[int, ...] | None:
    """Return the last two sizes of a batched product; None for other operators."""
    left = _left_factor(call)
    if not left:
        return None
    right = call.row.shapes[1 if call.row.name == "aten::bmm" else 2]
    return (left[-2], right[-1]) if len(right) == 3 else None


def _computes(call: Call) -> bool:
    """Return whether an operator computes something itself: it is no view, and calls nothing but views."""
    return call.row.name.startswith("aten::") and call.row.name not in _VIEWS and not call.children


def _is_pointwise(call: Call) -> bool:
    """Return whether a call is pointwise work of the model, not of the optimizer or of summing up gradients."""
    sized = any(prod(shape) > 1 for shape in call.row.shapes if shape)  # a single number (a step counter) is no work
    return call.row.name in _POINTWISE and sized and not call.within("Optimizer.", "AccumulateGrad")


def _is_inside_pointwise(call: Call) -> bool:
    """Return whether a pointwise operator made this call, such as `mul` in `dropout`."""
    return call.parent is not None and call.parent.row.name in _POINTWISE


def _by_name(calls: Iterable[Call], steps: int) -> tuple[Operator, ...]:
    """Return the operators with the most time, per step, summed by name."""
    sums: dict[str, _Sum] = {}
    for call in calls:
        if not call.row.name.startswith("autograd::engine::evaluate_function"):  # autograd's frame around an operator
            sums.setdefault(call.row.name, _Sum()).add(call)
    worst = sorted(sums.items(), key=lambda entry: -max(entry[1].own_time, entry[1].on_device))[:_MOST_OPERATORS]
    return tuple(
        Operator(
            name=name,
            calls=total.count / steps,
            seconds=total.own_time / steps / 1e9,
            device_seconds=total.on_device / steps / 1e9,
            shapes=" x ".join(str(list(shape)) for shape in total.biggest if shape),
        )
        for name, total in worst
    )


@dataclass
class _Sum:
    """The calls of one operator."""

    count: int = 0
    own_time: int = 0
    on_device: int = 0
    size: int = -1
    biggest: tuple[tuple[int, ...], ...] = field(default=())

    def add(self, call: Call) -> None:
        """Add a call, and keep the shapes of the biggest."""
        self.count += 1
        self.own_time += call.own_time
        self.on_device += call.on_device
        if (size := sum(prod(shape) for shape in call.row.shapes if shape)) > self.size:
            self.size, self.biggest = size, call.row.shapes


def _covered(rows: Iterable[ProfiledRow]) -> int:
    """Return the nanoseconds in which at least one of the rows ran."""
    covered = reached = 0
    for row in sorted(rows, key=lambda row: row.begin):
        covered += max(0, row.end - max(reached, row.begin))
        reached = max(reached, row.end)
    return covered


class _Spans:
    """Spans that do not overlap; `moment in spans` tells whether one of them contains it."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted((span.begin, span.end) for span in spans)

    def __contains__(self, at: object) -> bool:
        if not isinstance(at, int):
            return False
        index = bisect_right(self._spans, (at, float("inf"))) - 1
        return index >= 0 and at < self._spans[index][1]
