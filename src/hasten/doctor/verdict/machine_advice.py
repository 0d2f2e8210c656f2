"""Advise which machine to rent, from a run's use of CPU, GPU, memory and network."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hasten.doctor.verdict.steady_use import SteadyUse, steady_use
from hasten.evidence import Evidence, GpuUse
from hasten.evidence.figures import percent
from hasten.evidence.weigh import process_peak

_ENOUGH = 4  # samples in the steady steps; with fewer there is no advice
_IDLE = 0.5  # share of the cores below which a smaller machine is suggested
_LEAST_MEMORY = 8 * 2**30  # bytes; no advice on memory for smaller machines


def advice(evidence: Evidence, phases: Mapping[str, float]) -> tuple[str, ...]:
    """Return the advice in sentences; none if the machine's use was not sampled for long enough.

    Args:
        evidence: The run's evidence.
        phases: Mean seconds of a steady step by phase.
    """
    use = steady_use(evidence)
    if use is None or use.samples < _ENOUGH:
        return ()
    step = sum(phases.values())
    wait_share = phases.get("data", 0.0) / step if step > 0 else 0.0
    sentences = [*_cores(evidence, use, wait_share), *_ratios(use), *_memory(evidence)]
    for gpu in evidence.used.gpus:
        sentences += _gpu(gpu)
    return tuple(sentences)


def _cores(evidence: Evidence, use: SteadyUse, wait_share: float) -> list[str]:
    """Return sentences on the number of cores.

    Args:
        evidence: The run's evidence.
        use: Use of the machine in the steady steps.
        wait_share: Share of the step that waits for data, 0 to 1.
    """
    cores, sentences = evidence.machine.cores, []
    # Other processes competed for the cores, so the training may have used fewer than it could.
    crowded = use.others >= 0.25 * cores
    idle = use.cpu < _IDLE * cores and not crowded
    if use.worker_count >= 1 and wait_share < 0.1:
        sentences.append(
            f"more cores would not help loading: the loader's {use.worker_count:.0f} workers used "
            f"{use.workers:.1f} of {cores} cores and the step waits {percent(wait_share)} of its time for them"
        )
    if idle and cores >= 2:
        need = max(1, math.ceil(use.high_cpu * 1.1))  # the highest use but for 5 % of the samples, and 10 % in reserve
        if need < cores:
            sentences.append(f"{need} of these {cores} cores suffice for it as it is: it used {use.cpu:.1f}")
    elif use.cpu >= 0.9 * cores:
        sentences.append(f"more cores would help as far as its operators can be shared: it used all {cores}")
    return sentences


def _ratios(use: SteadyUse) -> list[str]:
    """Return how much CPU and network the run used for each second of GPU work."""
    worked = use.gpu * use.gpus
    if worked <= 0.01:
        return []
    sentences = [f"CPU to GPU: {use.cpu / worked:.1f} cores' work for each GPU's"]
    if use.net_in + use.net_out > 1e6:
        sentences.append(
            f"network to GPU: {(use.net_in + use.net_out) / worked / 1e6:.0f} MB for each second a GPU works"
        )
    return sentences


def _memory(evidence: Evidence) -> list[str]:
    """Return a sentence if the run used little or nearly all of the memory."""
    peak, available = process_peak(evidence), evidence.machine.memory_bytes
    if available < _LEAST_MEMORY or peak <= 0:
        return []
    if peak < 0.2 * available:  # and a fifth of the smaller machine in reserve
        return [f"a quarter of the memory suffices: it took {peak / 2**30:.1f} of {available / 2**30:.0f} GiB"]
    return [f"more memory is called for: it took {peak / 2**30:.1f} of {available / 2**30:.0f} GiB"] * (
        peak > 0.9 * available
    )


def _gpu(gpu: GpuUse) -> list[str]:
    """Return sentences on a GPU's memory, and on throttling."""
    sentences = []
    if gpu.memory and gpu.memory_total and max(gpu.memory) < 0.4 * gpu.memory_total:
        took, available = max(gpu.memory) / 2**30, gpu.memory_total / 2**30
        sentences.append(f"a GPU with less memory suffices: {took:.1f} of {available:.0f} GiB of {gpu.name} were used")
    if gpu.throttled:
        sentences.append(f"{gpu.name} was held back: {', '.join(gpu.throttled)}")
    return sentences
