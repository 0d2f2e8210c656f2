"""Find a script's arguments for learning rate, batch size and length, and write command lines with other values.

Arguments are recognised by name. They come from the command line itself, and from the script's parser (argparse, and
parsers built on it, such as HfArgumentParser): the first run reports the parser's options with their values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hasten.errors import HastenError
from hasten.plan import did_you_mean
from hasten.tuner.command_line import with_argument
from hasten.tuner.length import EPOCHS

_INSIDE = r"^(?:--?|\+{1,2})?(?:[a-z_]+\.)*"  # `--`, or a Hydra path: `optim.lr`, `+trainer.max_epochs`
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_RATE = re.compile(_INSIDE + r"(?:(?:base|max|peak|init|initial)[-_])?(?:lr|learning[-_]?rate)(?:[-_](?:max|init))?$")
_BATCH = re.compile(_INSIDE + r"(?:per[-_]device[-_])?(?:train[-_])?(?:batch[-_]?size|bs|bsz)$|^-b$")
_STEPS = re.compile(
    _INSIDE + r"(?:max|num|n|total|train)?[-_]?(?:train(?:ing)?[-_])?(?:iter(?:ation)?s|steps|itrs|updates)$"
)
_FOLLOW = re.compile(
    _INSIDE + r"(?:num[-_])?(?:lr[-_])?(?:warm[-_]?up|decay|cooldown|anneal)[-_](?:iter(?:ation)?s|steps)$"
)
_PART = re.compile(
    _INSIDE + r"(?:(?:lr[-_])?(?:warm[-_]?up|decay|cooldown|anneal)[-_]epochs|(?:lr[-_])?step[-_]size|lr[-_]drop)$"
)
_VALIDATION_STEPS = re.compile(
    _INSIDE + r"(?:eval|val|validation|evaluation)[-_](?:interval|steps|every|iter(?:ation)?s[-_]every)$"
)


class Role(StrEnum):
    """Quantity that an argument sets."""

    RATE = "rate"
    BATCH = "batch"
    EPOCHS = "epochs"
    STEPS = "steps"  # length of the training, in steps
    FOLLOWS = "follows"  # length of a part of the schedule (warm-up, decay), in steps
    PARTS = "parts"  # the same, in epochs
    LOOKS = "looks"  # steps between two validations


_ROLES = (
    (Role.RATE, _RATE), (Role.BATCH, _BATCH), (Role.PARTS, _PART), (Role.EPOCHS, EPOCHS), (Role.FOLLOWS, _FOLLOW),
    (Role.LOOKS, _VALIDATION_STEPS), (Role.STEPS, _STEPS),
)  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """An argument of a script.

    Attributes:
        name: Name as on the command line: `--lr`, `optim.lr`.
        value: Value in the script's own run, as text.
        on_command_line: Whether the command line sets it; else `value` is the parser's default.
    """

    name: str
    value: str
    on_command_line: bool = True

    @property
    def number(self) -> float:
        """The value as a number; NaN unless it is a number above zero."""
        number = float(self.value) if _NUMBER.fullmatch(self.value) else math.nan
        return number if number > 0 else math.nan


@dataclass(frozen=True)
class Arguments:
    """The arguments of a training, by role.

    Attributes:
        command: The training's command line.
        by_role: Role -> argument, for arguments with a positive number. Those on the command line come before defaults.
        by_name: All arguments by name.
    """

    command: tuple[str, ...]
    by_role: Mapping[Role, Argument] = field(default_factory=dict)
    by_name: Mapping[str, Argument] = field(default_factory=dict)

    @property
    def length(self) -> Argument | None:
        """Argument that sets how long the script trains; None if there is none.

        If there is one for epochs and one for steps, the one on the command line counts.
        """
        lengths = [self.by_role[role] for role in (Role.EPOCHS, Role.STEPS) if role in self.by_role]
        return next((argument for argument in lengths if argument.on_command_line), lengths[0] if lengths else None)

    def all_of(self, role: Role) -> list[Argument]:
        """Return all arguments of a role, for roles a script may have several of (warm-up and decay)."""
        return [
            argument
            for argument in self.by_name.values()
            if role_of(argument.name) is role and not math.isnan(argument.number)
        ]


def arguments_of(command: Sequence[str], parsed: Iterable[tuple[Sequence[str], str]] = ()) -> Arguments:
    """Return a training's arguments.

    Args:
        command: The training's command line.
        parsed: The parser's options: the spellings of each, and its value in the script's own run.
    """
    by_name = {argument.name: argument for argument in _on_command_line(command)}
    for options, value in parsed:
        long = max(options, key=len)
        if not any(option in by_name for option in options):
            by_name[long] = Argument(long, value, on_command_line=False)
    by_role: dict[Role, Argument] = {}
    for argument in by_name.values():
        role = role_of(argument.name)
        if role is None or math.isnan(argument.number):
            continue
        if role not in by_role or (argument.on_command_line and not by_role[role].on_command_line):
            by_role[role] = argument
    return Arguments(tuple(command), by_role, by_name)


def role_of(name: str) -> Role | None:
    """Return the role of an argument with this name; None if the name does not tell."""
    return next((role for role, pattern in _ROLES if pattern.search(name.lower())), None)


def _on_command_line(command: Sequence[str]) -> list[Argument]:
    """Return the arguments of a command line of the form `--name value`, `--name=value` or `name=value`."""
    arguments = []
    for token, following in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = token.partition("=")
        if equals and re.fullmatch(r"(?:--?|\+{1,2})?[A-Za-z][\w.-]*", name):
            arguments.append(Argument(name, value))
        elif (
            re.fullmatch(r"--?[A-Za-z][\w-]*", token) and following and not re.fullmatch(r"-{1,2}[A-Za-z].*", following)
        ):
            arguments.append(Argument(token, following))
    return arguments


def with_arguments(command: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """Return a command line with other values of some arguments; arguments not on it are appended."""
    changed = list(command)
    for name, value in changes.items():
        changed = with_argument(changed, name, value)
    return changed


def varied(texts: Sequence[str], arguments: Arguments) -> dict[str, list[str]]:
    """Parse `--vary` options, such as `--lr=1e-3,3e-3`, into the values of each argument.

    Raises:
        HastenError: An option has another form or names an argument twice, or the script's parser has no such argument.
    """
    values_by_name: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        distinct = list(dict.fromkeys(filter(None, (value.strip() for value in values.split(",")))))
        if not (equals and name.strip() and distinct):
            raise HastenError(f"--vary {text!r}: not NAME=VALUE,VALUE", 'write --vary "--lr=1e-3,3e-3"')
        if name in values_by_name:
            raise HastenError(f"--vary names {name} twice", f'give all its values at once: --vary "{name}=..."')
        values_by_name[name] = distinct
    by_name = arguments.by_name
    # Only a script whose parser reported its options (arguments not `on_command_line`) is known to lack an argument.
    for name in values_by_name:
        if (
            name.startswith("-")
            and any(not argument.on_command_line for argument in by_name.values())
            and name not in by_name
        ):
            hint = did_you_mean(name, list(by_name)) or f"it has {', '.join(sorted(by_name))}"
            raise HastenError(f"--vary {name}: the script has no such argument", hint)
    return values_by_name


def format_number(number: float) -> str:
    """Format a number as a person would write it on a command line."""
    return f"{number:.3g}" if number < 1000 or number != int(number) else str(int(number))
