"""`hasten run --devices`: run a script written for one device on several devices."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hasten import messages
from hasten.cli.command import BATCHES, LAUNCHERS, process_arguments
from hasten.cli.launch import RunOptions, prepared
from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.plan import DEFAULT_NAME
from hasten.taps.config import RankOptions


@dataclass(frozen=True)
class Devices:
    """The options of `hasten run` about several devices and machines, as typed."""

    devices: str
    accelerator: str
    batch: str
    nodes: int
    rdzv_endpoint: str
    rdzv_conf: str

    def wanted(self) -> bool:
        """Return whether any of these options differs from its default."""
        return self != Devices("", "auto", "global", 1, "", "")

    def check(self) -> None:
        """Check the options as far as that is possible without torch.

        Raises:
            HastenError: An option is invalid, or needs another one.
        """
        if not self.devices:
            raise HastenError("--devices is missing", "say on how many devices of each machine: --devices 4")
        if self.accelerator not in {"auto", "cpu", "gpu", "cuda"}:
            raise HastenError(f"--accelerator {self.accelerator}: not known", "say gpu or cpu")
        if self.batch not in BATCHES:
            raise HastenError(f"--batch {self.batch}: not known", f"say {' or '.join(BATCHES)}")
        if self.nodes > 1 and not re.fullmatch(r"\S+:\d+", self.rdzv_endpoint):
            raise HastenError(
                f"--nodes {self.nodes} needs --rdzv-endpoint HOST:PORT",
                "name one of the machines, and a port that is free there: --rdzv-endpoint node1:29500",
            )
        if self.nodes == 1 and self.rdzv_endpoint:
            raise HastenError(
                "--rdzv-endpoint is for --nodes 2 and more", "leave it out: one machine finds its own port"
            )
        self.conf()

    def conf(self) -> dict[str, str]:
        """Return the settings of the rendezvous, by name.

        Raises:
            HastenError: A setting has no value.
        """
        pairs = [pair.partition("=") for pair in self.rdzv_conf.split(",") if pair]
        if wrong := [name for name, equals, _ in pairs if not equals]:
            raise HastenError(f"--rdzv-conf {self.rdzv_conf}: {wrong[0]} has no value", "write is_host=1,timeout=300")
        return {name.strip(): value.strip() for name, _, value in pairs}


def spread(command: list[str], how: RunOptions, wide: Devices) -> int:
    """Run the training on several devices; return its exit code.

    Raises:
        HastenError: Options are wrong or exclude each other, the script cannot be run this way, or a rank failed.
    """
    wide.check()
    if how.auto or how.replay:
        raise HastenError(
            "--auto and --replay search in one process: they exclude --devices",
            "find the plan on one device, and run it with --devices and --plan",
        )
    if command and Path(command[0]).name in LAUNCHERS:
        raise HastenError(f"{command[0]} starts processes itself", f"leave out --devices, or {command[0]}")
    if process_arguments(command)[0] != sys.executable:
        raise HastenError(
            f"{command[0]} is not a Python script, and --devices carries those", "name the script itself, or -m MODULE"
        )
    if how.plan == Path(DEFAULT_NAME) and not how.plan.exists():
        how = dataclasses.replace(how, no_plan=True)  # --devices works without a plan, too
    folder = tempfile.mkdtemp(prefix="hasten-ranks-")
    try:
        return _run(command, how, wide, RankOptions(os.getpid(), folder, wide.batch, started=time.time()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], how: RunOptions, wide: Devices, options: RankOptions) -> int:
    """Choose the devices, prepare the environment and start the ranks; return the exit code."""
    # torch's native code would print its stack for each failed attempt to reach another machine.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from hasten.parallel import choose_devices  # with torch, which takes seconds to import
    from hasten.parallel.agent import Ranks, run

    chosen = choose_devices(wide.accelerator, "auto" if wide.devices == "all" else wide.devices)
    if len(chosen) * wide.nodes == 1:
        raise HastenError(
            f"--devices {wide.devices} is one device here: there is no other to share with", "leave it out"
        )
    if chosen[0].type == "cuda":
        options = dataclasses.replace(options, gpus=_visible([device.index for device in chosen]))
    cores = this_machine().cores
    if chosen[0].type == "cpu" and len(chosen) > cores and not how.quiet:
        messages.tell(f"hasten: {len(chosen)} processes take turns on the {cores} cores that there are")
    arguments, env = prepared(command, how, options)
    os.environ.update(env)  # which the ranks inherit
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // len(chosen))))
    return run(Ranks(arguments, len(chosen), wide.nodes, wide.rdzv_endpoint, options.folder, wide.conf()))


def _visible(indices: list[int]) -> tuple[str, ...]:
    """Return the CUDA_VISIBLE_DEVICES entry of each GPU: an index, or what the variable already has for it (a UUID)."""
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return tuple(visible[index] if visible else str(index) for index in indices)
