"""Chooses the techniques that a Trainer installs: those of its plan, and those that its flags stand for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hasten.evidence import this_machine
from hasten.plan import Plan, Setting
from hasten.run import Run
from hasten.techniques import CATALOGUE, build, check, remarks, toml_value
from hasten.techniques.memory.allocator import Allocator
from hasten.trainer.config import Config
from hasten.trainer.errors import WrongValueError, misconfigured

NEEDS_NOTHING = {
    "no_grad_validation": "the Trainer validates without graphs anyway",
    "set_to_none": "the Trainer drops gradients anyway",
    "debug_off": "the Trainer leaves detect_anomaly and profiler to its flags",
    "optimizer_in_backward": "the Trainer has it as a flag, optimizer_in_backward=True",
}
"""Techniques that are built into the Trainer, or are a flag -> why they are not installed."""


@dataclass(frozen=True)
class Installed:
    """The techniques that a Trainer installs.

    Attributes:
        settings: Technique name -> setting.
        run: The Run that holds them.
        callbacks: The callback that switches techniques during `fit`, if the plan is "auto" or a schedule.
        remarks: Lines to print about techniques that have no effect here.
    """

    settings: dict[str, Setting]
    run: Run
    callbacks: list[Any]
    remarks: list[str]


def installed(config: Config) -> Installed:
    """Return the techniques that flags and plan request.

    Raises:
        HastenError: A setting is unknown, or a flag and the plan contradict each other.
    """
    tuning = None
    if isinstance(config.plan, str | os.PathLike) and not config.fast_dev_run:
        from hasten.trainer.tuning import tuning_of

        tuning = tuning_of(config.plan)
    plan = None if tuning is not None or config.plan == "auto" else config.plan
    chosen, remarks = _chosen(config, plan)
    settings = {name: setting for name, setting in chosen.items() if not _left_out(name, setting)}
    if tuning is not None:
        return Installed(settings, tuning.board(config.techniques, settings), [tuning], remarks)
    return Installed(settings, Run(build(settings, CATALOGUE)), [], remarks)


def _chosen(config: Config, source: Any) -> tuple[dict[str, Setting], list[str]]:
    """Return the techniques of plan and flags that are on, and remarks about those that have no effect here."""
    flags = {name: setting for name, setting in config.techniques.items() if setting is not None}
    plan = Plan() if source is None else source if isinstance(source, Plan) else Plan.read(source)
    check(plan)
    chosen = dict(plan.techniques)
    for name, setting in flags.items():
        if name in chosen and chosen[name] != setting:
            raise misconfigured(
                f"the plan says {name} = {toml_value(chosen[name])} ({plan.where(name)}), the flag says"
                f" {toml_value(setting)}",
                "leave one of them out",
            )
        chosen[name] = setting
    machine = this_machine()
    notes = remarks(plan, machine)
    for name, setting in flags.items():
        if setting is False:
            continue
        if wrong := CATALOGUE[name].check(setting):
            raise WrongValueError(f"{name}={setting!r}: {wrong}")
        if why := CATALOGUE[name].useless(setting, machine):
            notes.append(f"{name}={setting!r} is of no use here: {why}")
    on = {name: setting for name, setting in chosen.items() if setting is not False}
    left_out = {name: _left_out(name, setting) for name, setting in on.items()}
    installed = {name: setting for name, setting in on.items() if not left_out[name]}
    for name, setting in installed.items():
        if why := CATALOGUE[name].clashes(setting, installed):
            raise misconfigured(f"{name}={setting!r} cannot act here: {why}", "leave one of them out")
    notes += [f"{name} of the plan is not installed: {why}" for name, why in left_out.items() if why]
    return on, notes


def _left_out(name: str, setting: Setting) -> str:
    """Return why a technique is not installed; "" if it is."""
    return NEEDS_NOTHING.get(name, "") or (Allocator.too_late(setting) if name == Allocator.name else "")


_ONE_OR_ALL = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")


def notes_on_one(flags: Mapping[str, Any]) -> list[str]:
    """Return a line for each flag given as 1 or 1.0, which mean different things and are easily confused."""
    notes = []
    for name in (*_ONE_OR_ALL, "overfit_batches", "val_check_interval"):
        value = flags.get(name)
        if type(value) in (int, float) and value == 1:
            if name == "val_check_interval":
                meaning = "validation will run after " + ("every batch" if type(value) is int else "an epoch")
            else:
                meaning = "1 batch will be used" if type(value) is int else "100% of the batches will be used"
            notes.append(f"`Trainer({name}={value})` was configured so {meaning}")
    return notes
