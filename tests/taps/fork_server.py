"""Runs training scripts in forks of one process that has torch imported already, which saves seconds a script."""

# ruff: noqa: E402 - nothing is collected while all this is imported
from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

gc.disable()

# Imported for the forks; an optimizer's first step imports torch._dynamo.
import numpy  # noqa: F401
import PIL.Image
import torch._dynamo

import hasten.taps.session  # noqa: F401
from hasten.doctor.observe import OBSERVERS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from hasten.cli import main
from hasten.taps.no_compile import codes_of_hasten
from hasten.techniques import CATALOGUE
from tests.check import planted
from tests.taps.forked_pythons import forked_pythons, run
from tests.taps.scripts import HASTEN
from tests.taps.serving import Job, serve

planted.register()
PIL.Image.preinit()  # its formats
# What hasten imports only where it is needed: 0.05 s in each fork, of which there are a thousand.
for name in (
    "hasten.check.listen",
    "hasten.check.noise",
    "hasten.check.witness",
    "hasten.cli.app",
    "hasten.cli.launch",
    "hasten.data.worker_pass",
    *OBSERVERS,
    "hasten.doctor.listen",
    "hasten.parallel.agent",
    "hasten.taps.boot",
    "hasten.taps.data",
    "hasten.taps.modules",
    "hasten.taps.optimizers",
    "hasten.taps.results",
    "hasten.taps.sandbox",
    "hasten.taps.no_compile",
    "hasten.techniques.compute.fused_update",
    "hasten.techniques.recompute.forward",
    "hasten.tuner.check",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "psutil",
    "torch.distributed.run",
    "torch.utils.serialization",
    # What a torch.compile imports, a second of it.
    "functorch.compile",
    "torch._dynamo.backends.debugging",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_aot",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.compiler_bisector",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.experimental._attention",
    "torch.export._trace",
    "torch.fx.experimental.validator",
):
    importlib.import_module(name)
for name in ("torch._functorch._aot_autograd.subclass_codegen", "torch.profiler._cupti_monitor"):
    if importlib.util.find_spec(name):  # torch 2.9 has none
        importlib.import_module(name)
torch._dynamo.list_backends()  # looks into every installed package for them, once
list(codes_of_hasten())  # found once; each fork marks them


def _prepare(job: Job) -> Callable[[], object]:
    """Turn this process into one that Python, or `hasten run`, started for the script; or a person, for a command."""
    if "words" in job:
        return functools.partial(_start, job["words"])
    sys.path[0] = job["folder"]
    exec(job["before"], {})
    if job["hasten"]:
        os.environ["HASTEN_RUN"] = job["hasten"]
        from hasten.taps.boot import boot

        boot()
    return functools.partial(runpy.run_path, job["script"], run_name="__main__")


def _start(words: list[str]) -> None:
    """Do what a command line does that a person typed; what it starts are forks of this process."""
    for technique in planted.TECHNIQUES:
        del CATALOGUE[technique.name]
    with forked_pythons():
        if words[0] == HASTEN:
            sys.argv = words
            main()
        run(words[1:], os.environ)


if __name__ == "__main__":
    serve(_prepare)
