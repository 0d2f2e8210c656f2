"""Print a cluster plan (`hasten plan-cluster`): a training's predicted time on N devices."""

from __future__ import annotations

from rich.console import Console

from hasten.planner.cluster import MEASURED, ClusterPlan, Row
from hasten.report.screen import Screen
from hasten.report.words import NONE, clean, duration, percent, size

_LABEL_WIDTH = 10  # columns for a line's label
_WIDTHS = {"devices": 7, "strategy": -12, "step": 8, "waits": 8, "efficiency": 10, "memory": 11, "time": 11, "cost": 11}
"""Column widths of the table, in characters; a negative width aligns to the left."""


def show(plan: ClusterPlan, source: str, console: Console) -> None:
    """Print a plan: the measurements it rests on, the table, and the assumptions.

    Args:
        plan: The plan.
        source: Name of the evidence that the plan was computed from.
        console: Where to print; its width, colours and encoding are respected.
    """
    screen = Screen(console)
    title = f"Planned on paper from {clean(source)}: arithmetic, not a measurement. "
    screen.say(screen.text(title, "bold") + screen.text("How far it was checked: docs/cluster.md"), 0)
    console.print()
    for label, text in (
        ("measured", _measured(plan)),
        ("holds", _holds(plan)),
        ("network", _network(plan)),
        ("batch", _batch(plan)),
    ):
        screen.labelled(label, text, _LABEL_WIDTH)
    _table(plan, screen)
    console.print()
    for text in plan.assumed:
        screen.labelled("assumed", clean(text), _LABEL_WIDTH)
    for text in plan.left_out:
        screen.labelled("left out", clean(text), _LABEL_WIDTH)


def _measured(plan: ClusterPlan) -> str:
    job = plan.job
    parts = {"data wait": job.data, "copy": job.transfer, "forward": job.forward, "backward": job.backward}
    sentences = [
        f"{name} {duration(part * job.batches)}" for name, part in {**parts, "other": job.other}.items() if part > 0
    ]
    batches = f" of {job.batches} batches" if job.batches > 1 else ""
    return f"a step{batches} takes {duration(job.step)}: {', '.join(sentences)}, optimizer {duration(job.optimizer)}"


def _holds(plan: ClusterPlan) -> str:
    job = plan.job
    peak = f"; peak {size(job.peak)}" if job.peak is not None else ""
    return f"parameters {size(job.parameters)}, gradients {size(job.gradients)}, optimizer {size(job.states)}{peak}"


def _network(plan: ClusterPlan) -> str:
    network = plan.network
    algorithm = "the faster of ring and tree" if network.algorithm == "auto" else network.algorithm
    speed = f"{network.bandwidth / 1e9:.4g} GB/s ({network.bandwidth * 8 / 1e9:.4g} Gb/s)"
    return f"{speed}, {duration(network.latency)} a message; all-reduce by {algorithm}"


def _batch(plan: ClusterPlan) -> str:
    samples = plan.job.batch_size
    samples_text = f"{samples} samples" if samples else "the measured batch"
    if plan.batch == "global":
        return f"global: {samples_text}, shared by all devices"
    return f"per-device: {samples_text} on each device, so a step takes N times as many; adapt rate and schedule"


def _table(plan: ClusterPlan, screen: Screen) -> None:
    names = list(_WIDTHS)
    if plan.job.samples is None or plan.job.batch_size is None:
        names = names[:-2]
    elif plan.price is None:
        names = names[:-1]
    else:
        screen.labelled("price", f"{plan.price:g} for a device's hour", _LABEL_WIDTH)
    if "time" in names:
        screen.labelled("time", f"for {plan.job.samples:,} samples", _LABEL_WIDTH)
    screen.console.print()
    _line({name: name for name in names}, screen, "dim")
    devices = 1
    for row in plan.rows:
        if row.devices != devices:
            screen.console.print()
            devices = row.devices
        cells = _cells(row)
        _line({name: cells[name] for name in names}, screen, "red" if row.fits is False else "")
    if any(row.fits is False for row in plan.rows):
        screen.console.print(screen.text(f"! more than {size(plan.memory)}", "red"))


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
