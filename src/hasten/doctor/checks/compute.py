"""Checks of how the computing is launched: too many small operators, compiled code that is left or made anew."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, HowKnown, Phase, severity_of, split_place
from hasten.evidence.figures import percent
from hasten.evidence.weigh import (
    LEAST,
    on_gpu,
    products,
    seconds_of,
    share_of,
    short,
    steady_seconds,
    steady_steps,
    timed,
)

_WORK = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_LAUNCH = 5e-6  # seconds of the host to launch a kernel, at the least
_OPERATOR = 3e-6  # seconds of Python and torch around an operator on a CPU; measured where that could be done
_MOST = 8e-6  # of these, whatever was measured
_FAR = 4  # times that, from which on a matrix product computes: under the profiler it looks longer than it is
_BREAK = 100e-6  # seconds that a graph break costs a step, forward and backward: an estimate
_FEW = 3  # recompilations from which on they are no longer torch learning which sizes vary


class LaunchBound(Check):
    """Operators so small that starting them takes longer than what they compute."""

    name = "launch_bound"
    sources = ("PyTorch performance tuning guide", "NVIDIA, CUDA Graphs")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterable[Finding]:
        """On a GPU: it waits while the host launches. On a CPU: what operators cost that have next to nothing to do."""
        finding = _idle_gpu(evidence) if on_gpu(evidence) else _small_operators(evidence)
        return [finding] if finding else []


def _idle_gpu(evidence: Evidence) -> Finding | None:
    sampled = evidence.sampled
    if sampled is None or sampled.launches is None or sampled.device_busy is None or sampled.device_busy > 0.7:
        return None
    if share_of(evidence, sampled.launches * _LAUNCH) < 0.2:  # it is idle for another reason
        return None
    idle = min(1 - sampled.device_busy, share_of(evidence, seconds_of(evidence, *_WORK)))
    return timed(
        LaunchBound.name,
        f"the GPU computes {percent(sampled.device_busy)} of the time, the host launches {sampled.launches:.0f} "
        f"kernels in a step of {short(steady_seconds(evidence))}",
        'use a bigger batch, or torch.compile(model, mode="reduce-overhead"), which replays a step\'s kernels at once',
        idle / 2,
        HowKnown.ESTIMATED,
        sources=LaunchBound.sources,
    )


def _small_operators(evidence: Evidence) -> Finding | None:
    sampled = evidence.sampled
    seconds = seconds_of(evidence, *_WORK)
    if sampled is None or sampled.calls < 10:
        return None
    # How many operators L-BFGS runs is a matter of its history and line search; twice the batch took twice as long.
    if any(optimizer.name == "LBFGS" for optimizer in evidence.optimizers):
        return None
    tried = evidence.measured_for(LaunchBound.name)
    # Measured on a machine that was busier than during the run it would be too much.
    least = min(tried[0].before, tried[0].after, _MOST) if tried else _OPERATOR
    overhead = share_of(evidence, min(seconds - products(evidence, least=_FAR * least), sampled.calls * least))
    if overhead < 0.3:
        return None
    measured = f"; one on 64 numbers takes {short(least)}" if tried and least < seconds / sampled.calls else ""
    compiling = "" if any(model.compiled for model in evidence.models) else ", or try to compile the model"
    return timed(
        LaunchBound.name,
        f"{sampled.calls:.0f} operators in {short(seconds)}, {short(seconds / sampled.calls)} each: "
        f"{percent(overhead)} of the step goes into starting them{measured}",
        f"use a bigger batch (with twice the batch a sample costs half of that){compiling}",
        overhead / 2,
        HowKnown.ESTIMATED,
        sources=LaunchBound.sources,
    )


class GraphBreaks(Check):
    """Code that torch.compile cannot hold in one graph: each break is a call more, and nothing is fused across it."""

    name = "graph_breaks"
    sources = ("torch.compile, graph breaks",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line; what a break costs is an estimate, and what it keeps from being fused is not known."""
        reasons = evidence.sampled.graph_breaks if evidence.sampled else ()
        worth = share_of(evidence, _BREAK)
        known = worth if worth >= LEAST else None
        for place, those in _by_place(reasons).items():
            file, line = split_place(place)
            yield Finding(
                cls.name,
                f"torch.compile leaves its graph here: {_first_line(those[0], place)}",
                "move it out of the compiled code (torch.compile(model, fullgraph=True) shows every place)",
                severity_of(known), known, HowKnown.ESTIMATED, file, line,
                details=those, sources=cls.sources,
            )  # fmt: skip


class Recompilations(Check):
    """Code that torch.compile compiles over and over."""

    name = "recompilations"
    sources = ("torch.compile, recompilations",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """What they cost is what so many of the steady steps took longer than others."""
        sampled = evidence.sampled
        reasons = sampled.recompilations if sampled else ()
        if sampled is None or len(reasons) < _FEW:
            return
        worth = lost_in_outliers(evidence, sum(one.seconds for one in sampled.operators))
        known = worth if worth >= LEAST else None
        place = next(iter(_by_place(reasons)), "")
        file, line = split_place(place)
        yield Finding(
            cls.name,
            f"torch.compile compiled anew {len(reasons)} times: {_first_line(reasons[0], place)}",
            "keep what changes out of compiled code: pad to a few sizes, torch._dynamo.mark_dynamic, tensors in place "
            "of Python numbers",
            severity_of(known), known, HowKnown.ESTIMATED, file, line,
            details=tuple(dict.fromkeys(reasons)), sources=cls.sources,
        )  # fmt: skip


class CudnnBenchmarkVarying(Check):
    """cuDNN measuring its kernels again for every new size."""

    name = "cudnn_benchmark_varying"
    sources = ("Lin, tip 15", "Kuhn, tip 6")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """On a GPU, with convolutions, and sizes that keep changing; what it costs as for `recompilations`."""
        if not on_gpu(evidence) or not evidence.flags.cudnn_benchmark or evidence.inputs is None:
            return
        convolutions = any(layer.startswith("Conv") for model in evidence.models for layer in model.layers)
        sizes = len(evidence.inputs.shapes)
        if not convolutions or sizes < 4:
            return
        finding = timed(
            cls.name,
            f"cudnn.benchmark measures kernels for every new size, and {sizes} sizes came in "
            f"{evidence.inputs.batches} batches",
            "set torch.backends.cudnn.benchmark = False, or bring the batches to a few sizes",
            lost_in_outliers(evidence),
            HowKnown.ESTIMATED,
            sources=cls.sources,
        )
        if finding:
            yield finding


def lost_in_outliers(evidence: Evidence, computing: float = 0.0) -> float:
    """Share of the steady steps' time that steps over three times as long as the median took beyond it.

    Args:
        evidence: Of the run.
        computing: What the operators of a step take, where that is known: the median may be an outlier itself.
    """
    lengths = [sum(evidence.step_phases[step]) for step in steady_steps(evidence)]
    if not lengths or sum(lengths) <= 0:
        return 0.0
    middle = min(statistics.median(lengths), computing or math.inf)
    return sum(length - middle for length in lengths if length > 3 * middle) / sum(lengths)


def _by_place(reasons: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The reasons that torch gave, by the last line of the script that they name."""
    found: dict[str, tuple[str, ...]] = {}
    for reason in reasons:
        place = place_in(reason)
        if reason not in found.get(place, ()):
            found[place] = (*found.get(place, ()), reason)
    return found


def place_in(reason: str) -> str:
    """`file:line` in a text of torch's, past its own files; "" if there is none.

    >>> place_in('call to print\\n  File "/home/me/train.py", line 12, in forward')
    '/home/me/train.py:12'
    """
    places = [
        f"{file}:{line}"
        for pattern in (r'File "([^"\n]+)", line (\d+)', r"([^\s\"'(]+\.py):(\d+)")
        for file, line in re.findall(pattern, reason)
    ]
    own = [place for place in places if "site-packages" not in place and "/torch/" not in place]
    return (own or places or [""])[-1]


def _first_line(reason: str, place: str) -> str:
    line = next((line.strip() for line in reason.splitlines() if line.strip()), "").removeprefix(f"{place}: ")
    return line if len(line) <= 160 else f"{line[:157]}..."


CHECKS = (LaunchBound, GraphBreaks, Recompilations, CudnnBenchmarkVarying)
