"""Random numbers of processes that work on one batch."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from hasten.data import rng
from hasten.parallel import World


def draw_alike(group: Any, world: World) -> None:
    """Give all processes of a group the random states of its first: dropout, shuffling, seeds of workers."""
    import torch.distributed as dist

    first = dist.get_global_rank(group, 0)
    of_device: Any = getattr(torch, world.device.type) if world.device.type != "cpu" else None
    box = [(rng.state(()), None if of_device is None else of_device.get_rng_state(world.device))]
    dist.broadcast_object_list(box, src=first, group=group)
    if world.rank != first:
        rng.restore(box[0][0])
        if of_device is not None:  # the first one's device has another number
            of_device.set_rng_state(box[0][1], world.device)


@contextlib.contextmanager
def drawn_apart(device: torch.device, step: int, stage: int) -> Iterator[None]:
    """Let a stage of a pipeline draw by itself within a step, as layers of one process do; the common states stay.

    What is drawn follows from the common state, the step and the stage: so also after a resume.

    Args:
        device: Of the stage.
        step: Batches that were trained before.
        stage: Its number.
    """
    common = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed((common << 28) ^ (step * 4096 + stage))
        yield
