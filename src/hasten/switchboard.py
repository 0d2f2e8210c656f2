"""Switchboard: a Run whose techniques are switched on and off while the training runs.

Every technique is installed at the start, so switching never rebuilds anything that the script holds. Techniques that
act once on an object (`loader`, `model`, `optimizer`) are called whether on or off and check their own `active`. For
`forward` and `backward` the script keeps one callable per place, which calls through a `_Chain`; a switch re-links the
chain. For `fetcher` and `batches` each new pass applies the techniques that are on as it begins; DataLoader workers
read which ones those are from shared memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hasten.errors import HastenError
from hasten.evidence.recorder import Recorder
from hasten.plan import Setting
from hasten.run import Run
from hasten.techniques import CATALOGUE, Liveness, Technique, overrides, toml_value
from hasten.techniques.base import Call

_LEFT_ALONE = "left alone: "


class Switchboard(Run):
    """A Run whose techniques are installed, all off at first, and switched on and off between two steps.

    Every technique, on or off, is called for each loader, model and optimizer that is built, so that it can be switched
    on later. A technique that raises is switched off permanently, and the training continues as if it were absent.

    Args:
        techniques: Instances used by no other Run, none of which has acted yet. Several may share a name with different
            settings; at most one of them is on at a time.
        recorder: Records steps; None to record nothing.
        fixed: Techniques that are on throughout, as in a Run; they are never switched.

    Attributes:
        on: Name -> setting of the switchable techniques that are on.
        broken: Name -> reason of the techniques that failed.

    Raises:
        HastenError: One of the techniques can only be set when a process starts.
    """

    def __init__(
        self, techniques: Iterable[Technique], recorder: Recorder | None = None, fixed: Iterable[Technique] = ()
    ) -> None:
        order, techniques, self._fixed = list(CATALOGUE), list(techniques), list(fixed)
        positions = {name: position for position, name in enumerate(order)}
        installed = [*techniques, *self._fixed]
        super().__init__(sorted(installed, key=lambda technique: positions.get(technique.name, len(order))), recorder)
        for technique in techniques:
            if technique.liveness_of(technique.setting) is Liveness.PROCESS:
                raise HastenError(
                    f"{_setting_text(technique.name, technique.setting)} can only be set when a process starts",
                    "leave it out: `liveness_of` tells which settings can be switched",
                )
            technique.active, technique.switchable = False, True
        self.on: dict[str, Setting] = {}
        self.broken: dict[str, str] = {}
        self._chains: list[_Chain] = []
        # Which techniques are on, in memory shared with forked DataLoader workers: a persistent worker
        # (`persistent_workers=True`) would otherwise keep the state of the moment when it was forked.
        self._shared = mmap.mmap(-1, max(1, len(self.techniques)))
        self._settle()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: everything but the memory shared with forked workers, which cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_shared"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the switchboard in another process, such as a spawned worker, with shared memory of its own."""
        vars(self).update(state)
        self._shared = mmap.mmap(-1, max(1, len(self.techniques)))
        self._settle()

    def switch(self, settings: Mapping[str, Setting]) -> None:
        """Switch on exactly the wanted techniques and all others off, except the fixed ones.

        Call it between two steps, in the training's thread. A broken technique stays off. The setting False means off.

        Raises:
            HastenError: A technique with that setting was not given to the switchboard; nothing is switched.
        """
        settings = {name: setting for name, setting in settings.items() if setting is not False}
        chosen = [self._find(name, setting) for name, setting in settings.items()]
        for technique in reversed(self.techniques):
            if technique.active and technique not in chosen and technique not in self._fixed:
                self._turn(technique, technique.off)
        for technique in self.techniques:
            if technique in chosen and not technique.active and technique.name not in self.broken:
                self._turn(technique, technique.on)
        self._settle()

    def failed(self, technique: Technique, error: BaseException) -> None:
        """Record the error and switch all techniques of this name off permanently; a fixed one is only recorded."""
        super().failed(technique, error)
        if technique.name in self.broken or technique in self._fixed:
            return
        self.broken[technique.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        for candidate in self.techniques:
            if candidate.name == technique.name and candidate.active:
                self._turn(candidate, candidate.off)
        self._settle()

    def why_left_alone(self, name: str, setting: Setting) -> str:
        """Return why a technique that is on changes nothing; "" if it acts on something, or still may."""
        acted = self._find(name, setting).acted
        reasons = [note.removeprefix(_LEFT_ALONE) for note in acted if note.startswith(_LEFT_ALONE)]
        return reasons[0] if reasons and len(reasons) == len(acted) else ""

    # -- the places -----------------------------------------------------------------------------------

    def process(self) -> None:
        """Set the global switches of the fixed techniques; the others set theirs in `on`."""
        for technique in self._fixed:
            with self.guard(technique):
                technique.process()

    def techniques_at(self, place: str) -> list[Technique]:
        """Return the techniques that act at a place, on or off, without the broken ones."""
        return [technique for technique in super().techniques_at(place) if technique.name not in self.broken]

    def idle(self) -> list[str]:
        """Return one line per fixed technique that found nothing to act on; the others are only being tried."""
        names = {technique.name for technique in self._fixed}
        return [line for line in super().idle() if line.partition(" ")[0] in names]

    def left_alone(self) -> list[str]:
        """Return one line per object that a fixed technique left alone, with the reason."""
        names = {technique.name for technique in self._fixed}
        return [line for line in super().left_alone() if line.partition(" ")[0] in names]

    def fetcher(self, fetcher: Any) -> Any:
        """Return the object that gathers a new pass's samples, as replaced by the techniques that are on."""
        return self._through("fetcher", fetcher)

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """Return the function that gives a new pass its next batch, wrapped by the techniques that are on."""
        call: Callable[[], Any] = self._through("batches", fetch, iterator)
        return call

    def wrap(self, place: str, call: Call) -> Call:
        """Return the call, `forward` or `backward`, wrapped at each invocation by the techniques that are on then."""
        chain = _Chain(place, call)
        self._chains.append(chain)
        self._settle()

        def through(*args: Any, **kwargs: Any) -> Any:
            return chain.head(*args, **kwargs)

        return through

    # -- parts ----------------------------------------------------------------------------------------

    def _find(self, name: str, setting: Setting) -> Technique:
        for technique in self.techniques:
            if technique.name == name and _same(technique.setting, setting) and technique not in self._fixed:
                return technique
        raise HastenError(f"{_setting_text(name, setting)} is not among the techniques that can be switched here")

    def _turn(self, technique: Technique, switch: Callable[[], None]) -> None:
        """Call a technique's `on` or `off`; a technique that raises is off for good."""
        try:
            switch()
        except Exception as error:  # a technique never breaks a script
            # If `on` failed halfway, mark it active, so that `failed` calls `off`, which undoes what it began.
            technique.active = switch == technique.on
            self.failed(technique, error)

    def _settle(self) -> None:
        """Publish which techniques are on: to workers, to `on`, and to the chains of wrapped calls."""
        for index, technique in enumerate(self.techniques):
            self._shared[index] = technique.active
        active = [technique for technique in self.techniques if technique.active]
        self.on = {technique.name: technique.setting for technique in active if technique not in self._fixed}
        for chain in self._chains:
            for technique in active:
                if technique.active and overrides(technique, chain.place):
                    try:
                        chain.add(technique)
                    except Exception as error:  # a technique never breaks a script
                        self.failed(technique, error)  # which calls `_settle` again, with this technique off
                        return
            chain.lead_through(active)

    def _through(self, place: str, call: Any, *args: Any) -> Any:
        """Wrap a call by the techniques that are on, as shared memory says: this may run in a worker."""
        for number, technique in enumerate(self.techniques):
            if self._shared[number] and overrides(technique, place):
                with self.guard(technique):
                    call = getattr(technique, place)(call, *args)
        return call


class _Chain:
    """A call wrapped by the techniques that are on, re-linked at every switch.

    Each technique wraps the call once and keeps that wrapper, so that its per-module state survives when other
    techniques are switched.

    Attributes:
        head: The outermost wrapper that is on, or the plain call.
    """

    def __init__(self, place: str, call: Call) -> None:
        self.place = place
        self.head = self._plain = call
        self._links: dict[int, _Link] = {}

    def add(self, technique: Technique) -> None:
        """Let a technique wrap the call, unless it has done so already."""
        if id(technique) not in self._links:
            link = _Link(self._plain)
            link.wrapped = getattr(technique, self.place)(link)
            self._links[id(technique)] = link

    def lead_through(self, active: Iterable[Technique]) -> None:
        """Link the wrappers of these techniques, the first innermost."""
        call = self._plain
        for technique in active:
            if link := self._links.get(id(technique)):
                link.inner, call = call, link.wrapped
        self.head = call


class _Link:
    """The call that one technique wrapped: forwards to the next inner wrapper, which changes as others are switched."""

    __slots__ = ("inner", "wrapped")

    def __init__(self, inner: Call) -> None:
        self.inner = self.wrapped = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _same(first: Setting, second: Setting) -> bool:
    return type(first) is type(second) and first == second  # the settings True and 1 differ


def _setting_text(name: str, setting: Setting) -> str:
    return f"{name} = {toml_value(setting)}"
