"""Serves jobs, each in a fork of a process that has imported what they need: it saves them the seconds that takes.

Reads one job a line from stdin, answers each with the exit code of the process that ran it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tests.quick_end import freeze, run_and_exit

Job = dict[str, Any]


def serve(prepare: Callable[[Job], Callable[[], object]]) -> NoReturn:
    """Serve until stdin ends.

    Args:
        prepare: Makes the fork what the job says, and returns what runs in it.
    """
    gc.collect()
    freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(job)
            run_and_exit(prepare(job))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)  # without taking torch apart


def _become(job: Job) -> None:
    """Give this process the streams, the folder, the arguments and the environment variables of its own."""
    for number, name in ((0, job.get("in", os.devnull)), (1, job["out"]), (2, job["err"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0)  # noqa: SIM115
    os.chdir(job["folder"])
    sys.argv = job["words"] if "words" in job else [job["script"], *job["arguments"]]
    os.environ.update(job.get("variables", {}))
