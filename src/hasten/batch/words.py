"""The result of a search for a batch size, in words and as JSON."""

from __future__ import annotations

import math
from typing import Any

from hasten.batch import noise
from hasten.batch.search import BatchSearchResult
from hasten.techniques.convergence import noise_scale, rates

SCHEMA = "hasten-batch/1"


def as_json(found: BatchSearchResult, command: tuple[str, ...]) -> dict[str, Any]:
    """Return plain data, for a file."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "own_batch_size": found.own,
        "memory_limit_bytes": found.limit,
        "largest_safe_batch_size": found.largest,
        "bound_by": found.bound,
        "saturated_batch_size": found.saturated,
        "needed_bytes": {"fixed": round(found.line.fixed), "per_sample": round(found.line.per_sample)},
        "split_bytes": split(found),
        "rate_factor": {"batch_size": found.saturated, "factor": rate_factor(found), "rule": rule(found)},
        "critical_batch": None if found.critical is None else {**noise.as_json(found.critical), **forecast(found)},
        "attempts": [
            {
                "batch_size": one.size,
                "outcome": one.outcome,
                "reason": one.reason,
                "peak_bytes": one.peak,
                "samples_per_second": round(one.rate, 1),
            }
            for one in found.attempts
        ],
    }


def split(found: BatchSearchResult) -> dict[str, int]:
    """Return what the largest batch's peak goes to, in bytes; the rest is torch, the script and its data."""
    parts = dict(found.verified.split)
    parts["activations_and_batches"] = round(found.line.per_sample * found.verified.size)
    return {**parts, "rest": max(0, found.verified.peak - sum(parts.values()))}


def is_adaptive(found: BatchSearchResult) -> bool:
    """Whether an optimizer divides by the size of gradients, as Adam does."""
    return rates.is_adaptive(found.verified.optimizers)


def rate_factor(found: BatchSearchResult) -> float:
    """Return what the learning rate is multiplied by for the batch at which throughput saturates."""
    return round(rates.rate_factor(found.saturated / found.own, is_adaptive(found)), 2)


def rule(found: BatchSearchResult) -> str:
    """Return the rule behind the rate, and where it comes from."""
    if is_adaptive(found):
        return "a rule, not measured: the square root, and beta2 to the power, of the batch's factor; arXiv 2507.07101"
    return "a rule, not measured: in proportion to the batch, with a warm-up; Goyal et al. 2017"


def lines(found: BatchSearchResult) -> list[str]:
    """Return the page for a terminal."""
    bounds = {
        "memory": f"the next ones would not stay within {gigabytes(found.limit)}",
        "samples": "that is the whole data set",
        "time": "larger ones did not finish in time",
        "the script": "the script did not train with a larger one",
    }
    page = [
        f"largest batch that is safe: {found.largest}   ({bounds[found.bound]}; it has {found.own} now)",
        f"throughput saturates at:    {found.saturated}   (the smallest within 5 % of the best)",
        "",
        "   batch      peak   samples/s",
    ]
    for one in sorted(found.attempts, key=lambda one: one.size):
        figures = f"{gigabytes(one.peak):>10}  {one.rate:>10,.0f}" if one.outcome == "ok" else f"  {one.outcome}"
        page.append(f"{one.size:>8}{figures}")
    page += [
        "",
        f"memory needed = {gigabytes(found.line.fixed)} + {found.line.per_sample / 1e6:.3g} MB x batch",
        *_leaner(found),
        f"at batch {found.largest} it goes to:",
    ]
    page += [f"  {name.replace('_', ' '):<26}{gigabytes(size):>10}" for name, size in split(found).items()]
    if found.saturated > found.own:
        page += ["", f"rate for batch {found.saturated}: {rate_factor(found):g}x the script's ({rule(found)})"]
    page += _critical(found)
    page += [
        "A larger batch takes fewer, larger steps: the same epochs may come to another loss. Nothing was changed.",
        "What the script counts in steps (a schedule's length, warm-up, a last step) has to be divided with it.",
    ]
    return page


def forecast(found: BatchSearchResult) -> dict[str, dict[str, float]]:
    """Return what the noise scale foretells of the batch at which throughput saturates; {} where there is none."""
    last = found.critical.last if found.critical is not None else None
    if last is None or found.saturated == found.own:
        return {}
    former, batch = found.own, found.saturated
    return {
        "at_saturated": {
            "batch_size": batch,
            "steps_factor": round(noise_scale.steps_factor(last.value, former, batch), 3),
            "samples_factor": round(noise_scale.samples_factor(last.value, former, batch), 3),
            "sgd_rate_factor": round(noise_scale.rate_factor(last.value, former, batch), 3),
        }
    }


def last_value(found: BatchSearchResult) -> float:
    """Return the latest noise scale; infinite where there is none."""
    last = found.critical.last if found.critical is not None else None
    return last.value if last is not None else math.inf


def _critical(found: BatchSearchResult) -> list[str]:
    """Say what the critical batch is, and what it means for batch and rate."""
    if found.critical is None:
        return []
    page = ["", *noise.lines(found.critical)]
    last = found.critical.last
    if last is not None and last.high <= found.own:
        page.append(f"batch {found.own} is above it: a larger one saves few steps here.")
    if foretold := forecast(found).get("at_saturated"):
        page.append(
            f"By it, batch {found.saturated} takes {foretold['steps_factor']:.3g}x the steps and"
            f" {foretold['samples_factor']:.3g}x the samples of batch {found.own} to the same loss"
            + ("" if is_adaptive(found) else f", with {foretold['sgd_rate_factor']:.3g}x the rate")
        )
        page.append("(a model of SGD with its best rates, not measured: McCandlish et al. 2018, arXiv 1812.06162).")
        if foretold["batch_size"] > last_value(found):
            page.append("The rule for the rate above holds up to about the critical batch.")
    return page


def _leaner(found: BatchSearchResult) -> list[str]:
    """Say how to need less, where the C library keeps much."""
    kept = max(one.peak - found.line.peak(one.size) for one in found.attempts if one.outcome == "ok")
    if found.verified.device != "cpu" or kept < 0.2 * found.verified.peak:
        return []
    return [f"the C library keeps up to {gigabytes(kept)} more, which MALLOC_MMAP_THRESHOLD_=1048576 has it give back"]


def gigabytes(size: float) -> str:
    """Return bytes as GB or MB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
