"""Runs training scripts in forks of one process that has torch imported already, which saves seconds a script.

Reads one job a line from stdin, answers each with the exit code of the process that ran it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

# Imported for the forks; an optimizer's first step imports torch._dynamo.
import numpy  # noqa: F401
import PIL.Image  # noqa: F401
import torch._dynamo  # noqa: F401

import hasten.taps.session  # noqa: F401
from hasten.doctor.observe import OBSERVERS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.check import planted
from tests.quick_end import freeze, run_and_exit

planted.register()
# What hasten imports only where it is needed: 0.05 s in each fork, of which there are a thousand.
for name in (
    "hasten.check.witness",
    "hasten.data.handed_over",
    *OBSERVERS,
    "hasten.taps.boot",
    "hasten.taps.data",
    "hasten.taps.modules",
    "hasten.taps.optimizers",
    "hasten.taps.results",
    "hasten.taps.sandbox",
    "hasten.taps.unseen",
    "hasten.techniques.compute.fused_update",
    "hasten.techniques.rerun.forward",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "torch.utils.serialization",
):
    importlib.import_module(name)


def _become(job: dict[str, Any]) -> None:
    """Turn this process into one that Python, or `hasten run`, started for the script."""
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0)  # noqa: SIM115
    os.chdir(job["folder"])
    sys.path[0] = job["folder"]
    sys.argv = [job["script"], *job["arguments"]]
    exec(job["before"], {})
    if job["hasten"]:
        os.environ["HASTEN_RUN"] = job["hasten"]
        from hasten.taps.boot import boot

        boot()


def main() -> None:
    """Serve until stdin ends."""
    freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(job)
            run_and_exit(functools.partial(runpy.run_path, job["script"], run_name="__main__"))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
