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
    def place(self) -> tuple[object, ...]:
        """The fields on which the effects of techniques depend."""
        return self.models, self.cpu, self.cores, self.gpus, self.torch, self.hasten

    @property
    def file(self) -> str:
        """File name in the store: one per training, machine and versions."""
        parts = (self.script, self.arguments, self.cpu, self.cores, self.gpus, self.torch, self.hasten)
        return f"{self.stem}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}.json"

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
    at, script, path = _script(command)
    machine = machine or this_machine()
    return Key(
        script=without_paths(script),
        code=_hash(path),
        arguments=tuple(without_paths(word)[:_ARGUMENT] for place, word in enumerate(command) if place != at),
        models=tuple(
            Model(one.name, dict(one.layers), one.parameters, one.input_shapes)
            for one in evidence.models
            if one.train_calls
        ),
        cpu=machine.cpu,
        cores=machine.cores,
        gpus=machine.gpus,
        torch=_two(evidence.flags.torch),
        hasten=_two(hasten.__version__),
    )


def changes(before: Key, now: Key) -> str:
    """Return what differs between two keys, in one line; "" if nothing does."""
    return "; ".join(_changes(before, now))


def _changes(before: Key, now: Key) -> Iterator[str]:
    for name in ("torch", "hasten"):
        if (one := getattr(before, name)) != (other := getattr(now, name)):
            yield f"{name} {_short(one)} -> {_short(other)}"
    if (before.cpu, before.cores, before.gpus) != (now.cpu, now.cores, now.gpus):
        yield f"another machine: {_machine(before)} -> {_machine(now)}"
    if before.models != now.models:
        yield f"the model changed: {_model_change(before.models, now.models)}"
    if before.arguments != now.arguments:
        yield f"other arguments: {_short(' '.join(before.arguments))} -> {_short(' '.join(now.arguments))}"
    if before.code != now.code:
        yield f"{_short(now.script)} changed"


def _model_change(before: tuple[Model, ...], now: tuple[Model, ...]) -> str:
    """Return the first difference between two lists of models, as text."""
    if len(before) != len(now):
        return f"{len(before)} -> {len(now)} models"
    one, other = next((one, other) for one, other in zip(before, now, strict=True) if one != other)
    if one.name != other.name:
        return f"{_short(one.name)} -> {_short(other.name)}"
    if one.parameters != other.parameters:
        return f"{one.parameters:,} -> {other.parameters:,} parameters"
    if one.inputs != other.inputs:
        return f"inputs {_shapes(one)} -> {_shapes(other)}"
    return f"other layers in {_short(other.name)}"


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
    for place, word in enumerate(command):
        if word == "-m" and place + 1 < len(command) and not command[place + 1].startswith("torch."):
            module = Path(*command[place + 1].split("."))
            files = (module.with_suffix(".py"), module / "__main__.py")
            return place + 1, command[place + 1], next((path for path in files if path.is_file()), None)
        path = Path(word)
        if path.suffix == ".py" and path.is_file():
            return place, word, path
    return 0, command[0], None


def _hash(path: Path | None) -> str:
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()[:16] if path is not None else ""
    except OSError:  # the file was deleted: without a hash it counts as another script
        return ""


def _two(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
