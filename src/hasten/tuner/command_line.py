"""Change arguments on a training's command line."""

from __future__ import annotations

from collections.abc import Sequence


def with_argument(arguments: Sequence[str], name: str, value: str | int) -> list[str]:
    """Return the command line with the argument set to another value, appended if it is missing.

    Understands `--lr 0.1`, `--lr=0.1` and Hydra's `optim.lr=0.1`. If it occurs twice the last is changed, which is the
    one that argparse uses.
    """
    changed = list(arguments)
    for index in range(len(changed) - 1, -1, -1):
        if changed[index] == name and index + 1 < len(changed):
            changed[index + 1] = str(value)
            return changed
        if changed[index].startswith(f"{name}="):
            changed[index] = f"{name}={value}"
            return changed
    return [*changed, name, str(value)] if name.startswith("-") else [*changed, f"{name}={value}"]
