"""A command whose arguments end where a training's own command line begins."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from hasten.cli.command import split_line, tell_misplaced, without_python


class ScriptCommand(TyperCommand):
    """Options before the script are hasten's; the script (or `-m module`) and all that follows are the training's."""

    # typer carries a copy of click in some versions and needs the real one in others: hence `Any`.
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[OPTIONS] SCRIPT|-m MODULE [ARGS]...`."""
        return [*super().collect_usage_pieces(ctx), "SCRIPT|-m MODULE [ARGS]..."]

    def with_value(self) -> set[str]:
        """The options that take a value."""
        return {name for option in self.params if not getattr(option, "is_flag", False) for name in option.opts}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the line, and parse hasten's part."""
        split = split_line(args, self.with_value())
        ctx.meta["command"] = args[split:]
        return super().parse_args(ctx, args[:split])


def training(ctx: typer.Context) -> list[str]:
    """The training's command line, as it was split off; what looks misplaced in it is said."""
    command = without_python(list(ctx.meta["command"]))
    if not ctx.params.get("quiet"):
        tell_misplaced(command, {name for option in ctx.command.params for name in option.opts}, ctx.info_name or "")
    return command
