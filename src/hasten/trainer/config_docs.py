"""Makes the Trainer's docstring, its signature and the tables of docs/trainer.md from Config."""

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
    """Return a decorator that gives `__init__` its Config's signature, for type checkers and for `help`."""
    flags = list(inspect.signature(config).parameters.values())
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def signed(init: Any) -> Callable[Concatenate[Any, _P], None]:
        init.__signature__ = inspect.Signature([own, *flags])
        return cast("Callable[Concatenate[Any, _P], None]", init)

    return signed


def tables() -> dict[str, str]:
    """Return the Markdown tables of docs/trainer.md, by title."""
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
