"""In a run's process: what its arguments are, which optimizer it steps, and what it logs; each as a line of a file.

The run goes on as without: nothing is read from a device that the script does not read itself.
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
    """Listen; called by the session of a run as torch is imported."""
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
    atexit.register(_tell_idle, session, facts)
    handle: list[Any] = []

    def first_step(optimizer: Any, *_: Any) -> None:
        if handle:
            handle.pop().remove()
            scheduled = any("initial_lr" in group for group in optimizer.param_groups)
            facts(json.dumps({"optimizer": type(optimizer).__name__, "scheduled": scheduled}))
            _count_steps(optimizer, facts)

    handle.append(register_optimizer_step_pre_hook(first_step))


def _append(path: Path, line: str) -> None:
    """Append a line in one write, so that a reader never sees half of it."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode("utf-8", "replace"))
    except OSError as error:  # a full disk: the run goes on, and its reader finds less
        messages.tell(f"hasten: cannot note what the run logs: {error}")


def _parsing(plain: Any, tell: Callable[[str], None]) -> Any:
    inside: list[bool] = []  # of `parse_args`, or of the parser of a subcommand, which parse through this as well

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None, **options: Any) -> Any:
        if inside:
            return plain(self, args, namespace, **options)
        inside.append(True)
        try:
            parsed = plain(self, args, namespace, **options)
        finally:
            inside.clear()
        if args is None or list(args) == sys.argv[1:]:  # else it is of no line that a person writes
            tell(json.dumps({"arguments": _arguments(self, parsed[0])}))
        return parsed

    return parse_known_args


def _arguments(parser: Any, parsed: Any) -> list[dict[str, Any]]:
    """Return the options that take a value: as they are spelled, and what they are in this run."""
    return [
        {"options": action.option_strings, "value": value}
        for action in parser._actions
        if action.option_strings and action.nargs is None
        for value in [getattr(parsed, action.dest, None)]
        if type(value) in _PLAIN
    ]


def _count_steps(optimizer: Any, tell: Callable[[str], None]) -> None:
    """Tell at the end how many steps an optimizer took, the one that is about to begin included."""
    count = itertools.count()
    optimizer.register_step_post_hook(lambda *_: (next(count), None)[1])
    atexit.register(lambda: tell(json.dumps({"steps": next(count)})))


def _tell_idle(session: Session, tell: Callable[[str], None]) -> None:
    """Tell which techniques found nothing to act on, or left it alone: the run was the script's own."""
    idle = {
        technique.name: "; ".join(technique.acted) or f"found no {technique.acts_on.removeprefix('a ')}"
        for technique in session.run.techniques
        if all(what.startswith("left alone: ") for what in technique.acted)
    }
    if idle:
        tell(json.dumps({"idle": idle}))


def _tap_loaders(tell: Callable[[str], None]) -> None:
    """Tell of the first loader that shuffles, whose batches may be made larger."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    told: list[int] = []

    def building(plain: Any) -> Any:
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            batches = self.batch_sampler
            if not told and type(batches) is BatchSampler and isinstance(batches.sampler, RandomSampler):
                told.append(batches.batch_size)
                tell(json.dumps({"loader": batches.batch_size}))

        return build

    tap(DataLoader, "__init__", building)


def _tap_writer(session: Session, name: str, tell: Callable[[str], None]) -> None:
    try:
        tap(sys.modules[name].SummaryWriter, "add_scalar", lambda plain: _adding(plain, tell))
    except AttributeError as error:  # a library of the same name that is another one
        session.run.skip(f"tap {name}", error)


def _adding(plain: Any, tell: Callable[[str], None]) -> Any:
    def add_scalar(self: Any, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            scalar_value = float(scalar_value)  # once: the writer would read it from the device a second time
        except (TypeError, ValueError):  # no number: the writer says so best
            return plain(self, tag, scalar_value, *args, **kwargs)
        tell(f"{tag}: {scalar_value!r}")
        return plain(self, tag, scalar_value, *args, **kwargs)

    return add_scalar


def _tap_csv(tell: Callable[[str], None]) -> None:
    def logging(plain: Any) -> Any:
        def log_metrics(self: Any, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            for name, value in metrics.items():
                tell(f"{name}: {float(value)!r}")
            return plain(self, metrics, *args, **kwargs)

        return log_metrics

    tap(sys.modules[_CSV].CSVLogger, "log_metrics", logging)
