"""Run: one live training. Applies a plan's techniques to what is built, records what happens.

Whoever drives the training tells the Run: the taps in somebody's script, or the Trainer. A technique that fails
is skipped and named; the training goes on as if it were not there.
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
    """A context that tells of an error that ends it, and lets nobody else hear of it."""

    tell: Callable[[Exception], None]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.tell(error)
        return isinstance(error, Exception)


class Run:
    """The techniques of a plan, by the places where they act, and the recorder if somebody listens.

    Args:
        techniques: In plan order.
        recorder: Where steps are recorded; None when nobody listens, which then costs nothing.
    """

    def __init__(self, techniques: list[Technique], recorder: Recorder | None = None) -> None:
        self.techniques = techniques
        self.recorder = recorder
        self.skipped: list[str] = []
        self.models: dict[int, ModelWatch] = {}
        self.seen: dict[str, Any] = {}
        self._rebuilt: set[int] = set()

    def acting(self, place: str) -> list[Technique]:
        """The techniques that act in a place."""
        return [technique for technique in self.techniques if overrides(technique, place)]

    def skip(self, what: str, error: BaseException) -> None:
        """Note what could not be done; said once."""
        line = f"{what}: {type(error).__name__}: {error}".splitlines()[0]
        if line not in self.skipped:
            self.skipped.append(line)

    def failed(self, technique: Technique, error: BaseException) -> None:
        """A technique could not act in a place."""
        self.skip(technique.name, error)

    def guard(self, what: str | Technique) -> Guard:
        """Return a context in which what fails is skipped and named: neither a tap nor a technique breaks a script."""
        if isinstance(what, Technique):
            return Guard(functools.partial(self.failed, what))
        return Guard(functools.partial(self.skip, what))

    def process(self) -> None:
        """torch was imported: set global switches."""
        for technique in self.acting("process"):
            with self.guard(technique):
                technique.process()

    def loader_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments that a DataLoader shall be built with."""
        for technique in self.acting("loader_options"):
            changed = dict(options)
            with self.guard(technique):
                technique.loader_options(changed)
                options = changed
        return options

    def loader(self, loader: Any) -> None:
        """A DataLoader was built."""
        for technique in self.acting("loader"):
            with self.guard(technique):
                technique.loader(loader)

    def fetcher(self, fetcher: Any) -> Any:
        """The object that shall gather samples."""
        for technique in self.acting("fetcher"):
            with self.guard(technique):
                fetcher = technique.fetcher(fetcher)
        return fetcher

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """The function that shall give a pass its next batch."""
        for technique in self.acting("batches"):
            with self.guard(technique):
                fetch = technique.batches(fetch, iterator)
        return fetch

    def model(self, module: Any, args: tuple[Any, ...]) -> None:
        """An outermost module is about to be called for the first time."""
        if id(module) in self._rebuilt:
            return
        self._rebuilt.add(id(module))
        for technique in self.acting("model"):
            with self.guard(technique):
                technique.model(module, args)

    def forget(self, key: int) -> None:
        """The module of this id is gone: another may get its id."""
        self._rebuilt.discard(key)

    def optimizer(self, optimizer: Any) -> None:
        """An optimizer was built."""
        for technique in self.acting("optimizer"):
            with self.guard(technique):
                technique.optimizer(optimizer)

    def over(self) -> None:
        """The training is over, and the process goes on."""
        for technique in self.acting("over"):
            technique.over()

    def wrapped(self, place: str, call: Call) -> Call:
        """`forward` or `backward` behind the techniques that wrap it."""
        for technique in self.acting(place):
            with self.guard(technique):
                call = getattr(technique, place)(call)
        return call

    def installed(self) -> dict[str, str]:
        """Return what each technique acted on, for the report."""
        return {
            technique.name: ", ".join(
                f"{count} x {what}" if count > 1 else what for what, count in technique.acted.items()
            )
            for technique in self.techniques
            if technique.acted
        }

    def left_alone(self) -> list[str]:
        """Return what techniques were meant to act on and did not, and why."""
        return [
            f"{technique.name} {what}"
            for technique in self.techniques
            for what in technique.acted
            if what.startswith("left alone: ")
        ]

    def idle(self) -> list[str]:
        """Techniques that found nothing to act on, each with what it was looking for."""
        return [
            f"{technique.name} found no {technique.acts_on.removeprefix('a ').removeprefix('an ')} to act on"
            for technique in self.techniques
            if technique.acts_on and not technique.acted
        ]
