"""Settings changed for the whole process during a training, and restored behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.plan import Setting
from hasten.techniques.base import Liveness, Technique


class Switches:
    """Remembers what settings were before."""

    def __init__(self) -> None:
        self._changed: list[tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = []

    def __bool__(self) -> bool:
        """Whether any is set."""
        return bool(self._changed)

    def set(self, read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
        """Set one to a value."""
        before = read()
        write(value)
        self._changed.append((read, write, before, read()))

    def put_back(self) -> None:
        """Set all to what they were, but for those that somebody else has changed since."""
        while self._changed:
            read, write, before, ours = self._changed.pop()
            if read() == ours:
                write(before)


class Stepwise(Technique):
    """A technique that is all in what `process` changes and `restore` puts back, between any two steps."""

    liveness = Liveness.STEP

    def on(self) -> None:
        """Change it."""
        super().on()
        self.process()

    def off(self) -> None:
        """Put it back."""
        super().off()
        self.restore()


class ProcessWide(Stepwise):
    """A technique that only sets process-wide settings, in `process` and through `self._switches`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._switches = Switches()

    def restore(self) -> None:
        """Put them back."""
        self._switches.put_back()
