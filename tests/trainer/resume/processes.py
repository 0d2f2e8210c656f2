"""Trainings in processes of their own, forked from one that has imported everything, and so quick to start."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # while torch and hasten are imported: they stay

import torch

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """One training in its own process."""

    def __init__(self, nursery, pid, log):
        self.nursery, self.pid, self.log = nursery, pid, log

    def wait(self):
        """The exit code as a shell counts it, or minus the signal that killed it."""
        return self.nursery.ask({"wait": self.pid})

    def ended(self):
        """Whether it is over; it is there to be waited for all the same."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def said(self):
        return self.log.read_text()

    def kill(self, number):
        os.kill(self.pid, number)


class Nursery:
    """Forks trainings."""

    def __init__(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        self._logs = 0

    def ask(self, question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, spec):
        root = Path(spec["root"])
        root.mkdir(parents=True, exist_ok=True)
        self._logs += 1
        log = root.parent / f"log-{os.getpid()}-{self._logs}.txt"
        return Process(self, self.ask({"start": spec, "log": str(log), "streams": spec.get("streams")}), log)

    def run(self, spec, code=0):
        process = self.start(spec)
        found = process.wait()
        assert found == code, f"exit code {found}, not {code}:\n{process.said()}"
        return process

    def outcome(self, spec):
        """What a training that ends well leaves."""
        out = Path(spec["root"]).parent / "outcome.pt"
        self.run({**spec, "out": str(out)})
        return torch.load(out, weights_only=False)

    def close(self):
        self._process.stdin.close()
        self._process.kill()  # all its trainings are over; a fork of pytest may still hold the pipe, so no end is seen
        self._process.wait(30)


def assert_same(one, other, where="outcome"):
    """Equal to the last bit."""
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        off = (one.double() - other.double()).abs().max() if one.numel() else 0
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), f"{where} differs by {off}"
    elif isinstance(one, dict):
        assert set(one) == set(other), f"{where}: {sorted(map(str, set(one) ^ set(other)))}"
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert one == other, f"{where}: {one!r} is not {other!r}"


def _spoil(streams):
    """Make stdout and stderr what nobody can write to."""
    if streams == "full disk":
        nowhere = os.open("/dev/full", os.O_WRONLY)
    elif streams == "nobody reads":
        reader, nowhere = os.pipe()
        os.close(reader)
    elif streams == "closed files":
        sys.stdout.close()
        sys.stderr.close()
        return
    else:
        return
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _serve():
    import warnings

    from tests.quick_end import freeze, run_and_exit
    from tests.trainer.resume.trainings import run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tempfile

        with tempfile.TemporaryDirectory() as folder:  # all that is imported late is imported here
            sys.stdout.flush()
            kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
            errors = os.dup(2)
            os.dup2(null, 1)
            os.dup2(null, 2)
            run({"root": folder, "checkpoints": [{}], "flags": {"max_steps": 2}})
            os.dup2(kept, 1)
            os.dup2(errors, 2)
    gc.collect()
    freeze()
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                os.setsid()
                log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                nothing = os.open(os.devnull, os.O_RDONLY)
                for fd, ours in ((nothing, 0), (log, 1), (log, 2)):
                    os.dup2(fd, ours)
                _spoil(question["streams"])
                # Who starts the tests in the background has Ctrl-C ignored in them; a terminal has not.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                run_and_exit(functools.partial(run, question["start"]))
        print(json.dumps(answer), flush=True)
    os._exit(0)  # without taking torch apart


if __name__ == "__main__":
    _serve()
