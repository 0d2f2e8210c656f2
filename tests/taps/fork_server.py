"""Runs training scripts in forks of one process that has torch imported already, which saves seconds a script."""

# ruff: noqa: E402 - nothing is collected while all this is imported
from __future__ import annotations

import functools
import gc
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

gc.disable()

# Imported for the forks; an optimizer's first step imports torch._dynamo.
import numpy  # noqa: F401
import PIL.Image
import torch._dynamo  # noqa: F401

import hasten.taps.session  # noqa: F401
from hasten.doctor.observe import OBSERVERS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.check import planted
from tests.taps.serving import Job, serve

planted.register()
PIL.Image.preinit()  # its formats
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
    "psutil",
    "torch.utils.serialization",
):
    importlib.import_module(name)


def _prepare(job: Job) -> Callable[[], object]:
    """Turn this process into one that Python, or `hasten run`, started for the script."""
    sys.path[0] = job["folder"]
    exec(job["before"], {})
    if job["hasten"]:
        os.environ["HASTEN_RUN"] = job["hasten"]
        from hasten.taps.boot import boot

        boot()
    return functools.partial(runpy.run_path, job["script"], run_name="__main__")


if __name__ == "__main__":
    serve(_prepare)
