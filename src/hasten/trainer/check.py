"""`Trainer.check`: compares training under a Trainer's techniques with the same training without them.

Each training runs in a fork of this process, so all start from the same module, loaders and random states, and none
changes them here. `hasten.check` decides which trainings to run and compares their records.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.check.listen import listen
from hasten.check.options import WitnessOptions
from hasten.check.result import CheckResult
from hasten.check.run import check_plan
from hasten.check.runs import FinishedRun, Techniques
from hasten.check.witness import Witness
from hasten.child import die_with_parent
from hasten.data import rng
from hasten.errors import HastenError
from hasten.plan import Plan
from hasten.taps.sandbox import confine
from hasten.trainer import steps
from hasten.trainer.checkpoint import CheckpointError, read
from hasten.trainer.config import sugar

if TYPE_CHECKING:
    from collections.abc import Callable

    from hasten.trainer.hooks import Hooks
    from hasten.trainer.trainer import Trainer

_TIMEOUT_SECONDS = 900.0  # a fork that takes longer counts as hung
_QUIET: dict[str, Any] = {
    "plan": None,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "devices": 1,
    "strategy": "auto",
    "fast_dev_run": False,
}


def check(trainer: Trainer, fit: dict[str, Any], batches: int, epochs: int, resume: bool) -> CheckResult:
    """Check a Trainer's techniques; see `Trainer.check`."""
    if torch.cuda.is_initialized():
        raise HastenError(
            "Trainer.check trains in copies of this process, and a copy of a process that has used the GPU cannot",
            "call it before anything touches the GPU, or use `hasten check` on the script",
        )
    importlib.import_module(
        "torch._dynamo"
    )  # once for all forks: an optimizer's first step imports it, which takes seconds
    resume = resume and bool(trainer.checkpoint_callbacks)
    with tempfile.TemporaryDirectory(prefix="hasten-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        fits = _Forks(trainer, fit, folder / "saved", batches, epochs)
        return check_plan(
            fits, trainer.installed, folder, lambda _: None, resume=resume, at_once=1, load=_loaded, base=folder
        )


def _loaded(path: Path) -> tuple[Any] | None:
    """Return a checkpoint's contents without what differs between runs of equal trainings; None for other files."""
    if path.suffix != ".ckpt":
        return None
    try:
        state = dict(read(path))
    except CheckpointError:
        return None
    state.pop("techniques", None)  # a loss scale exists only under the technique
    loops = dict(state.get("loops") or {})
    loops["hasten"] = {key: value for key, value in (loops.get("hasten") or {}).items() if key != "outermost"}
    state["loops"] = loops  # the modules that techniques have changed: none in a plain run
    state.pop("callbacks", None)  # paths and times
    return (state,)


class _Forks:
    """Fits the module in forks, each from the same state; their files go to scratch folders."""

    def __init__(self, trainer: Trainer, fit: dict[str, Any], root: Path, batches: int, epochs: int) -> None:
        self._trainer = trainer
        self._fit = fit
        self._root = root
        self._batches = batches
        self._epochs = epochs
        self._random = rng.state()
        self._running: set[multiprocessing.process.BaseProcess] = set()

    def __call__(self, plan: Techniques, witness: WitnessOptions, folder: Path, saved: Path | None) -> FinishedRun:
        """Fit once, in a fork; see `hasten.check.run.Runner`."""
        scratch = folder / "scratch"
        scratch.mkdir()
        checkpoint = None
        if saved is not None:
            shutil.copytree(saved, scratch / "files")
            checkpoint = _newest(scratch / "files")
        process = multiprocessing.get_context("fork").Process(
            target=self._in_fork, args=(dict(plan), witness, folder, checkpoint)
        )
        process.start()
        self._running.add(process)
        process.join(_TIMEOUT_SECONDS)
        hung = process.is_alive()
        _end(process)
        self._running.discard(process)
        log = (folder / "log").read_text(errors="replace").strip() if (folder / "log").exists() else ""
        failed = f"not done after {_TIMEOUT_SECONDS:.0f} s" if hung else ""
        if process.exitcode and not hung:
            failed = log.splitlines()[-1] if log else f"exit code {process.exitcode}"
        return FinishedRun(failed, scratch / "files", log[-2000:])

    def stop(self) -> None:
        """Kill the running forks."""
        for process in list(self._running):
            _end(process)

    def _in_fork(self, plan: dict[str, Any], witness: WitnessOptions, folder: Path, checkpoint: str | None) -> None:
        """Isolate this fork, train, and exit."""
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = sys.stderr = os.fdopen(
            os.dup(2), "w", buffering=1
        )  # a notebook's streams are not these file descriptors
        os.setsid()  # a process group, so that `_end` also kills its loaders' workers
        die_with_parent()
        torch.set_num_threads(1)  # reproducible; and OpenMP threads do not survive a fork
        try:
            confine(str(folder / "scratch"), witness.folders())
            rng.restore(self._random)  # Python seeds its own generator again in a fork
            self._train(plan, witness, checkpoint)
        except BaseException:
            messages.tell(traceback.format_exc())
            os._exit(1)
        os._exit(0)  # skip the parent's exit handlers

    def _train(self, plan: dict[str, Any], options: WitnessOptions, checkpoint: str | None) -> None:
        """Fit a Trainer with this one's flags and the fork's plan, under the eyes of a witness."""
        flags = {flag.name: getattr(self._trainer.user_config, flag.name) for flag in fields(self._trainer.user_config)}
        overridden = {
            **flags,
            **_QUIET,
            **dict.fromkeys(sugar()),
            "plan": Plan(plan),
        }  # techniques only from the fork's plan
        overridden |= {
            "default_root_dir": self._root,
            "max_epochs": self._epochs if checkpoint is None else 2 * self._epochs,
            "max_steps": -1,
            "limit_train_batches": self._batches,
            "limit_val_batches": self._batches,
        }
        trainer = type(self._trainer)(**overridden)
        witness = Witness(options, lambda: os._exit(0))
        witness.names.meet(self._fit["model"])
        listen(witness, backwards=False)
        _watch_losses(witness)
        trainer.fit(**self._fit, ckpt_path=checkpoint)
        if checkpoint is not None:
            witness.files_read.add(Path(checkpoint).name)
        witness.end(cut=False)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Kill a fork and all processes that it started."""
    if process.is_alive() and process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):  # it has just ended, or not called setsid yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


def _newest(saved: Path) -> str | None:
    """Return the path, as a confined run sees it, of the newest checkpoint."""
    checkpoints = sorted(saved.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return f"/{checkpoints[-1].relative_to(saved)}" if checkpoints else None


def _watch_losses(witness: Witness) -> None:
    """Pass each loss to the witness as the module returned it, before techniques change it."""
    plain = steps.backward_of

    def backward_of(trainer: Trainer, hooks: Hooks) -> Callable[..., None]:
        backward = plain(trainer, hooks)

        def watched(loss: Any, *more: Any, **named: Any) -> None:
            witness.backward(loss)
            backward(loss, *more, **named)

        return watched

    steps.backward_of = backward_of
