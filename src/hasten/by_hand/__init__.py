"""Techniques in a loop that a person writes: `hasten.setup`, `hasten.backward`, `hasten.autocast`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from hasten.by_hand.named import technique_settings
from hasten.by_hand.prepared import Prepared, sort
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
    """Install techniques of the catalogue in a loop of your own, by name, and return what was handed over.

    Call it once models, optimizers and loaders are built and on their device, before the first step. Models and
    optimizers come back as the same objects, so their state dicts are plain torch's; a loader comes back as a
    DataLoader that the techniques have changed. Whatever is off costs nothing in a step.

    A second call with the same techniques adds to the first. With other techniques it ends the first: what that
    installed is taken back, which is said if one of its models is still in use.

    Args:
        parts: Modules, optimizers, loaders and schedules, in any order and number.
        precision: "bf16-mixed", "16-mixed" (with loss scaling), "bf16-true", "16-true", "64-true"; default float32.
        compile: Compile the models; True, a mode of torch.compile, or a table with mode and activation_budget.
        plan: A plan that `hasten tune` wrote (its file, or a Plan): its techniques are installed too.
        techniques: Other techniques of the catalogue (`hasten techniques` lists them), each with its setting.

    Returns:
        The parts in the order given; the part itself where there is one.

    Raises:
        HastenError: A technique or a setting is unknown, contradicts the plan, or a part is none of those.

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
    models, optimizers, loaders = sort(parts)
    if _current is not None and _current.settings != settings:
        _current.end(said=True)
        _current = None
    if _current is None:
        _current = Prepared(settings, remarks)
    changed = _current.add(models, optimizers, loaders)
    result = tuple(changed.get(id(part), part) for part in parts)
    return result[0] if len(result) == 1 else result


def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Differentiate a loss: `loss.backward()`, which the techniques act on too; arguments are those of torch's."""
    loss.backward(*args, **kwargs)


def autocast() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operations run in the precision of `setup`; it does nothing where that is float32.

    For what is computed outside of a model's forward: the loss, or a method such as `model.generate()`. Within it a
    model's output stays in 16 bits, as under torch.autocast by hand; a model called outside of it gives float32.
    """
    return contextlib.nullcontext() if _current is None else _current.autocast()


def end() -> None:
    """Take back what `setup` has installed: models, optimizers and torch's own functions are as before.

    Weights, the optimizer's state and loaders that were returned stay as they are.
    """
    global _current
    if _current is not None:
        _current.end()
        _current = None
