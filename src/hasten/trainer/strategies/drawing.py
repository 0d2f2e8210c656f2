"""Random numbers of processes that compute one batch together."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from hasten.data import rng
from hasten.parallel import World


def draw_alike(group: Any, world: World) -> None:
    """Set the RNG states of all processes in a group to the first one's, for dropout, shuffling and workers' seeds."""
    import torch.distributed as dist

    first = dist.get_global_rank(group, 0)
    of_device: Any = getattr(torch, world.device.type) if world.device.type != "cpu" else None
    box = [(rng.state(()), None if of_device is None else of_device.get_rng_state(world.device))]
    dist.broadcast_object_list(box, src=first, group=group)
    if world.rank != first:
        rng.restore(box[0][0])
        if of_device is not None:  # separate from `rng.state`: the first process's GPU has another index
            of_device.set_rng_state(box[0][1], world.device)


@contextlib.contextmanager
def drawn_apart(device: torch.device, step: int, stage: int) -> Iterator[None]:
    """Return a context in which a pipeline stage draws its own random numbers, as different layers of a model do.

    The RNG states that the processes share are restored afterwards. The seed follows from the shared state, the step
    and the stage, so a resumed training draws the same numbers.

    Args:
        device: Device of the stage.
        step: Number of batches trained before.
        stage: Number of the stage.
    """
    common = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed((common << 28) ^ (step * 4096 + stage))
        yield
