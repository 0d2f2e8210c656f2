"""Techniques in a user's own training loop: `hasten.setup`, `hasten.backward`, `hasten.autocast`.

One `Prepared` object, the current set-up of the process, holds what is installed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from hasten.by_hand.named import technique_settings
from hasten.by_hand.prepared import Prepared, sorted_by_role
from hasten.plan import Plan, Setting

__all__ = ["autocast", "backward", "end", "setup"]

_current: Prepared | None = None


def setup(
    *parts: Any,
    precision: str | int | None = None,
    compile: bool | str | dict[str, Any] | None = None,
    plan: str | Path | Plan | None = None,
    **techniques: Setting | None,
) -> Any:
    """Install techniques of the catalogue, by name, in your own training loop, and return the given parts.

    Call it once models, optimizers and loaders are built and on their device, before the first step. Models and
    optimizers are returned as the same objects, so their state dicts are plain torch's; for a loader, a DataLoader that
    the techniques have changed is returned. A technique that is off costs nothing in a step.

    A second call with the same techniques adds its parts to the first. A call with other techniques ends the first:
    what that installed is removed, with a message if one of its models is still in use.

    Args:
        parts: Modules, optimizers, loaders and learning-rate schedules, in any order and number.
        precision: "bf16-mixed", "16-mixed" (with loss scaling), "bf16-true", "16-true", "64-true"; default float32.
        compile: Compile the models; True, a mode of torch.compile, or a table with mode and activation_budget.
        plan: A plan that `hasten tune` wrote (its file, or a Plan): its techniques are installed too.
        techniques: Other techniques of the catalogue (`hasten techniques` lists them), each with its setting.

    Returns:
        The parts in the given order, as a tuple; a single part as it is.

    Raises:
        HastenError: A technique or a setting is unknown, contradicts the plan, or a part has another type.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = hasten.setup(model, optimizer, precision="bf16-mixed", fused_optimizer=True)
        >>> with hasten.autocast():
        ...     loss = model(torch.ones(2, 4)).square().mean()
        >>> hasten.backward(loss)
        >>> optimizer.step()
    """
    global _current
    settings, remarks = technique_settings({"precision": precision, "compile": compile, **techniques}, plan)
    models, optimizers, loaders = sorted_by_role(parts)
    if _current is not None and _current.settings != settings:
        _current.end(announces=True)
        _current = None
    if _current is None:
        _current = Prepared(settings, remarks)
    changed = _current.add(models, optimizers, loaders)
    result = tuple(changed.get(id(part), part) for part in parts)
    return result[0] if len(result) == 1 else result


def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Call `loss.backward()`, on which the techniques also act; takes the arguments of torch's `backward`."""
    loss.backward(*args, **kwargs)


def autocast() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operations run in the precision of `setup`; without effect if that is float32.

    Use it for computations outside a model's forward: the loss, or a method such as `model.generate()`. A model called
    within it returns 16-bit outputs, as under torch.autocast; a model called outside it returns float32.
    """
    return contextlib.nullcontext() if _current is None else _current.autocast()


def end() -> None:
    """Undo what `setup` installed in models, optimizers and torch's functions.

    Weights, optimizer states and returned loaders are left as they are.
    """
    global _current
    if _current is not None:
        _current.end()
        _current = None
