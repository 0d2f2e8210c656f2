"""Decide which resource is saturated; if none is, where the training is under-parallelised.

`verdict` goes through the answers in this order: a loader benchmark, memory that ran out, a run without steps, a busy
GPU, the phase that takes the most of the step for its kind (`_BOUNDS`), and at last computing, judged by the use of the
cores. Each phase has a function here that refines its answer: `_data` for example tells a slow disk from slow decoding.
"""

from __future__ import annotations

from collections.abc import Mapping

from hasten.doctor.verdict.diagnosis import Verdict
from hasten.doctor.verdict.loader import STAGE_WORDS, loader_verdict
from hasten.doctor.verdict.steady_use import SteadyUse, steady_use
from hasten.doctor.verdict.untrained import caveats, out_of_memory, stands_still, stuck, untrained
from hasten.errors import OUT_OF_MEMORY
from hasten.evidence import PHASES, Evidence, LoaderFacts, Stages
from hasten.evidence.disks import is_network
from hasten.evidence.figures import percent
from hasten.evidence.waiting import stages_of, waits_for_gpu
from hasten.evidence.weigh import on_gpu

# Share of the step from which a phase counts as the bottleneck. If several are above, the verdict is the phase with the
# greatest ratio of share to bound.
_BOUNDS = {"data": 0.30, "transfer": 0.25, "sync": 0.25, "validation": 0.40, "checkpoint": 0.25, "other": 0.40}
_COMPUTING = ("forward", "backward", "optimizer")
_BUSY = 0.75  # share of the cores, or of a GPU's time, from which it is saturated
_TELLING = 0.1  # share of a phase's time from which a single line of the script is mentioned
_FULL_MACHINE = 0.85  # share of the cores that is busy, with any process, from which the machine is full
_NVML_BUSY = 0.95  # bound for NVML's figure, which counts a GPU as busy while any kernel runs, however small


def verdict(evidence: Evidence, phases: Mapping[str, float]) -> Verdict:
    """Return the verdict of a run.

    Args:
        evidence: The run's evidence.
        phases: Mean seconds of a steady step by phase.
    """
    if evidence.loader_bench is not None:
        return loader_verdict(evidence, evidence.loader_bench)
    if any(word in evidence.error for word in OUT_OF_MEMORY):
        return out_of_memory(evidence)
    # A run that was cut in its first step, say of a large model on a CPU, gets a verdict from that step so far.
    so_far = dict(zip(PHASES, evidence.unfinished, strict=False))
    phases = phases if sum(phases.values()) > 0 or evidence.error else so_far
    step = sum(phases.values())
    if step <= 0:
        return untrained(evidence)
    shares = {name: seconds / step for name, seconds in phases.items()}
    use = steady_use(evidence)
    answer = _gpu_is_full(evidence, shares, use)
    if answer is None:
        name, ratio = max(((n, shares.get(n, 0.0) / bound) for n, bound in _BOUNDS.items()), key=lambda pair: pair[1])
        answer = _BY_PHASE[name](evidence, shares, use) if ratio >= 1 else _computing(evidence, shares, use)
    details = (*answer.details, *caveats(evidence, use))
    last = stuck(evidence)
    # The last step ran for longer than all steps before it: most likely it hangs, and that is the verdict.
    if last and stands_still(evidence) > sum(evidence.step_seconds):
        return Verdict("none", last, (f"before that: {answer.title}", *details))
    return Verdict(answer.resource, answer.title, (*details, *([last] if last else [])))


# -- the GPU -------------------------------------------------------------------------------------------------


def _gpu_busy(evidence: Evidence, use: SteadyUse | None) -> tuple[float | None, float, str]:
    """Return the share of time in which the GPU computes, the bound from which it is full, and the figure's source.

    The share is None if it was not measured.
    """
    if evidence.sampled is not None and evidence.sampled.device_busy is not None:
        return evidence.sampled.device_busy, _BUSY, "of the profiled steps"
    if use is not None and use.gpus:
        return use.gpu, _NVML_BUSY, "of the time, as NVML counts"
    return None, _BUSY, ""


def _gpu_is_full(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict | None:
    """Return the verdict "gpu" if the GPU is busy, whatever the phases say; None otherwise."""
    if not on_gpu(evidence):
        return None
    busy, bound, unit = _gpu_busy(evidence, use)
    if busy is None or busy < bound:
        return None
    return Verdict(
        "gpu",
        f"GPU-bound: the GPU computes {percent(busy)} {unit}",
        ("it gets faster by less work or cheaper work for the GPU: lower precision, fused kernels, a faster GPU",),
    )


def _gpu_waits(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    """Return the verdict of a step that computes on a GPU that is not full.

    The GPU waits for the CPU, because of host syncs or of launches; if its use was not measured, computing is the
    answer.
    """
    computing = sum(shares.get(name, 0.0) for name in _COMPUTING)
    busy, _, unit = _gpu_busy(evidence, use)
    syncs = waits_for_gpu(evidence)
    per_step = sum(event.count for event in syncs) / max(1, evidence.steps)
    if busy is None:
        if evidence.device_clock:
            return Verdict("gpu", f"GPU-bound: computing takes {percent(computing)} of the step on the GPU's clock")
        return Verdict("gpu", f"computing on the GPU takes {percent(computing)} of the step", ("by the CPU's clock",))
    idle = f"the GPU computes only {percent(busy)} {unit}"
    if per_step >= 0.5:
        worst = max(syncs, key=lambda event: event.count)
        detail = f"the CPU waits for the GPU {per_step:.1f} times a step, most of all at {worst.where} ({worst.kind})"
        return Verdict("sync", f"held up by host syncs: {idle}", (detail, "until it has caught up, no new work starts"))
    launches = evidence.sampled.launches if evidence.sampled is not None else None
    detail = f"{launches:.0f} kernels are launched a step" if launches else "the kernels are too small or too late"
    return Verdict(
        "sync",
        f"launch-bound: {idle}, and waits for the CPU to start its kernels",
        (detail, "bigger batches, torch.compile or CUDA graphs give it more to do at a time"),
    )


# -- parts of the step that are not computing ----------------------------------------------------------------


def _data(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    """Return the verdict of a step that waits for batches: data, or the disk or network that the loader waits for."""
    loader = evidence.train_loader
    waits = f"the step waits {percent(shares['data'])} of its time for batches"
    stages = stages_of(evidence, loader) if loader is not None else None
    resource = _loader_bottleneck(evidence, stages, use)
    title = f"data-bound: {waits}"
    if resource != "data":
        title = f"{resource}-bound: {waits}, and the loader for its {resource}"
    return Verdict(resource, title, tuple(_about_loading(evidence, loader, stages, use)))


def _loader_bottleneck(evidence: Evidence, stages: Stages | None, use: SteadyUse | None) -> str:
    """Return what slows the loader down: "disk", "network", or "data" if it is the loader's own work.

    Without stages it is not known how much of a batch's time is reading, and only iowait can show a slow disk.
    """
    reading = stages.read / stages.seconds if stages is not None else None
    environment = evidence.surroundings
    remote = environment is not None and is_network(environment.filesystem)
    if reading is not None and reading < 0.5:
        return "data"
    if remote and reading is not None:
        return "network"
    if use is not None and use.waiting >= 0.2:
        return "disk"
    if (
        reading is not None and environment is not None and environment.rotational
    ):  # reading takes half of the time or more here
        return "disk"
    return "data"


def _about_loading(
    evidence: Evidence, loader: LoaderFacts | None, stages: Stages | None, use: SteadyUse | None
) -> list[str]:
    """Return sentences on the loader's workers, the idle cores and the costliest stage."""
    if loader is None:
        return ["the batches come from something that is no DataLoader"]
    details, cores = [], evidence.machine.cores
    if not loader.num_workers:
        details.append("the loader has no workers: loading and computing take turns in one process")
        if use is not None and _room(cores, use) >= 0.5:
            details.append(f"the training used {use.cpu:.1f} of {cores} cores: workers have room")
    elif use is not None and use.workers >= _BUSY * loader.num_workers:
        full = _room(cores, use) < 0.5
        advice = "the cores are full: more workers would not help" if full else "more workers have room"
        details.append(f"its {loader.num_workers} workers compute all the time ({use.workers:.1f} cores); {advice}")
    elif use is not None:
        details.append(
            f"its {loader.num_workers} workers used {use.workers:.1f} cores: they wait themselves, or start again"
        )
    if stages is not None:
        most = max(stages.by_name, key=stages.by_name.__getitem__)
        details.append(f"{percent(stages.by_name[most] / stages.seconds)} of a batch's making is {STAGE_WORDS[most]}")
    return details


def _room(cores: int, use: SteadyUse) -> float:
    """Return the idle CPU in cores, by the training's own use or by the whole machine's, whichever leaves less."""
    return min(cores - use.cpu, cores * (1.0 - use.machine))


def _transfer(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    share = percent(shares["transfer"])
    return Verdict("transfer", f"transfer-bound: {share} of the step are copies from the CPU to the GPU")


def _network(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    processes = evidence.flags.distributed
    details = [f"{processes} processes add up their gradients: the slowest of them, or the network, is waited for"]
    if use is not None and use.net_out > 1e6:
        details.append(f"the machine sent {use.net_out / 1e6:.0f} MB/s meanwhile")
    return Verdict(
        "network", f"network-bound: {percent(shares['sync'])} of the step wait for the gradient sync", tuple(details)
    )


def _validation(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    return Verdict(
        "validation",
        f"validation takes {percent(shares['validation'])} of the time",
        ("it gets faster by validating less often, on fewer batches, or in bigger ones",),
    )


def _checkpoint(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    saves = evidence.events_of("save")
    details = (f"at {saves[0].where}",) if saves and saves[0].where else ()
    share = percent(shares["checkpoint"])
    return Verdict(
        "checkpoint", f"checkpoints take {share} of the time: the loop stands while they are written", details
    )


def _other(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    """Return the verdict of a step that is mostly the script's own code between loading and computing."""
    if on_gpu(evidence):  # kernels are launched asynchronously, so their time may show up as waiting in any code
        return _gpu_waits(evidence, shares, use)
    share = percent(shares["other"])
    details = []
    lengths = evidence.step_seconds
    total = shares["other"] * sum(lengths) / len(lengths) * evidence.steps if lengths else 0.0
    events = evidence.events_of(*{event.kind for event in evidence.events} - {"save"})  # "save" counts as checkpoint
    if events and events[0].seconds >= _TELLING * total:
        details.append(f"of what was timed there, most went to {events[0].kind} at {events[0].where}")
    details.append("it is neither loading, forward, backward nor optimizer, and runs on one core")
    return Verdict(
        "none", f"under-parallelised: {share} of the step is the script's own code in the loop", tuple(details)
    )


# -- computing -----------------------------------------------------------------------------------------------


def _computing(evidence: Evidence, shares: Mapping[str, float], use: SteadyUse | None) -> Verdict:
    """Return the verdict of a step that mostly computes, by how busy the cores are."""
    if on_gpu(evidence):
        return _gpu_waits(evidence, shares, use)
    computing = sum(shares.get(name, 0.0) for name in _COMPUTING)
    cores, threads = evidence.machine.cores, evidence.flags.threads
    fills = f"forward, backward and optimizer take {percent(computing)} of the step"
    if use is None:
        return Verdict("cpu", f"CPU-bound: {fills}", ("how many cores that kept busy was not seen",))
    uses = f"the training used {use.cpu:.1f} of {cores} cores"
    if use.cpu >= _BUSY * cores:
        return Verdict("cpu", f"CPU-bound: {fills}, and {uses}", _idle_gpu(evidence))
    if use.machine >= _FULL_MACHINE and use.others >= max(use.cpu, cores / 2):
        title = f"short of CPU: others fill the machine, and the training got {use.cpu:.1f} of {cores} cores"
        return Verdict("cpu", title, (fills, *_idle_gpu(evidence)))
    if use.machine >= _FULL_MACHINE:
        return Verdict("cpu", f"CPU-bound: {fills}, and no core is idle", (uses, *_idle_gpu(evidence)))
    return _too_few_threads(evidence, shares, use, uses, threads)


def _too_few_threads(
    evidence: Evidence, shares: Mapping[str, float], use: SteadyUse, uses: str, threads: int
) -> Verdict:
    """Return the verdict of a step that computes on the CPU while cores are idle."""
    cores, data = evidence.machine.cores, shares.get("data", 0.0)
    loader = evidence.train_loader
    # Below the bound of "data" (0.30), but without workers all computing stands still for that time.
    if data >= 0.15 and loader is not None and not loader.num_workers:
        return Verdict(
            "none",
            f"under-parallelised: loading ({percent(data)}) and computing take turns",
            (uses, "the loader has no workers"),
        )
    if 0 < threads < cores:
        point = f"computing runs on {threads} thread{'s' * (threads != 1)}"
        detail = f"{uses}; torch was given {threads} (OMP_NUM_THREADS or set_num_threads)"
    else:
        point = "the operators are too small to be shared among the cores"
        detail = f"{uses}, with {threads} threads"
    return Verdict("none", f"under-parallelised: {point}", (detail, *_idle_gpu(evidence)))


def _idle_gpu(evidence: Evidence) -> tuple[str, ...]:
    if not evidence.machine.gpus:
        return ()
    return (f"the model is on the CPU, and {evidence.machine.gpus[0]} has nothing to do",)


_BY_PHASE = {
    "data": _data,
    "transfer": _transfer,
    "sync": _network,
    "validation": _validation,
    "checkpoint": _checkpoint,
    "other": _other,
}
