"""What a profile with a GPU in it says, by rows as torch's profiler gives them."""

from __future__ import annotations

import pytest

from hasten.doctor.observe.operators import ProfiledRow, Span, summarise
from hasten.evidence import Phase

BACKWARD = [
    ProfiledRow("aten::relu", 0, 100, shapes=((4, 8),), key=1),
    ProfiledRow("aten::clamp_min", 10, 60, shapes=((4, 8), ()), key=2),
    ProfiledRow("cudaLaunchKernel", 20, 40, key=4, caused_by=2),
    ProfiledRow("relu_kernel", 50, 350, thread=7, device=True, caused_by=2),
    ProfiledRow("aten::addmm", 100, 200, shapes=((8,), (4, 8), (8, 8), (), ()), key=4),
    ProfiledRow("aten::expand", 110, 120, shapes=((8,), ()), key=5),
    ProfiledRow("gemm", 300, 900, thread=7, device=True, caused_by=4),
    ProfiledRow("Memcpy HtoD", 2000, 2100, thread=8, device=True, caused_by=99),
    ProfiledRow("Optimizer.step#SGD.step", 1000, 1200, note=True, key=6),
    ProfiledRow("aten::add_", 1050, 1100, shapes=((8, 8),), key=7),
    ProfiledRow("add_kernel", 1100, 1200, thread=7, device=True, caused_by=7),
]


def test_times_on_the_gpu_belong_to_the_operators_that_started_the_work() -> None:
    """Own time on the CPU, the kernels' on the GPU, launches, and how long the GPU worked at all."""
    summary = summarise(BACKWARD, [Span(Phase.OPTIMIZER, 1000, 1200)], 2, cuda=True)
    operators = {one.name: one for one in summary.operators}
    assert operators["aten::relu"].seconds == pytest.approx(25e-9)
    assert operators["aten::relu"].device_seconds == 0
    assert operators["aten::clamp_min"].device_seconds == pytest.approx(150e-9)
    assert operators["aten::addmm"].device_seconds == pytest.approx(300e-9)
    assert operators["aten::addmm"].shapes == "[8] x [4, 8] x [8, 8]"
    assert summary.launches == 1.5
    assert summary.device_seconds == pytest.approx((850 + 100 + 100) / 2 * 1e-9)
    assert summary.calls == 1.5  # clamp_min, addmm and add_: relu only calls, expand is a view


def test_pointwise_ones_outside_the_optimizer() -> None:
    """relu and the clamp it calls are one; the optimizer's sum is none that could be fused into the model."""
    summary = summarise(BACKWARD, [Span(Phase.OPTIMIZER, 1000, 1200)], 1, cuda=True)
    assert summary.pointwise_calls == 1
    assert summary.pointwise_seconds == pytest.approx(300e-9)
    on_cpu = summarise([row for row in BACKWARD if not row.device], [Span(Phase.OPTIMIZER, 1000, 1200)], 1, cuda=False)
    assert on_cpu.pointwise_seconds == pytest.approx(80e-9)
    assert on_cpu.device_seconds is None


@pytest.mark.parametrize("phase", [Phase.VALIDATION, Phase.DATA])
def test_what_does_not_train_is_left_out(phase: Phase) -> None:
    """Operators of a validation, and of a dataset in the process that trains."""
    summary = summarise(BACKWARD, [Span(phase, 0, 150)], 1, cuda=False)
    assert [one.name for one in summary.operators] == ["aten::add_"]


@pytest.mark.parametrize(
    ("left", "softmax", "right", "found"),
    [
        ((8, 16, 4), (2, 4, 16, 16), (8, 16, 16), True),
        ((8, 16, 4), (2, 4, 16, 9), (8, 16, 9), True),  # attention to something else
        ((8, 16, 4), (2, 4, 16, 16), (8, 7, 7), False),  # what follows is another product
        ((8, 16, 4), (64, 50), (8, 16, 16), False),  # a classifier's
    ],
)
def test_attention_is_told_by_its_shapes(
    left: tuple[int, ...], softmax: tuple[int, ...], right: tuple[int, ...], found: bool
) -> None:
    """A softmax of what a product gives, going into another product."""
    rows = [
        ProfiledRow("aten::bmm", 0, 10, shapes=(left, (8, 4, softmax[-1]))),
        ProfiledRow("aten::mul", 10, 20, shapes=(softmax, ())),
        ProfiledRow("aten::_softmax", 20, 30, shapes=(softmax, (), ())),
        ProfiledRow("aten::bmm", 30, 40, shapes=(right, (8, right[-1], 4))),
    ]
    summary = summarise(rows, [], 1, cuda=False)
    assert bool(summary.attention) == found
    if found:
        (one,) = summary.attention
        assert (one.shape, one.count, one.seconds) == (softmax, 1, pytest.approx(40e-9))


def test_attention_inside_torchs_own_is_none_by_hand() -> None:
    """scaled_dot_product_attention computes it the same way where it has no kernel."""
    rows = [
        ProfiledRow("aten::_scaled_dot_product_attention_math", 0, 100),
        ProfiledRow("aten::bmm", 0, 10, shapes=((8, 16, 4), (8, 4, 16))),
        ProfiledRow("aten::_softmax", 20, 30, shapes=((2, 4, 16, 16), (), ())),
        ProfiledRow("aten::bmm", 30, 40, shapes=((8, 16, 16), (8, 16, 4))),
    ]
    assert summarise(rows, [], 1, cuda=False).attention == ()
