"""Identify a training and its machine, without paths, so that later tunes can recall what earlier ones learned."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hasten
from hasten.evidence import Evidence, Machine, this_machine
from hasten.files import read_bytes
from hasten.tuner.report_paths import shorten

_PATH = re.compile(r"(?<![\w.~/…-])(?:~|/)(?:[^\s=,:;'\"]*/)+")
_LONG = 60  # characters of a value in a message
_ARGUMENT = 200  # characters of one that are kept


@dataclass(frozen=True)
class Model:
    """A model: its class, number of layers by class, number of parameters, and the input shapes of its first call."""

    name: str
    layers: dict[str, int]
    parameters: int
    inputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Key:
    """Training, machine and versions for which a tune's results hold.

    Attributes:
        script: File name of the script, or the module.
        code: Hash of the script's content; "" if it could not be read.
        arguments: Arguments of the script.
        models: The models that are trained.
        cpu: Name of the processor.
        cores: Number of cores that the training may use.
        gpus: Names of the GPUs.
        torch: First two numbers of torch's version.
        hasten: First two numbers of hasten's version.
    """

    script: str
    code: str
    arguments: tuple[str, ...]
    models: tuple[Model, ...]
    cpu: str
    cores: int
    gpus: tuple[str, ...]
    torch: str
    hasten: str

    @property
    def effects_key(self) -> tuple[object, ...]:
        """The fields on which the effects of techniques depend."""
        return self.models, self.cpu, self.cores, self.gpus, self.torch, self.hasten

    @property
    def file(self) -> str:
        """File name in the store: one per training, machine and versions."""
        fields = (self.script, self.arguments, self.cpu, self.cores, self.gpus, self.torch, self.hasten)
        return f"{self.stem}-{hashlib.sha256(repr(fields).encode()).hexdigest()[:12]}.json"

    @property
    def stem(self) -> str:
        """The script's name, reduced to characters that every file system accepts."""
        return re.sub(r"[^\w-]", "_", Path(self.script).name.removesuffix(".py"))[:40] or "training"


def key_of(command: Sequence[str], evidence: Evidence, machine: Machine | None = None) -> Key:
    """Return the key of a training, from its command line and evidence.

    Args:
        command: The training's own: a script or `-m module`, or a launcher with its script.
        evidence: Of the script as it is.
        machine: Default: this one.
    """
    script_index, script, path = _script(command)
    machine = machine or this_machine()
    return Key(
        script=without_paths(script),
        code=_hash(path),
        arguments=tuple(
            without_paths(argument)[:_ARGUMENT] for index, argument in enumerate(command) if index != script_index
        ),
        models=tuple(
            Model(model.name, dict(model.layers), model.parameters, model.input_shapes)
            for model in evidence.models
            if model.train_calls
        ),
        cpu=machine.cpu,
        cores=machine.cores,
        gpus=machine.gpus,
        torch=_major_minor(evidence.flags.torch),
        hasten=_major_minor(hasten.__version__),
    )


def changes(earlier: Key, current: Key) -> str:
    """Return what differs between two keys, in one line; "" if nothing does."""
    return "; ".join(_changes(earlier, current))


def _changes(earlier: Key, current: Key) -> Iterator[str]:
    for name in ("torch", "hasten"):
        if (earlier_version := getattr(earlier, name)) != (current_version := getattr(current, name)):
            yield f"{name} {_short(earlier_version)} -> {_short(current_version)}"
    if (earlier.cpu, earlier.cores, earlier.gpus) != (current.cpu, current.cores, current.gpus):
        yield f"another machine: {_machine(earlier)} -> {_machine(current)}"
    if earlier.models != current.models:
        yield f"the model changed: {_model_change(earlier.models, current.models)}"
    if earlier.arguments != current.arguments:
        yield f"other arguments: {_short(' '.join(earlier.arguments))} -> {_short(' '.join(current.arguments))}"
    if earlier.code != current.code:
        yield f"{_short(current.script)} changed"


def _model_change(earlier: tuple[Model, ...], current: tuple[Model, ...]) -> str:
    """Return the first difference between two lists of models, as text."""
    if len(earlier) != len(current):
        return f"{len(earlier)} -> {len(current)} models"
    earlier_model, current_model = next(
        (earlier_model, current_model)
        for earlier_model, current_model in zip(earlier, current, strict=True)
        if earlier_model != current_model
    )
    if earlier_model.name != current_model.name:
        return f"{_short(earlier_model.name)} -> {_short(current_model.name)}"
    if earlier_model.parameters != current_model.parameters:
        return f"{earlier_model.parameters:,} -> {current_model.parameters:,} parameters"
    if earlier_model.inputs != current_model.inputs:
        return f"inputs {_shapes(earlier_model)} -> {_shapes(current_model)}"
    return f"other layers in {_short(current_model.name)}"


def _shapes(model: Model) -> str:
    return _short(", ".join("x".join(map(str, shape)) for shape in model.inputs)) or "not seen"


def _machine(key: Key) -> str:
    return _short(", ".join([key.cpu, f"{key.cores} cores", *key.gpus]))


def without_paths(text: str) -> str:
    """Return text in which paths outside the working folder are reduced to their last part."""
    return _PATH.sub("…/", shorten(text))


def _short(text: str) -> str:
    """Return text cut to a length and characters that are safe on a terminal, as it may come from any file."""
    text = "".join(sign if sign.isprintable() else " " for sign in text)
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def _script(command: Sequence[str]) -> tuple[int, str, Path | None]:
    """Return the script's position on the command line, its name there, and its file (None if not found)."""
    for index, argument in enumerate(command):
        if argument == "-m" and index + 1 < len(command) and not command[index + 1].startswith("torch."):
            module = Path(*command[index + 1].split("."))
            files = (module.with_suffix(".py"), module / "__main__.py")
            return index + 1, command[index + 1], next((path for path in files if path.is_file()), None)
        path = Path(argument)
        if path.suffix == ".py" and path.is_file():
            return index, argument, path
    return 0, command[0], None


def _hash(path: Path | None) -> str:
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()[:16] if path is not None else ""
    except OSError:  # the file was deleted: without a hash it counts as another script
        return ""


def _major_minor(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version
