"""Predict a training on N devices: step time, memory and cost under each strategy, and the assumptions made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.planner.collectives import Network
from hasten.planner.job import Job, JobOverrides, job_of
from hasten.planner.strategies import STRATEGIES, Cost

SCHEMA = "hasten-cluster-plan/1"
MEASURED = "measured"
ALWAYS = (
    "a device computes as fast for each sample as the one that was measured, and loses nothing to the messages beside",
    "data comes to each device as fast as it came to one",
    "gradients become ready in proportion to their bytes; all links are alike; no device is slower than others",
    "an optimizer that steps a share (zero1, fsdp) takes its share of the time",
    "to pack gradients (run, zero1) and to compress them takes no time: run and ddp-powersgd take more than is said",
    "a step is without validation and checkpoints, as it was measured",
)
"""Assumptions of every plan."""


@dataclass(frozen=True)
class Row:
    """An optimizer step on a number of devices, under one strategy. None: not known.

    Attributes:
        devices: Number of devices.
        strategy: One of `STRATEGIES`, or "measured": the evidence's own step.
        step: Seconds of a step.
        exchange: Seconds of communication in a step.
        waits: Seconds of communication that do not overlap with computation.
        sent_bytes: Bytes that each device sends in a step.
        memory_bytes: Peak memory of a device.
        fits: Whether the peak is within the device's memory.
        efficiency: Samples per second, relative to as many times those of one device.
        samples_per_second: Of all devices together.
        seconds: Seconds for the requested number of samples, in whole steps.
        cost: Cost of that time, in the price's currency.
    """

    devices: int
    strategy: str
    step: float
    exchange: float
    waits: float
    sent_bytes: int
    memory_bytes: int | None
    fits: bool | None
    efficiency: float
    samples_per_second: float | None
    seconds: float | None
    cost: float | None


@dataclass(frozen=True)
class ClusterPlan:
    """A prediction for several numbers of devices, with its inputs and its assumptions."""

    job: Job
    network: Network
    batch: str
    memory: int | None
    price: float | None
    rows: tuple[Row, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]


def plan(
    evidence: Evidence,
    devices: Sequence[int],
    network: Network,
    overrides: JobOverrides,
    memory: int | None = None,
    price: float | None = None,
) -> ClusterPlan:
    """Predict how a training that was measured on one device would run on several.

    Args:
        evidence: Evidence of a run on one device.
        devices: Numbers of devices to predict for.
        network: Network between the devices.
        overrides: Values that the evidence lacks.
        memory: Memory of a device in bytes.
        price: Price of a device per hour.

    Raises:
        HastenError: The evidence does not suffice, or the batch cannot be divided among any of the numbers of devices.
    """
    job, assumed = job_of(evidence, overrides)
    rows = [_row(job, job, 1, MEASURED, _measured(job), memory, price)]
    left_out: dict[str, None] = {}
    for count in sorted(set(devices) - {1}):
        try:
            share = job.shared(count) if overrides.batch == "global" else job
        except HastenError as error:
            left_out[error.message] = None
            continue
        for name, cost_of in STRATEGIES.items():
            cost = cost_of(share, count, network)
            if cost is None:
                left_out[_why_left_out(name)] = None
            else:
                rows.append(_row(job, share, count, name, cost, memory, price))
    if len(rows) == 1 and left_out:
        raise HastenError("; ".join(left_out), "name fewer devices, or --batch per-device")
    return ClusterPlan(
        job,
        network,
        overrides.batch,
        memory,
        price,
        tuple(rows),
        (*assumed, *_job_assumptions(job, overrides), *ALWAYS),
        (*left_out,),
    )


def _measured(job: Job) -> Cost:
    """Return the cost of the measured step: one device, no communication."""
    return Cost(job.step, 0.0, 0.0, 0.0, job.parameters + job.gradients + job.states)


def _row(
    single: Job, share: Job, devices: int, strategy: str, cost: Cost, memory: int | None, price: float | None
) -> Row:
    """Return a row of the plan.

    Args:
        single: The job on one device.
        share: The job of each of the devices; `single` itself under weak scaling.
        devices: Number of devices.
        strategy: Name of the strategy.
        cost: Cost of a step.
        memory: Memory of a device in bytes.
        price: Price of a device per hour.
    """
    peak = None if share.beside is None else cost.memory + share.beside
    if strategy == MEASURED:
        peak = single.peak
    # When devices share a batch, a step takes the batch's samples, also if the shares are uneven: not the number of
    # devices times the largest share.
    scale = 1 if share is not single else devices
    samples = single.batch_size * single.batches * scale if single.batch_size else None
    rate = samples / cost.step if samples else None
    seconds = math.ceil(single.samples / samples) * cost.step if samples and single.samples else None
    return Row(
        devices=devices,
        strategy=strategy,
        step=cost.step,
        exchange=cost.exchange,
        waits=cost.waits,
        sent_bytes=round(cost.sent),
        memory_bytes=peak,
        fits=None if peak is None or memory is None else peak <= memory,
        efficiency=single.step / cost.step * scale / devices,
        samples_per_second=rate,
        seconds=seconds,
        cost=None if seconds is None or price is None else seconds / 3600 * devices * price,
    )


def _why_left_out(strategy: str) -> str:
    """Return why a strategy was left out."""
    return {
        "ddp-16-bit": "ddp-16-bit: gradients have 16 bits already",
        "ddp-powersgd": "ddp-powersgd: the evidence has no shape of each parameter",
        "fsdp": "fsdp: its units are not known. Say them, the blocks and one for the rest: --units 13; or take evidence"
        " that holds the layers: hasten doctor --evidence FILE SCRIPT",
    }[strategy]


def _job_assumptions(job: Job, overrides: JobOverrides) -> list[str]:
    """Return the assumptions that are specific to this job."""
    lines = []
    if overrides.batch == "global":
        lines.append("a share of a batch takes its share of the time to load, copy and compute: small ones take more")
        if job.beside is not None:
            portion = "its share of" if job.on_gpu else "all of"
            lines.append(f"a share of a batch needs {portion} the memory beside parameters, gradients and states")
        if job.batch_size is None:
            lines.append("every number of devices can share the batch: its size is not known (--batch-size)")
    if job.units is not None:
        lines.append(f"FSDP has {job.units} units of equal size")
    if job.beside is None:
        lines.append("memory is not planned: the evidence has no peak (--activations 4GiB)")
    return lines


def as_json(plan: ClusterPlan, source: str) -> dict[str, Any]:
    """Return a plan as plain data, for a JSON file. Times are in seconds, sizes in bytes; null: not known.

    Args:
        plan: The plan.
        source: Name of the evidence.
    """
    return {
        "schema": SCHEMA,
        "evidence": source,
        "measured": {**asdict(plan.job), "step": plan.job.step},
        "network": asdict(plan.network),
        "batch": plan.batch,
        "memory_bytes": plan.memory,
        "price": plan.price,
        "rows": [asdict(row) for row in plan.rows],
        "assumed": list(plan.assumed),
        "left_out": list(plan.left_out),
    }
