"""Plain attributes (numbers and lists) that a training step changes, once per part of a batch."""

from __future__ import annotations

import torch


class Attributes:
    """The numbers, and the lengths of lists, in the attributes of a module and its submodules: `self.steps += 1`.

    Attributes of torchmetrics are left out: they count samples, so it does not matter which part a sample is in.

    Args:
        module: The module, whose current values are recorded.

    Attributes:
        changed: Names of the attributes that a step has changed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = module.named_modules()
        owners = [
            (path, part) for path, part in modules if not (hasattr(part, "_defaults") and hasattr(part, "compute"))
        ]
        attributes = [(path, part, name, value) for path, part in owners for name, value in vars(part).items()]
        self._numbers = [entry for entry in attributes if type(entry[3]) in (int, float)]
        self._lists = [(*entry, len(entry[3])) for entry in attributes if type(entry[3]) is list]
        self.changed: set[str] = set()

    def put_back(self) -> None:
        """Restore the recorded values, so that each part starts from the same."""
        for path, part, name, value in self._numbers:
            if vars(part).get(name) != value:
                self._note(path, name)
                vars(part)[name] = value
        for path, part, name, entries, length in self._lists:
            if vars(part).get(name) is entries and len(entries) > length:
                self._note(path, name)
                del entries[length:]

    def _note(self, path: str, name: str) -> None:
        """Record that an attribute was changed."""
        self.changed.add(f"{path}.{name}".lstrip("."))
