"""Read this process's place among the ranks of a training from its launcher's environment variables. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hasten.errors import HastenError

LAUNCHED = "HASTEN_LAUNCHED"
"""Set by hasten's own launchers to the port of the store that their main process serves.

If MASTER_PORT differs from it, the variable is inherited and outdated: a rank started another launcher, which set RANK,
MASTER_PORT and the others for its own processes.
"""


@dataclass(frozen=True)
class RankPlace:
    """One process among those of a training.

    `rank` and `size` count over all machines, `local_rank` and `local_size` on this one; the ranks meet at `address`
    and `port`. `launcher` is "hasten", "slurm", or "torchrun" (anything that sets RANK and WORLD_SIZE as torchrun
    does).
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    node_rank: int
    num_nodes: int
    address: str
    port: int
    launcher: str


def find_place(environ: Mapping[str, str] | None = None) -> RankPlace | None:
    """Return this process's place, from its environment; None if no launcher started it.

    Args:
        environ: Environment to read instead of `os.environ`.

    Raises:
        HastenError: The variables contradict each other or are not numbers.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        place = _torchrun(environ)
    elif "SLURM_PROCID" in environ and _started_by_srun(environ):
        place = _slurm(environ)
    else:
        return None
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size):
        raise HastenError(
            f"This process is rank {place.rank} of {place.size} (on its machine: {place.local_rank} of "
            f"{place.local_size}), says the environment of its launcher ({place.launcher}).",
            "Ranks count from 0. Unset RANK, WORLD_SIZE and LOCAL_RANK if they are left over from another run.",
        )
    if not 0 < place.port < 65536:
        raise HastenError(
            f"The launcher ({place.launcher}) says that the ranks meet at port {place.port}, which is none.",
            "Give torchrun --standalone (one machine) or a --master-port of its own, or set MASTER_PORT.",
        )
    return place


def _torchrun(environ: Mapping[str, str]) -> RankPlace:
    """Return the place that torchrun's variables describe."""
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    # Some launchers set only the variables that torch itself reads: assume one machine, with a process per device.
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
    local_rank = _number(environ, "LOCAL_RANK", rank % max(local_size, 1))
    return RankPlace(
        rank=rank,
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        node_rank=_number(environ, "GROUP_RANK", rank // max(local_size, 1)),
        num_nodes=-(-size // max(local_size, 1)),
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environ, "MASTER_PORT", 29500),
        launcher="hasten" if LAUNCHED in environ and environ[LAUNCHED] == environ.get("MASTER_PORT") else "torchrun",
    )


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process, as one of several tasks: a batch script's shell has no step."""
    step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return step and int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))) > 1


def _slurm(environ: Mapping[str, str]) -> RankPlace:
    """Return the place that SLURM's variables describe."""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = _number(environ, "SLURM_JOB_ID", 0)
    step = int(environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0")))
    node, local_rank = _number(environ, "SLURM_NODEID", 0), _number(environ, "SLURM_LOCALID")
    return RankPlace(
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=local_rank,
        size=size,
        local_size=max(_tasks_on(node, environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or size // nodes, local_rank + 1),
        node_rank=node,
        num_nodes=nodes,
        address=environ.get("MASTER_ADDR") or first_host(listed),
        # Every task must compute the same port without communication, but two steps of one job different ones.
        port=_number(environ, "MASTER_PORT", 15000 + (job * 7 + step) % 15000),
        launcher="slurm",
    )


def _tasks_on(node: int, listed: str) -> int:
    """Return a node's number of tasks from SLURM's list: `4(x2),1` means that nodes 0 and 1 have 4, node 2 has 1.

    Returns 0 if the node is not in the list.
    """
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        if node < int(nodes or 1):
            return int(tasks)
        node -= int(nodes or 1)
    return 0


def first_host(nodes: str) -> str:
    """Return the first name in a SLURM host list: `gpu07` for `gpu[07-09,12],login`."""
    first = re.split(r",(?![^\[]*\])", nodes.strip())[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable's number, or the default if it is not set.

    Raises:
        HastenError: It is not a number, or not set and without a default.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        state = "is not set" if text is None else f"is {text!r}"
        raise HastenError(
            f"The environment says that a launcher started this process, but {name} {state}.",
            f"Set {name} to a whole number, or unset RANK, WORLD_SIZE and LOCAL_RANK to run without a launcher.",
        ) from None
