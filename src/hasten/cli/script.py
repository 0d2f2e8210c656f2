"""Base class of the commands whose arguments end where a training's own command line begins."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from hasten.cli.command import split_line, tell_misplaced, without_python


class ScriptCommand(TyperCommand):
    """A command whose options come before the script; the script (or `-m MODULE`) and its arguments are passed on."""

    # Some versions of typer vendor click, others use the real one: hence `Any` for click's types.
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line: `[OPTIONS] SCRIPT|-m MODULE [ARGS]...`."""
        return [*super().collect_usage_pieces(ctx), "SCRIPT|-m MODULE [ARGS]..."]

    def with_value(self) -> set[str]:
        """Return the names of the options that take a value."""
        return {name for option in self.params if not getattr(option, "is_flag", False) for name in option.opts}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the training's part of the line in `ctx.meta`, and parse hasten's part."""
        split = split_line(args, self.with_value())
        ctx.meta["command"] = args[split:]
        return super().parse_args(ctx, args[:split])


def training(ctx: typer.Context) -> list[str]:
    """Return the training's command line, without a leading `python`; warn about misplaced options of hasten's."""
    command = without_python(list(ctx.meta["command"]))
    if not ctx.params.get("quiet"):
        tell_misplaced(command, {name for option in ctx.command.params for name in option.opts}, ctx.info_name or "")
    return command
