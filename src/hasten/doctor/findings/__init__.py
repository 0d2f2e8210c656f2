"""The catalogue of findings: each other file of this folder holds one rule and registers itself by being here."""

from __future__ import annotations

import importlib
import pkgutil

from hasten.doctor.rule import Rule
from hasten.plan import Setting
from hasten.techniques import CATALOGUE


def _rule_in(module: str) -> type[Rule]:
    """Return the rule that a module of this package defines.

    Raises:
        TypeError: The module defines none, or more than one.
    """
    members = vars(importlib.import_module(f"{__name__}.{module}")).values()
    # The module also imports Rule, which must not count.
    rules = [
        cls for cls in members if isinstance(cls, type) and issubclass(cls, Rule) and cls.__module__.endswith(module)
    ]
    if len(rules) != 1:
        raise TypeError(f"doctor/findings/{module}.py must hold one Rule")
    return rules[0]


FINDINGS: dict[str, type[Rule]] = {module.name: _rule_in(module.name) for module in pkgutil.iter_modules(__path__)}
"""The rules by the name of their finding, in alphabetical order."""
IN_CODE = tuple(name for name, rule in FINDINGS.items() if "code" in rule.detected_in())
"""Names of the findings that can be read from source code."""


def switched() -> dict[str, Setting]:
    """Return the techniques to switch on and off in a running training, with their settings, in plan order."""
    cures = {rule.cure.name: rule.tried for rule in FINDINGS.values() if rule.cure is not None}
    return {name: tried for name in CATALOGUE if (tried := cures.get(name)) is not None}


__all__ = ["FINDINGS", "IN_CODE", "Rule", "switched"]
