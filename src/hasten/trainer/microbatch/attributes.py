"""Numbers and lists that a step changes in plain attributes, once for each part of a batch."""

from __future__ import annotations

import torch


class Attributes:
    """Keeps numbers, and lengths of lists, that are attributes of a module's parts: `self.steps += 1`.

    Those of torchmetrics are left out: they count samples, whichever part these are in.

    Args:
        module: Whose they are, as they are now.

    Attributes:
        changed: Names of those that a step has changed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parts = module.named_modules()
        owners = [(path, one) for path, one in parts if not (hasattr(one, "_defaults") and hasattr(one, "compute"))]
        found = [(path, part, name, value) for path, part in owners for name, value in vars(part).items()]
        self._numbers = [one for one in found if type(one[3]) in (int, float)]
        self._lists = [(*one, len(one[3])) for one in found if type(one[3]) is list]
        self.changed: set[str] = set()

    def put_back(self) -> None:
        """Have the next part find what the first one found."""
        for path, part, name, value in self._numbers:
            if vars(part).get(name) != value:
                self._note(path, name)
                vars(part)[name] = value
        for path, part, name, entries, length in self._lists:
            if vars(part).get(name) is entries and len(entries) > length:
                self._note(path, name)
                del entries[length:]

    def _note(self, path: str, name: str) -> None:
        self.changed.add(f"{path}.{name}".lstrip("."))
