"""Run: one live training. Applies a plan's techniques to its loaders, models and optimizers, and records its steps.

The driver of the training (the taps in an unmodified script, or the Trainer) calls a method of the Run at each place
where a technique may act: `loader` once a DataLoader was built, `model` before a first forward, and so on. The Run
calls the techniques that override that place, in plan order. If a technique raises, its error is recorded in `skipped`
and the training continues as if that technique were absent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hasten.evidence.facts import ModelWatch
from hasten.evidence.recorder import Recorder
from hasten.techniques import Technique, overrides
from hasten.techniques.base import Call


@dataclass(slots=True)
class Guard:
    """Context manager that passes an exception raised in its block to `tell` and swallows it.

    KeyboardInterrupt, SystemExit and other non-`Exception`s propagate.
    """

    tell: Callable[[Exception], None]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.tell(error)
        return isinstance(error, Exception)


class Run:
    """The techniques of a plan, called at the places where they act, and the recorder of the training's steps.

    Args:
        techniques: The techniques, in plan order.
        recorder: Records steps; None to record nothing, at no overhead.
    """

    def __init__(self, techniques: list[Technique], recorder: Recorder | None = None) -> None:
        self.techniques = techniques
        self.recorder = recorder
        self.skipped: list[str] = []
        self.models: dict[int, ModelWatch] = {}
        self.facts: dict[str, Any] = {}
        self._rebuilt: set[int] = set()

    def techniques_at(self, place: str) -> list[Technique]:
        """Return the techniques that act at a place, such as "loader" or "forward"."""
        return [technique for technique in self.techniques if overrides(technique, place)]

    def skip(self, failed_part: str, error: BaseException) -> None:
        """Record what failed, with the first line of its error; the same failure is recorded once."""
        line = f"{failed_part}: {type(error).__name__}: {error}".splitlines()[0]
        if line not in self.skipped:
            self.skipped.append(line)

    def failed(self, technique: Technique, error: BaseException) -> None:
        """Record that a technique raised an error."""
        self.skip(technique.name, error)

    def guard(self, guarded: str | Technique) -> Guard:
        """Return a context manager that records an exception in `skipped` and swallows it.

        Taps and techniques run inside it, so that neither can break a script.
        """
        if isinstance(guarded, Technique):
            return Guard(functools.partial(self.failed, guarded))
        return Guard(functools.partial(self.skip, guarded))

    def process(self) -> None:
        """Let techniques set their global switches; called once torch has been imported."""
        for technique in self.techniques_at("process"):
            with self.guard(technique):
                technique.process()

    def loader_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments to build a DataLoader with, as changed by the techniques."""
        for technique in self.techniques_at("loader_options"):
            # Each technique gets a copy, so that one that raises halfway leaves no half-made changes.
            changed = dict(options)
            with self.guard(technique):
                technique.loader_options(changed)
                options = changed
        return options

    def loader(self, loader: Any) -> None:
        """Apply the techniques to a DataLoader that was just built."""
        for technique in self.techniques_at("loader"):
            with self.guard(technique):
                technique.loader(loader)

    def fetcher(self, fetcher: Any) -> Any:
        """Return the object that gathers a batch's samples, as replaced by the techniques."""
        for technique in self.techniques_at("fetcher"):
            with self.guard(technique):
                fetcher = technique.fetcher(fetcher)
        return fetcher

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """Return the function that gives a pass its next batch, wrapped by the techniques."""
        for technique in self.techniques_at("batches"):
            with self.guard(technique):
                fetch = technique.batches(fetch, iterator)
        return fetch

    def model(self, module: Any, args: tuple[Any, ...]) -> None:
        """Apply the techniques to an outermost module before its first forward; later calls do nothing."""
        if id(module) in self._rebuilt:
            return
        self._rebuilt.add(id(module))
        for technique in self.techniques_at("model"):
            with self.guard(technique):
                technique.model(module, args)

    def forget(self, key: int) -> None:
        """Forget a deleted module by its `id()`, which Python may give to a new module."""
        self._rebuilt.discard(key)

    def optimizer(self, optimizer: Any) -> None:
        """Apply the techniques to an optimizer that was just built."""
        for technique in self.techniques_at("optimizer"):
            with self.guard(technique):
                technique.optimizer(optimizer)

    def teardown(self) -> None:
        """Undo the techniques' changes to the process: the training is over, but the process continues."""
        for technique in self.techniques_at("teardown"):
            technique.teardown()

    def wrap(self, place: str, call: Call) -> Call:
        """Return the call, `forward` or `backward`, wrapped by the techniques that act on it."""
        for technique in self.techniques_at(place):
            with self.guard(technique):
                call = getattr(technique, place)(call)
        return call

    def installed(self) -> dict[str, str]:
        """Return what each technique acted on, with counts ("2 x loader"), for the report."""
        return {
            technique.name: ", ".join(
                f"{count} x {what}" if count > 1 else what for what, count in technique.acted.items()
            )
            for technique in self.techniques
            if technique.acted
        }

    def left_alone(self) -> list[str]:
        """Return one line per object that a technique should have changed but left alone, with the reason."""
        return [
            f"{technique.name} {what}"
            for technique in self.techniques
            for what in technique.acted
            if what.startswith("left alone: ")
        ]

    def idle(self) -> list[str]:
        """Return one line per technique that found nothing to act on, naming what it looks for."""
        return [
            f"{technique.name} found no {technique.acts_on.removeprefix('a ').removeprefix('an ')} to act on"
            for technique in self.techniques
            if technique.acts_on and not technique.acted
        ]
