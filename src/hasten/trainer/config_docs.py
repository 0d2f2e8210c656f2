"""A Trainer's flags as its docstring, its signature and the tables of docs/trainer.md."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, cast

from hasten.trainer.config import Config

_P = ParamSpec("_P")


def documentation() -> str:
    """Return the flags as the `Args` section of a docstring."""
    return "\n".join(
        f"        {flag.name}: {flag.metadata['doc']}. Default: {flag.default!r}." for flag in fields(Config)
    )


def takes(config: Callable[_P, Any]) -> Callable[[Any], Callable[Concatenate[Any, _P], None]]:
    """Give a Trainer's `__init__` the arguments of its Config, for type checkers and for `help`."""
    flags = list(inspect.signature(config).parameters.values())
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def signed(init: Any) -> Callable[Concatenate[Any, _P], None]:
        init.__signature__ = inspect.Signature([own, *flags])
        return cast("Callable[Concatenate[Any, _P], None]", init)

    return signed


def tables() -> dict[str, str]:
    """Return the tables of docs/trainer.md, by their titles."""
    groups = dict.fromkeys(flag.metadata["group"] for flag in fields(Config))
    return {group: _table(group) for group in groups}


def _table(group: str) -> str:
    rows = [flag for flag in fields(Config) if flag.metadata["group"] == group]
    lines = [f"| `{flag.name}` | `{_literal(flag.default)}` | {flag.metadata['doc']} |" for flag in rows]
    return "\n".join(("| flag | default | what it does |", "|---|---|---|", *lines))


def _literal(default: Any) -> str:
    return f'"{default}"' if isinstance(default, str) else repr(default)


if __name__ == "__main__":
    print("\n\n".join(f"{title}:\n\n{table}" for title, table in tables().items()))
