"""`hasten plan-cluster`: predict a training on many devices from evidence measured on one."""

from __future__ import annotations

import json as json_format
import math
import re
from dataclasses import replace
from pathlib import Path

import typer

from hasten import files
from hasten.cli.size import size_in_bytes
from hasten.errors import HastenError

_MOST = 1_000_000  # devices
_LATENCY = "10us"
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d{1,12}(?:\.\d{1,12})?)"


def plan_cluster(
    evidence: Path = typer.Argument(
        metavar="EVIDENCE", help="What `hasten run --evidence FILE` or `hasten doctor --evidence FILE` wrote."
    ),
    devices: str = typer.Option(..., help="How many devices: 8, or several numbers: 8,64,512.", metavar="N[,N...]"),
    network: str = typer.Option(
        ..., help="What each device sends while all do: 25GB/s (bytes), 200Gb/s (bits).", metavar="SPEED"
    ),
    latency: str = typer.Option("", help="What a message takes beside its bytes (default: 10us).", metavar="TIME"),
    algorithm: str = typer.Option("auto", help="Of all-reduce: ring, tree, or auto: the faster.", metavar="NAME"),
    batch: str = typer.Option(
        "per-device", help="per-device: each computes the measured batch; global: they share it.", metavar="HOW"
    ),
    batch_size: int | None = typer.Option(None, min=1, help="Samples of a measured batch.", metavar="N"),
    samples: int | None = typer.Option(
        None, min=1, help="Samples that time and cost are for (default: the training data, once).", metavar="N"
    ),
    memory: str = typer.Option("", help="Memory of a device: 80GiB.", metavar="SIZE"),
    price: float | None = typer.Option(
        None, min=0, help="Price of a device for an hour, in any currency.", metavar="PRICE"
    ),
    activations: str = typer.Option(
        "", help="Memory of a step beside parameters, gradients, optimizer states.", metavar="SIZE"
    ),
    optimizer_bytes: float | None = typer.Option(
        None, min=0, help="Bytes that the optimizer keeps for each parameter.", metavar="BYTES"
    ),
    units: int | None = typer.Option(None, min=1, help="FSDP's units: blocks, and one for the rest.", metavar="N"),
    json: Path | None = typer.Option(None, "--json", help="Write the plan there.", metavar="FILE"),
) -> None:
    """Plan a training on many devices, on paper: step, memory and cost by strategy, from evidence of one device.

    Arithmetic, not a measurement: from measured phases, message sizes and the speed of the network. What the evidence
    does not contain is asked for, or listed as assumed.

    Example: hasten plan-cluster evidence.json --devices 8,64 --network 25GB/s --memory 80GiB --price 2.5
    """
    from hasten.planner.cluster import SCHEMA, as_json, plan
    from hasten.planner.collectives import ALGORITHMS, Network
    from hasten.planner.job import JobOverrides

    _one_of("--algorithm", algorithm, ALGORITHMS)
    _one_of("--batch", batch, ("per-device", "global"))
    for option, value in (("--price", price), ("--optimizer-bytes", optimizer_bytes)):
        if value is not None and not math.isfinite(value):
            raise HastenError(f"{option} {value}: not a number", "write it as 2.5")
    given = JobOverrides(
        batch=batch,
        batch_size=batch_size,
        state=optimizer_bytes,
        activations=size_in_bytes(activations, "--activations") if activations else None,
        units=units,
        samples=samples,
    )
    counts, links = _devices(devices), Network(_speed(network), _seconds(latency or _LATENCY), algorithm)
    limit = size_in_bytes(memory, "--memory") if memory else None
    if json is not None:
        files.check_target(json, "the plan", files.json_of(SCHEMA))
    from rich.console import Console

    from hasten.evidence import read_evidence
    from hasten.report.cluster_terminal import show

    found = plan(read_evidence(evidence), counts, links, given, limit, price)
    if not latency:
        found = replace(found, assumed=(f"a message takes {_LATENCY} beside its bytes (--latency)", *found.assumed))
    show(found, str(evidence), Console())
    if json is not None:
        text = json_format.dumps(as_json(found, evidence.name), indent=1, allow_nan=False)
        files.write_own(json, text + "\n", "the plan", files.json_of(SCHEMA))


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise HastenError(f"{option} {value}: not known", f"say {', '.join(known[:-1])} or {known[-1]}")


def _devices(text: str) -> list[int]:
    """Parse numbers of devices, such as "8,64".

    Raises:
        HastenError: The text is not a list of numbers of devices.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch(r"[1-9]\d{0,6}", word) or int(word) > _MOST:
            raise HastenError(
                f"--devices {text}: {word!r} is not a number of devices", f"write 8, or 8,64,512 (1 to {_MOST:,})"
            )
    return [int(word) for word in words]


def _speed(text: str) -> float:
    """Parse a network speed into bytes per second: B means bytes, b and bit mean bits; prefixes in either case.

    Raises:
        HastenError: The text is not a speed.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*([kKmMgGtT]?i?)(B|b|bit|bits)(?:/s|ps)", text.strip())
    prefix = match[2].lower() if match else ""
    if match is None or prefix not in _PREFIXES or not float(match[1]) > 0:
        raise HastenError(
            f"--network {text}: not a speed", "write bytes a second as 25GB/s, or bits a second as 200Gb/s"
        )
    return float(match[1]) * _PREFIXES[prefix] / (1 if match[3] == "B" else 8)


def _seconds(text: str) -> float:
    """Parse a time such as 10us into seconds.

    Raises:
        HastenError: The text is not a time.
    """
    match = re.fullmatch(rf"{_NUMBER}\s*(ns|us|µs|ms|s)", text.strip())
    if match is None:
        raise HastenError(f"--latency {text}: not a time", "write 10us, 0.05ms or 0s")
    return float(match[1]) * _SECONDS[match[2]]
