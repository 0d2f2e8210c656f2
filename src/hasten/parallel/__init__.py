"""Training in several processes: on this machine, or on several machines where torchrun or srun starts them.

Tested with CPU processes over gloo only: two GPUs, NCCL and two machines were never available.
"""

from hasten.parallel.ddp import (
    Exchange,
    Step,
    before_backward,
    explained,
    manual_forward,
    sync_batchnorm,
    with_gradients,
    wrap,
)
from hasten.parallel.devices import Devices, choose_devices
from hasten.parallel.launch import ending, forward, guard, open_world, size_of
from hasten.parallel.place import RankPlace, find_place
from hasten.parallel.rank_agreement import refuse_unlike
from hasten.parallel.shares import agree_on_batches, distributed_loader, set_epoch
from hasten.parallel.spawn import spawn
from hasten.parallel.world import World

__all__ = [
    "Devices", "Exchange", "RankPlace", "Step", "World", "agree_on_batches", "before_backward", "choose_devices",
    "distributed_loader", "ending", "explained", "find_place", "forward", "guard", "manual_forward", "open_world",
    "refuse_unlike", "set_epoch", "size_of", "spawn", "sync_batchnorm", "with_gradients", "wrap",
]  # fmt: skip
