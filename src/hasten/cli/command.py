"""Parse a training's command line: where it begins, which script it names, and which process it starts."""

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
"""How the devices share the batches of a script written for one device."""


def split_line(args: list[str], with_value: set[str]) -> int:
    """Return the index in `args` at which the training's command line begins; a `--` there is removed from `args`.

    Args:
        args: Words after hasten's verb.
        with_value: hasten's options that take a value, so that the value is not taken for the script.
    """
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
    """Return a training's command without a leading `python`, if that is the Python that hasten runs in.

    Otherwise `hasten tune python train.py` would be taken for a launcher, whose processes cannot be tuned live. A
    `python` with options of its own (`python -u train.py`) is kept, and so is another environment's Python.
    """
    if len(command) < 2 or not re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        return command
    executable, own = shutil.which(command[0]), Path(sys.executable)
    if (command[1].startswith("-") and command[1] != "-m") or not executable:
        return command
    # Environments created from the same Python link to one file, so the folders must be equal too.
    here = Path(executable).parent.resolve() == own.parent.resolve()
    return command[1:] if here and Path(executable).resolve() == own.resolve() else command


def process_arguments(command: list[str], verb: str = "run") -> list[str]:
    """Return the arguments of the process that runs a training: this Python with a script or module, or a launcher.

    Args:
        command: The training's command line.
        verb: The hasten command that asks, for the error message.

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
    if path.suffix == ".ipynb" and path.is_file():  # Python would fail on an undefined `null`, or do nothing
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
    executable = shutil.which(first) or shutil.which(
        first, path=str(Path(sys.executable).parent)
    )  # torchrun of this venv
    folder_alone = path.is_dir() and len(command) == 1  # not a launcher: a launcher is given a script to start
    if ("/" not in first and first.endswith(".py")) or not executable or folder_alone:
        if path.is_dir():
            raise HastenError(f"{first} is a folder without a __main__.py", "name the script in it")
        near = [str(script) for script in Path(path.parent).glob("*.py")] if path.parent.is_dir() else []
        raise HastenError(f"no such script: {first}", did_you_mean(first, near) or f"looked in {Path.cwd()}")
    return [executable, *command[1:]]


def script_of(command: list[str]) -> Path | None:
    """Return the script's path if the command names an existing `.py` file; else None."""
    path = Path(command[0])
    return path if path.suffix == ".py" and path.is_file() else None


def tell_misplaced(command: list[str], own: Collection[str], verb: str) -> None:
    """Warn about hasten's options placed after the script, which the script gets instead.

    Args:
        command: The training's command line.
        own: hasten's options, such as `--budget`.
        verb: The hasten command that has them.
    """
    if behind := _misplaced(command, own):
        stand, get = ("stands", "it") if len(behind) == 1 else ("stand", "them")
        messages.tell(
            f"hasten: {', '.join(behind)} {stand} behind the script, so the script gets {get}; hasten's own options "
            f"stand before it: hasten {verb} {behind[0]} ... {command[0]}"
        )


def _misplaced(command: list[str], own: Collection[str]) -> list[str]:
    """Return the words after a script that are hasten's options, unless the code in the script's folder uses the name.

    Text search in the script's folder is a guess: the script's own parser may be defined in a file beside it.
    """
    words = [word for word in command[1:] if word.startswith("--") and word.partition("=")[0] in own]
    script = script_of(command) if words else None
    if script is None:
        return []
    beside = (path for path in script.resolve().parent.glob("*.py") if path.is_file() and os.access(path, os.R_OK))
    text = "".join(path.read_text("utf-8", "replace") for path in beside)
    by_name = "add_argument(" in text or ".option(" in text  # else options are named after variables: fire, dataclasses

    def is_known(word: str) -> bool:
        name = word.partition("=")[0]
        return name in text if by_name else re.search(rf"\b{name[2:].replace('-', '_')}\b", text) is not None

    return [word for word in words if not is_known(word)]


def trained(command: Sequence[str]) -> str:
    """Return the name of the script or module that a command line trains, with or without a launcher; "" if none."""
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    return next((Path(word).name for word in command if word.endswith(".py")), "")


def resume_arguments(text: str) -> list[str]:
    """Split the text of `--resume` into arguments, as a shell would.

    Raises:
        HastenError: A quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise HastenError(f"--resume {text!r}: {error}", "quote it as for a shell") from None
