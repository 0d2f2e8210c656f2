"""Runs inside the training's process: reports its arguments, optimizer and loader, and the metrics that it logs.

Facts and logged metrics are appended to two files, a line each, which the searching process reads. The training is not
changed: no value is read from a device that the script would not read itself.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hasten import messages
from hasten.taps.after_import import after_import
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

VARIABLE = "HASTEN_TARGET"
_PLAIN = (str, int, float, bool)
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_CSV = "hasten.trainer.loggers.csv_logger"


def install(session: Session) -> None:
    """Install the taps; called by the run's session as torch is imported. Only rank 0 reports."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    if session.rank:
        return
    folder = Path(os.environ[VARIABLE])
    facts, logged = functools.partial(_append, folder / "facts"), functools.partial(_append, folder / "logged")
    tap(argparse.ArgumentParser, "parse_known_args", lambda plain: _parsing(plain, facts))
    for name in _WRITERS:
        after_import(name, functools.partial(_tap_writer, session, name, logged))
    after_import(_CSV, functools.partial(_tap_csv, logged))
    _tap_loaders(facts)
    atexit.register(_report_idle, session, facts)
    handle: list[Any] = []

    def first_step(optimizer: Any, *_: Any) -> None:
        if handle:
            handle.pop().remove()
            scheduled = any("initial_lr" in group for group in optimizer.param_groups)
            facts(json.dumps({"optimizer": type(optimizer).__name__, "scheduled": scheduled}))
            _count_steps(optimizer, facts)

    handle.append(register_optimizer_step_pre_hook(first_step))


def _append(path: Path, line: str) -> None:
    """Append a line in a single write, so that a reader never sees half a line."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode("utf-8", "replace"))
    except OSError as error:  # such as a full disk: the training must go on; its reader gets less
        messages.tell(f"hasten: cannot note what the run logs: {error}")


def _parsing(plain: Any, report: Callable[[str], None]) -> Any:
    """Return `parse_known_args` that also reports the parsed arguments."""
    inside: list[bool] = []  # during a call: the parser of a subcommand is called through this method as well

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None, **options: Any) -> Any:
        if inside:
            return plain(self, args, namespace, **options)
        inside.append(True)
        try:
            parsed = plain(self, args, namespace, **options)
        finally:
            inside.clear()
        # Other arguments than the process's own do not come from the command line that the user writes.
        if args is None or list(args) == sys.argv[1:]:
            report(json.dumps({"arguments": _arguments(self, parsed[0])}))
        return parsed

    return parse_known_args


def _arguments(parser: Any, parsed: Any) -> list[dict[str, Any]]:
    """Return the options that take one value: their spellings, and their value in this run."""
    return [
        {"options": action.option_strings, "value": value}
        for action in parser._actions
        if action.option_strings and action.nargs is None
        for value in [getattr(parsed, action.dest, None)]
        if type(value) in _PLAIN
    ]


def _count_steps(optimizer: Any, report: Callable[[str], None]) -> None:
    """Report at exit how many steps an optimizer took, including the one about to begin."""
    count = itertools.count()
    optimizer.register_step_post_hook(lambda *_: (next(count), None)[1])
    atexit.register(lambda: report(json.dumps({"steps": next(count)})))


def _report_idle(session: Session, report: Callable[[str], None]) -> None:
    """Report the techniques that had no effect: they found nothing to act on, or left all of it alone."""
    idle = {
        technique.name: "; ".join(technique.acted) or f"found no {technique.acts_on.removeprefix('a ')}"
        for technique in session.run.techniques
        if all(note.startswith("left alone: ") for note in technique.acted)
    }
    if idle:
        report(json.dumps({"idle": idle}))


def _tap_loaders(report: Callable[[str], None]) -> None:
    """Report the batch size of the first shuffling loader, which `batch_scale` can enlarge."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    reported: list[int] = []

    def building(plain: Any) -> Any:
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            batches = self.batch_sampler
            if not reported and type(batches) is BatchSampler and isinstance(batches.sampler, RandomSampler):
                reported.append(batches.batch_size)
                report(json.dumps({"loader": batches.batch_size}))

        return build

    tap(DataLoader, "__init__", building)


def _tap_writer(session: Session, name: str, report: Callable[[str], None]) -> None:
    """Report the scalars that a TensorBoard writer writes."""
    try:
        tap(sys.modules[name].SummaryWriter, "add_scalar", lambda plain: _adding(plain, report))
    except AttributeError as error:  # another library, or version, with a module of this name
        session.run.skip(f"tap {name}", error)


def _adding(plain: Any, report: Callable[[str], None]) -> Any:
    """Return `add_scalar` that also reports the scalar."""

    def add_scalar(self: Any, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            # Converted once and passed on: given a tensor, the writer would read it from the device a second time.
            scalar_value = float(scalar_value)
        except (TypeError, ValueError):  # not a number: the writer raises the clearer error
            return plain(self, tag, scalar_value, *args, **kwargs)
        report(f"{tag}: {scalar_value!r}")
        return plain(self, tag, scalar_value, *args, **kwargs)

    return add_scalar


def _tap_csv(report: Callable[[str], None]) -> None:
    """Report the metrics that hasten's CSVLogger writes."""

    def logging(plain: Any) -> Any:
        def log_metrics(self: Any, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            for name, value in metrics.items():
                report(f"{name}: {float(value)!r}")
            return plain(self, metrics, *args, **kwargs)

        return log_metrics

    tap(sys.modules[_CSV].CSVLogger, "log_metrics", logging)
