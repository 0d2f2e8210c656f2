"""Predict the cost of a step under each strategy: seconds, exposed communication, bytes sent, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hasten.planner.collectives import Network, all_gather, all_reduce, broadcast, reduce_scatter, ring_bytes
from hasten.planner.job import Job
from hasten.planner.overlap import (
    BUCKET,
    FIRST_BUCKET,
    RUN_BUCKET,
    behind_backward,
    buckets,
    loads,
    unit_backward,
    unit_forward,
)

_POWERSGD_RANK = 2  # DDPStrategy's default
_MEETING = 88  # bytes of the message in hasten.parallel.meeting


@dataclass(frozen=True)
class Cost:
    """Cost of an optimizer step on one of several devices.

    Attributes:
        step: Seconds of the step.
        exchange: Seconds of communication.
        waits: Seconds of communication that do not overlap with computation.
        sent: Bytes that each device sends.
        memory: Bytes of parameters, gradients, optimizer state and communication buffers, without activations.
    """

    step: float
    exchange: float
    waits: float
    sent: float
    memory: int


def after_backward(job: Job, ranks: int, network: Network) -> Cost:
    """Return the cost under `hasten run --devices`: after each backward, a small message, then all gradients.

    Accumulated gradients are sent after each backward, not once per step.
    """
    sizes = _sums(job, RUN_BUCKET, RUN_BUCKET)
    exchange = job.batches * sum(all_reduce(size, ranks, network) for size in (_MEETING, *sizes))
    memory = job.parameters + job.gradients + job.states + round(max(sizes))
    return Cost(job.step + exchange, exchange, exchange, job.batches * ring_bytes(job.gradients, ranks), memory)


def ddp(job: Job, ranks: int, network: Network) -> Cost:
    """Return the cost under DistributedDataParallel: buckets are sent during the backward (Li et al. 2020)."""
    return _ddp(job, ranks, network, 1.0)


def ddp_16_bits(job: Job, ranks: int, network: Network) -> Cost | None:
    """Return the cost under DDP with `gradient_compression="bf16"` or "fp16": half the bytes, and a copy of them.

    The time of the two conversions is not modeled. None if gradients are in 16 bits already.
    """
    return _ddp(job, ranks, network, 2 / job.number) if job.number > 2 else None


def _ddp(job: Job, ranks: int, network: Network, fraction: float) -> Cost:
    """Return the cost under DDP if gradients are sent in `fraction` of their bytes."""
    sizes = [size * fraction for size in _sums(job, FIRST_BUCKET, BUCKET)]
    exchange = sum(all_reduce(size, ranks, network) for size in sizes)
    waits = behind_backward(sizes, lambda size: all_reduce(size, ranks, network), job.backward)
    copy = round(job.gradients * fraction) if fraction < 1 else 0
    memory = job.parameters + job.gradients + job.states + copy
    return Cost(job.step + waits, exchange, waits, ring_bytes(job.gradients * fraction, ranks), memory)


def powersgd(job: Job, ranks: int, network: Network) -> Cost | None:
    """Return the cost under DDP with `gradient_compression="powersgd"`: two thin matrices per one (Vogels et al. 2019).

    Nothing overlaps: the step waits for each bucket. The time to compute the matrices is not modeled, so this is a
    lower bound. None if the shapes are not known.
    """
    if not job.shapes:
        return None
    exchange, numbers, wide = 0.0, 0, 0
    shapes = list(reversed(job.shapes))
    for bucket in buckets(job.sizes, FIRST_BUCKET, BUCKET):
        first_message = second_message = 0  # numbers of the two messages: P and what is not compressed, then Q
        for index in bucket:
            rows = shapes[index][0] if shapes[index] else 1
            numel = math.prod(shapes[index])
            columns = numel // max(1, rows)
            if len(shapes[index]) < 2 or _POWERSGD_RANK * (rows + columns) >= numel:
                first_message += numel
            else:
                first_message += _POWERSGD_RANK * rows
                second_message += _POWERSGD_RANK * columns
                wide += numel
        exchange += sum(all_reduce(4 * part, ranks, network) for part in (first_message, second_message))
        numbers += first_message + second_message
    memory = job.parameters + job.gradients + job.states + 4 * wide  # PowerSGD stores the errors in float32
    return Cost(job.step + exchange, exchange, exchange, ring_bytes(4 * numbers, ranks), memory)


def zero1(job: Job, ranks: int, network: Network) -> Cost:
    """Return the cost under DDP with `shard_optimizer=True`: ZeRO stage 1 (Rajbhandari et al. 2020).

    As in `hasten.parallel.zero`, each device steps the parameters that it owns; then the devices broadcast theirs, one
    after another. Bytes that a device forwards within another's broadcast are not in `sent`.
    """
    plain = ddp(job, ranks, network)
    total = job.gradients // job.number
    owned = loads(map(math.prod, job.shapes), ranks) if job.shapes else [math.ceil(total / ranks)] * ranks
    largest = max(owned) / total
    sending = sum(broadcast(numbers * job.number, ranks, network) for numbers in owned)
    memory = job.parameters + job.gradients + round(job.states * largest) + max(owned) * job.number
    step = plain.step - job.optimizer * (1 - largest) + sending
    return Cost(step, plain.exchange + sending, plain.waits + sending, plain.sent + max(owned) * job.number, memory)


def fsdp(job: Job, ranks: int, network: Network) -> Cost | None:
    """Return the cost under torch's `fully_shard` (Zhao et al. 2023): units are gathered while others compute.

    Units are assumed to be equal. The root unit remains gathered between forward and backward. None if the number of
    units is not known.
    """
    if job.units is None:
        return None
    units = job.units
    wide = max(4, job.number)  # FSDPStrategy averages gradients of 16 bits in float32
    gather = all_gather(job.parameters / units, ranks, network)
    reduce = reduce_scatter(job.gradients / job.number * wide / units, ranks, network)
    forward = unit_forward(units, job.forward, gather)
    waiting = unit_backward(units, job.backward, gather, 0.0)  # while gradients are accumulated
    last = unit_backward(units, job.backward, gather, reduce)
    waits = job.batches * (forward - job.forward) + (job.batches - 1) * waiting + last - job.batches * job.backward
    gathers = job.batches * (2 * units - 1)
    share = (ranks - 1) / ranks
    sent = share * (gathers * job.parameters / units + job.gradients / job.number * wide)
    # Gathered at once: the root, the unit that computes, and the next one. Unsharded gradients at once: of one unit,
    # and of the one that is being reduced.
    gathered = min(3, units) / units * job.parameters + min(2, units) / units * job.gradients
    accumulated = job.gradients if job.batches > 1 else job.gradients / ranks  # unsharded while they are accumulated
    memory = math.ceil((job.parameters + job.states) / ranks + accumulated + gathered)
    step = job.step + waits - job.optimizer * share
    return Cost(step, gathers * gather + units * reduce, waits, sent, memory)


def _sums(job: Job, first: int, later: int) -> list[float]:
    """Return the bytes of each bucket; of equal size, after the first, if the shapes are not known."""
    sizes = job.sizes
    if job.shapes:
        return [float(sum(sizes[index] for index in bucket)) for bucket in buckets(sizes, first, later)]
    if job.gradients <= first:
        return [float(job.gradients)]
    count = math.ceil((job.gradients - first) / later)
    return [float(first)] + [(job.gradients - first) / count] * count


STRATEGIES: dict[str, Callable[[Job, int, Network], Cost | None]] = {
    "run": after_backward,
    "ddp": ddp,
    "ddp-16-bit": ddp_16_bits,
    "ddp-powersgd": powersgd,
    "zero1": zero1,
    "fsdp": fsdp,
}
