"""Resolve and check the techniques that a call of `setup` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.plan import Plan, Setting, did_you_mean
from hasten.techniques import CATALOGUE, check, remarks, toml_value
from hasten.techniques.memory.allocator import Allocator

# As Fabric and Accelerate spell them; None is float32, which needs no technique.
_PRECISIONS = {
    "32": None,
    "32-true": None,
    "no": None,
    "bf16": "bf16-mixed",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "64": "64-true",
}


def technique_settings(
    requested: Mapping[str, Setting | None], plan: str | Path | Plan | None
) -> tuple[dict[str, Setting], list[str]]:
    """Return the techniques to install, and remarks about those that can have no effect here.

    Args:
        requested: Technique name -> setting, as in the call; None: not asked for.
        plan: Plan, or path of its file; None: no plan.

    Raises:
        HastenError: A name or setting is unknown, or contradicts the plan.
    """
    base = Plan() if plan is None else plan if isinstance(plan, Plan) else Plan.read(plan)
    check(base)
    chosen = dict(base.techniques)
    machine = this_machine()
    notes = remarks(base, machine)
    for name, setting in requested.items():
        setting = _full(name, setting)
        if setting is None:
            continue
        _check(name, setting)
        if name in chosen and chosen[name] != setting:
            raise HastenError(
                f"the plan says {name} = {toml_value(chosen[name])} ({base.where(name)}), the call says "
                f"{name}={setting!r}",
                "leave one of them out",
            )
        if setting is not False and name not in chosen and (why := CATALOGUE[name].useless(setting, machine)):
            notes.append(f"{name}={setting!r} is of no use here: {why}")
        chosen[name] = setting
    on = {name: setting for name, setting in chosen.items() if setting is not False}
    if late := Allocator.too_late(on["allocator"]) if "allocator" in on else "":
        notes.append(f"allocator is not installed: {late}")
        del on["allocator"]
    return on, notes


def _full(name: str, setting: Setting | None) -> Setting | None:
    """Return a setting as the catalogue spells it; None if it needs no technique."""
    if name == "precision" and setting is not None:
        return _PRECISIONS.get(str(setting), setting)
    if name == "compile" and setting is True:
        return "default"
    return setting


def _check(name: str, setting: Setting) -> None:
    """Raise a HastenError if the technique is unknown, or the setting invalid."""
    technique = CATALOGUE.get(name)
    if technique is None:
        hint = did_you_mean(name, CATALOGUE) or "`hasten techniques` lists them"
        if name in ("accelerator", "device", "devices", "strategy"):
            hint = "devices and processes are the loop's own: model.to(device) before the call; or use hasten.Trainer"
        raise HastenError(f"setup({name}={setting!r}): there is no technique {name!r}", hint)
    if setting is not False and (wrong := technique.check(setting)):
        raise HastenError(f"setup({name}={setting!r}): {name} {wrong}")
