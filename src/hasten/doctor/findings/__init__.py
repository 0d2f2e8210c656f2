"""All that doctor finds: one file a finding, which is found here by being there."""

from __future__ import annotations

import importlib
import pkgutil

from hasten.doctor.rule import Rule
from hasten.plan import Setting
from hasten.techniques import CATALOGUE


def _in(module: str) -> type[Rule]:
    """Return the one rule of a file.

    Raises:
        TypeError: The file holds none, or more than one.
    """
    there = vars(importlib.import_module(f"{__name__}.{module}")).values()
    own = [one for one in there if isinstance(one, type) and issubclass(one, Rule) and one.__module__.endswith(module)]
    if len(own) != 1:
        raise TypeError(f"doctor/findings/{module}.py must hold one Rule")
    return own[0]


FINDINGS: dict[str, type[Rule]] = {module.name: _in(module.name) for module in pkgutil.iter_modules(__path__)}
"""Every finding by its name, in alphabetical order."""
IN_CODE = tuple(name for name, rule in FINDINGS.items() if "code" in rule.seen_in())
"""Those that are read from source code."""


def switched() -> dict[str, Setting]:
    """Return the cures that are switched on and off in a running training, with their settings, in plan order."""
    cures = {rule.cure.name: rule.tried for rule in FINDINGS.values() if rule.cure is not None}
    return {name: tried for name in CATALOGUE if (tried := cures.get(name)) is not None}


__all__ = ["FINDINGS", "IN_CODE", "Rule", "switched"]
