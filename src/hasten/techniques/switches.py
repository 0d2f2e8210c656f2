"""Change process-wide settings during a training, and restore them after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.plan import Setting
from hasten.techniques.base import Liveness, Technique


class Switches:
    """Changes settings, and remembers their former values."""

    def __init__(self) -> None:
        self._changed: list[tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = []

    def __bool__(self) -> bool:
        """Return whether any setting is changed."""
        return bool(self._changed)

    def set(self, read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
        """Change a setting to a value, given the functions that read and write it."""
        before = read()
        write(value)
        self._changed.append((read, write, before, read()))

    def put_back(self) -> None:
        """Restore all settings, except those that somebody else has changed since."""
        while self._changed:
            read, write, before, ours = self._changed.pop()
            if read() == ours:
                write(before)


class Stepwise(Technique):
    """Technique that consists of what `process` changes and `restore` undoes, switchable between any two steps."""

    liveness = Liveness.STEP

    def on(self) -> None:
        """Make the change."""
        super().on()
        self.process()

    def off(self) -> None:
        """Undo the change."""
        super().off()
        self.restore()


class ProcessWide(Stepwise):
    """Technique that only changes process-wide settings, in `process` and through `self._switches`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._switches = Switches()

    def restore(self) -> None:
        """Restore the settings."""
        self._switches.put_back()
