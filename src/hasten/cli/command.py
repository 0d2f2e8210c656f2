"""A training's own command line: where it begins, and the process it stands for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from hasten import messages
from hasten.errors import HastenError
from hasten.plan import did_you_mean

LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "srun", "mpirun"}
"""Programs that start a training's processes themselves."""


BATCHES = ("global", "per-device")
"""How the devices to which a script is carried share its batches."""


def split_line(args: list[str], with_value: set[str]) -> int:
    """Return where the training's command line begins."""
    position = 0
    while position < len(args):
        word = args[position]
        if word == "--":
            del args[position]
            return position
        if word == "-m" or not word.startswith("-"):
            return position
        position += 2 if word in with_value and "=" not in word else 1
    return position


def without_python(command: list[str]) -> list[str]:
    """Return a training's command without a `python` in front, where that is the one that hasten runs in.

    `hasten tune python train.py` would else be taken for a launcher, whose processes cannot be tuned while they run.
    Options of Python's (`python -u train.py`) stay, and so does another environment's Python.
    """
    if len(command) < 2 or not re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        return command
    found, own = shutil.which(command[0]), Path(sys.executable)
    if (command[1].startswith("-") and command[1] != "-m") or not found:
        return command
    # Environments made of the same Python have links to one file: what tells them apart is the folder.
    here = Path(found).parent.resolve() == own.parent.resolve()
    return command[1:] if here and Path(found).resolve() == own.resolve() else command


def process_arguments(command: list[str], verb: str = "run") -> list[str]:
    """The arguments of the process that runs a training: a script or a module by this Python, or a launcher.

    Args:
        command: The training's own command line.
        verb: Which of hasten's commands asks, for the message.

    Raises:
        HastenError: There is no such script, it is a notebook, or nothing to run was named.
    """
    if not command:
        raise HastenError("no script was named", f"hasten {verb} SCRIPT ARGS, or hasten {verb} -m MODULE ARGS")
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise HastenError("-m needs a module", f"hasten {verb} -m pkg.train ARGS")
        return [sys.executable, *command]
    path = Path(first)
    if path.suffix == ".ipynb" and path.is_file():  # Python would say that `null` is not defined, or see nothing
        remedy = f"export it as a script: jupyter nbconvert --to script {shlex.quote(first)}"
        raise HastenError(f"{first} is a notebook, not a script", remedy)
    if path.exists() and not path.is_file() and not path.is_dir():  # `hasten run <(...)`, as Python can
        if verb == "run":
            return [sys.executable, *command]
        raise HastenError(
            f"{first} is a pipe or a device: hasten {verb} runs a script more than once", "save it as a file"
        )
    if (path.is_file() and (path.suffix == ".py" or not os.access(path, os.X_OK))) or (path / "__main__.py").is_file():
        return [sys.executable, *command]
    found = shutil.which(first) or shutil.which(first, path=str(Path(sys.executable).parent))  # torchrun of this venv
    folder_alone = path.is_dir() and len(command) == 1  # no launcher: those are told what to start
    if ("/" not in first and first.endswith(".py")) or not found or folder_alone:
        if path.is_dir():
            raise HastenError(f"{first} is a folder without a __main__.py", "name the script in it")
        near = [str(found) for found in Path(path.parent).glob("*.py")] if path.parent.is_dir() else []
        raise HastenError(f"no such script: {first}", did_you_mean(first, near) or f"looked in {Path.cwd()}")
    return [found, *command[1:]]


def script_of(command: list[str]) -> Path | None:
    """The script's file, where the command names one."""
    path = Path(command[0])
    return path if path.suffix == ".py" and path.is_file() else None


def tell_misplaced(command: list[str], own: Collection[str], verb: str) -> None:
    """Say which of hasten's own options the script gets.

    Args:
        command: The training's own command line.
        own: The options, such as `--budget`.
        verb: Which of hasten's commands has them.
    """
    if behind := _misplaced(command, own):
        stand, get = ("stands", "it") if len(behind) == 1 else ("stand", "them")
        messages.tell(
            f"hasten: {', '.join(behind)} {stand} behind the script, so the script gets {get}; hasten's own options "
            f"stand before it: hasten {verb} {behind[0]} ... {command[0]}"
        )


def _misplaced(command: list[str], own: Collection[str]) -> list[str]:
    """The words behind a script that are options of hasten's own, where the code beside it knows no such name."""
    words = [word for word in command[1:] if word.startswith("--") and word.partition("=")[0] in own]
    script = script_of(command) if words else None
    if script is None:
        return []
    beside = (path for path in script.resolve().parent.glob("*.py") if path.is_file() and os.access(path, os.R_OK))
    said = "".join(path.read_text("utf-8", "replace") for path in beside)
    by_name = "add_argument(" in said or ".option(" in said  # else by a variable's: fire, dataclasses

    def is_known(word: str) -> bool:
        name = word.partition("=")[0]
        return name in said if by_name else re.search(rf"\b{name[2:].replace('-', '_')}\b", said) is not None

    return [word for word in words if not is_known(word)]


def trained(command: Sequence[str]) -> str:
    """Return the name of the script or module that a command line trains, whoever starts it; "" where none is named."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return next((Path(word).name for word in command if word.endswith(".py")), "")


def resume_arguments(text: str) -> list[str]:
    """Split the further arguments of a run that goes on, as a shell would.

    Raises:
        HastenError: A quotation in it has no end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise HastenError(f"--resume {text!r}: {error}", "quote it as for a shell") from None
