"""File names of checkpoints: `{epoch}-{val_loss:.2f}` filled in."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

import torch

from hasten.errors import HastenError


def checkpoint_name(template: str, metrics: Mapping[str, Any], insert_names: bool) -> str:
    """Fill in a template; a metric that was not logged is 0.

    Args:
        template: Such as `"{epoch}-{val/loss:.2f}"`. Only the metrics it names are read.
        metrics: Numbers or 0-dim tensors by name.
        insert_names: Write `epoch=3` for `{epoch}`, not `3`.

    Raises:
        HastenError: The template is malformed, or a format does not fit its value.
    """
    parts = []
    try:
        for literal, name, spec, _ in Formatter().parse(template):
            parts.append(literal)
            if name is not None:
                value = metrics.get(name, 0)
                value = value.item() if isinstance(value, torch.Tensor) else value
                if spec and spec[-1] == "d":
                    value = int(value)
                parts.append((f"{name}=" if insert_names else "") + format(value, spec or ""))
    except ValueError as error:
        raise HastenError(
            f"ModelCheckpoint(filename={template!r}): {error}", "write {name} or {name:.2f}, as in an f-string"
        ) from None
    return "".join(parts)
