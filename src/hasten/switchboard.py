"""Switchboard: a Run whose techniques are switched on and off while the training runs."""

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

_ALONE = "left alone: "


class Switchboard(Run):
    """Techniques that are installed, all off at first, and switched on and off between two steps.

    All of them, on or off, are told what is built (loaders, models, optimizers), so that they can be switched on
    later. A technique that fails is off for good, and the training goes on as if it were not there.

    Args:
        techniques: Objects of their own, none of which has acted yet. There may be several of one name with different
            settings, of which one is on at a time.
        recorder: Where steps are recorded; None when nobody listens.
        fixed: Techniques that are on throughout, as in a Run; they are never switched.

    Attributes:
        on: What is on: name -> setting.
        broken: What failed, and why: name -> reason.

    Raises:
        HastenError: One of the techniques can only be set when a process starts.
    """

    def __init__(
        self, techniques: Iterable[Technique], recorder: Recorder | None = None, fixed: Iterable[Technique] = ()
    ) -> None:
        order, techniques, self._fixed = list(CATALOGUE), list(techniques), list(fixed)
        places = {name: place for place, name in enumerate(order)}
        whole = [*techniques, *self._fixed]
        super().__init__(sorted(whole, key=lambda one: places.get(one.name, len(order))), recorder)
        for technique in techniques:
            if technique.liveness_of(technique.setting) is Liveness.PROCESS:
                raise HastenError(
                    f"{_line(technique.name, technique.setting)} can only be set when a process starts",
                    "leave it out: `liveness_of` tells which settings can be switched",
                )
            technique.active, technique.switchable = False, True
        self.on: dict[str, Setting] = {}
        self.broken: dict[str, str] = {}
        self._chains: list[_Chain] = []
        # Seen by loaders' workers that outlive a pass too, which else would go by what was on when they were forked.
        self._shared = mmap.mmap(-1, max(1, len(self.techniques)))
        self._settle()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is shared with workers, of which there are none in another process."""
        return {name: value for name, value in vars(self).items() if name != "_shared"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on in another process."""
        vars(self).update(state)
        self._shared = mmap.mmap(-1, max(1, len(self.techniques)))
        self._settle()

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """From here on just these are on; called between two steps, in the training's thread.

        What is broken stays off. False is off.

        Raises:
            HastenError: A technique with that setting was not given to the switchboard; nothing is switched.
        """
        wanted = {name: setting for name, setting in wanted.items() if setting is not False}
        chosen = [self._find(name, setting) for name, setting in wanted.items()]
        for technique in reversed(self.techniques):
            if technique.active and technique not in chosen and technique not in self._fixed:
                self._turn(technique, technique.off)
        for technique in self.techniques:
            if technique in chosen and not technique.active and technique.name not in self.broken:
                self._turn(technique, technique.on)
        self._settle()

    def failed(self, technique: Technique, error: BaseException) -> None:
        """Switch all techniques of this name off for good."""
        super().failed(technique, error)
        if technique.name in self.broken or technique in self._fixed:
            return
        self.broken[technique.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        for one in self.techniques:
            if one.name == technique.name and one.active:
                self._turn(one, one.off)
        self._settle()

    def alone(self, name: str, setting: Setting) -> str:
        """Why a technique, though on, leaves everything alone; "" where it acts on something, or may yet."""
        acted = self._find(name, setting).acted
        left = [what.removeprefix(_ALONE) for what in acted if what.startswith(_ALONE)]
        return left[0] if left and len(left) == len(acted) else ""

    # -- the places -----------------------------------------------------------------------------------

    def process(self) -> None:
        """Set the global switches of what is on throughout; those of the others are set by `on`."""
        for technique in self._fixed:
            with self.guard(technique):
                technique.process()

    def acting(self, place: str) -> list[Technique]:
        """The techniques that act in a place, or may once they are on."""
        return [one for one in super().acting(place) if one.name not in self.broken]

    def idle(self) -> list[str]:
        """Techniques that are on throughout and found nothing to act on: of the others nobody expects it."""
        names = {technique.name for technique in self._fixed}
        return [line for line in super().idle() if line.partition(" ")[0] in names]

    def left_alone(self) -> list[str]:
        """Return what techniques that are on throughout did not act on, and why."""
        names = {technique.name for technique in self._fixed}
        return [line for line in super().left_alone() if line.partition(" ")[0] in names]

    def fetcher(self, fetcher: Any) -> Any:
        """The object that shall gather the samples of a pass that begins."""
        return self._through("fetcher", fetcher)

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """The function that shall give a pass that begins its next batch."""
        call: Callable[[], Any] = self._through("batches", fetch, iterator)
        return call

    def wrapped(self, place: str, call: Call) -> Call:
        """`forward` or `backward` behind those of the techniques that are on at the time."""
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
        raise HastenError(f"{_line(name, setting)} is not among the techniques that can be switched here")

    def _turn(self, technique: Technique, switch: Callable[[], None]) -> None:
        """Call its `on` or `off`; one that fails is off."""
        try:
            switch()
        except Exception as error:  # a technique never breaks a script
            technique.active = switch == technique.on  # then what it has begun is undone
            self.failed(technique, error)

    def _settle(self) -> None:
        """Let everything go by what is on now."""
        for place, technique in enumerate(self.techniques):
            self._shared[place] = technique.active
        active = [technique for technique in self.techniques if technique.active]
        self.on = {technique.name: technique.setting for technique in active if technique not in self._fixed}
        for chain in self._chains:
            for technique in active:
                if technique.active and overrides(technique, chain.place):
                    try:
                        chain.add(technique)
                    except Exception as error:  # a technique never breaks a script
                        self.failed(technique, error)  # which settles all
                        return
            chain.lead_through(active)

    def _through(self, place: str, call: Any, *args: Any) -> Any:
        for number, technique in enumerate(self.techniques):
            if self._shared[number] and overrides(technique, place):
                with self.guard(technique):
                    call = getattr(technique, place)(call, *args)
        return call


class _Chain:
    """A call that leads through the techniques that are on.

    Each technique wraps it once, so that what it knows of modules stays when others are switched.

    Attributes:
        head: What is called now.
    """

    def __init__(self, place: str, call: Call) -> None:
        self.place = place
        self.head = self._plain = call
        self._links: dict[int, _Link] = {}

    def add(self, technique: Technique) -> None:
        """Have a technique wrap the call, if it has not yet."""
        if id(technique) not in self._links:
            link = _Link(self._plain)
            link.wrapped = getattr(technique, self.place)(link)
            self._links[id(technique)] = link

    def lead_through(self, active: Iterable[Technique]) -> None:
        """Lead through these, the first innermost."""
        call = self._plain
        for technique in active:
            if link := self._links.get(id(technique)):
                link.inner, call = call, link.wrapped
        self.head = call


class _Link:
    """A call wrapped by one technique; the call behind it changes as others are switched."""

    __slots__ = ("inner", "wrapped")

    def __init__(self, inner: Call) -> None:
        self.inner = self.wrapped = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _same(one: Setting, other: Setting) -> bool:
    return type(one) is type(other) and one == other  # True is not 1


def _line(name: str, setting: Setting) -> str:
    return f"{name} = {toml_value(setting)}"
