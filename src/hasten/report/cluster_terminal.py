"""Print a cluster plan (`hasten plan-cluster`): a training's predicted time on N devices."""

from __future__ import annotations

from rich.console import Console

from hasten.planner.cluster import MEASURED, ClusterPlan, Row
from hasten.report.screen import Screen
from hasten.report.words import NONE, clean, duration, percent, size

_ROOM = 10  # columns for a line's label
_WIDTHS = {"devices": 7, "strategy": -12, "step": 8, "waits": 8, "efficiency": 10, "memory": 11, "time": 11, "cost": 11}
"""Column widths of the table, in characters; a negative width aligns to the left."""


def show(found: ClusterPlan, source: str, console: Console) -> None:
    """Print a plan: the measurements it rests on, the table, and the assumptions.

    Args:
        found: The plan.
        source: Name of the evidence that the plan was computed from.
        console: Where to print; its width, colours and encoding are respected.
    """
    screen = Screen(console)
    title = f"Planned on paper from {clean(source)}: arithmetic, not a measurement. "
    screen.say(screen.text(title, "bold") + screen.text("How far it was checked: docs/cluster.md"), 0)
    console.print()
    for label, text in (
        ("measured", _measured(found)),
        ("holds", _holds(found)),
        ("network", _network(found)),
        ("batch", _batch(found)),
    ):
        screen.labelled(label, text, _ROOM)
    _table(found, screen)
    console.print()
    for text in found.assumed:
        screen.labelled("assumed", clean(text), _ROOM)
    for text in found.left_out:
        screen.labelled("left out", clean(text), _ROOM)


def _measured(found: ClusterPlan) -> str:
    job = found.job
    parts = {"data wait": job.data, "copy": job.transfer, "forward": job.forward, "backward": job.backward}
    sentences = [
        f"{name} {duration(part * job.batches)}" for name, part in {**parts, "other": job.other}.items() if part > 0
    ]
    of = f" of {job.batches} batches" if job.batches > 1 else ""
    return f"a step{of} takes {duration(job.step)}: {', '.join(sentences)}, optimizer {duration(job.optimizer)}"


def _holds(found: ClusterPlan) -> str:
    job = found.job
    peak = f"; peak {size(job.peak)}" if job.peak is not None else ""
    return f"parameters {size(job.parameters)}, gradients {size(job.gradients)}, optimizer {size(job.states)}{peak}"


def _network(found: ClusterPlan) -> str:
    network = found.network
    algorithm = "the faster of ring and tree" if network.algorithm == "auto" else network.algorithm
    speed = f"{network.bandwidth / 1e9:.4g} GB/s ({network.bandwidth * 8 / 1e9:.4g} Gb/s)"
    return f"{speed}, {duration(network.latency)} a message; all-reduce by {algorithm}"


def _batch(found: ClusterPlan) -> str:
    samples = found.job.batch_size
    each = f"{samples} samples" if samples else "the measured batch"
    if found.batch == "global":
        return f"global: {each}, shared by all devices"
    return f"per-device: {each} on each device, so a step takes N times as many; adapt rate and schedule"


def _table(found: ClusterPlan, screen: Screen) -> None:
    names = list(_WIDTHS)
    if found.job.samples is None or found.job.batch_size is None:
        names = names[:-2]
    elif found.price is None:
        names = names[:-1]
    else:
        screen.labelled("price", f"{found.price:g} for a device's hour", _ROOM)
    if "time" in names:
        screen.labelled("time", f"for {found.job.samples:,} samples", _ROOM)
    screen.console.print()
    _line({name: name for name in names}, screen, "dim")
    before = 1
    for row in found.rows:
        if row.devices != before:
            screen.console.print()
            before = row.devices
        cells = _cells(row)
        _line({name: cells[name] for name in names}, screen, "red" if row.fits is False else "")
    if any(row.fits is False for row in found.rows):
        screen.console.print(screen.text(f"! more than {size(found.memory)}", "red"))


def _cells(row: Row) -> dict[str, str]:
    memory = size(row.memory_bytes)
    return {
        "devices": f"{row.devices:,}",
        "strategy": row.strategy,
        "step": duration(row.step),
        "waits": NONE if row.strategy == MEASURED else duration(row.waits),
        "efficiency": percent(row.efficiency),
        "memory": f"{memory} !" if row.fits is False else memory,
        "time": duration(row.seconds),
        "cost": NONE if row.cost is None else f"{row.cost:,.2f}",
    }


def _line(cells: dict[str, str], screen: Screen, style: str = "") -> None:
    padded = [
        text.rjust(_WIDTHS[name]) if _WIDTHS[name] > 0 else text.ljust(-_WIDTHS[name]) for name, text in cells.items()
    ]
    screen.console.print(screen.text("  ".join(padded).rstrip(), style), soft_wrap=True)
