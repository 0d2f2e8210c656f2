"""Describe the result of a search for a batch size, as lines for a terminal and as JSON."""

from __future__ import annotations

import math
from typing import Any

from hasten.batch import noise
from hasten.batch.search import BatchSearchResult
from hasten.techniques.convergence import noise_scale, rates

SCHEMA = "hasten-batch/1"


def as_json(result: BatchSearchResult, command: tuple[str, ...]) -> dict[str, Any]:
    """Return the result as plain data for a file."""
    return {
        "schema": SCHEMA,
        "command": list(command),
        "own_batch_size": result.own,
        "memory_limit_bytes": result.limit,
        "largest_safe_batch_size": result.largest if result.is_safe else None,
        "bound_by": result.bound,
        "saturated_batch_size": result.saturated,
        "needed_bytes": {"fixed": round(result.line.fixed), "per_sample": round(result.line.per_sample)},
        "split_bytes": split(result),
        "rate_factor": {"batch_size": result.saturated, "factor": rate_factor(result), "rule": rule(result)},
        "critical_batch": None if result.critical is None else {**noise.as_json(result.critical), **forecast(result)},
        "attempts": [
            {
                "batch_size": attempt.size,
                "outcome": attempt.outcome,
                "reason": attempt.reason,
                "peak_bytes": attempt.peak,
                "samples_per_second": round(attempt.rate, 1),
            }
            for attempt in result.attempts
        ],
    }


def split(result: BatchSearchResult) -> dict[str, int]:
    """Return the largest batch's peak by part, in bytes; "rest" is torch, the script and its data."""
    parts = dict(result.verified.split)
    parts["activations_and_batches"] = round(result.line.per_sample * result.verified.size)
    return {**parts, "rest": max(0, result.verified.peak - sum(parts.values()))}


def is_adaptive(result: BatchSearchResult) -> bool:
    """Return whether an optimizer divides by the size of gradients, as Adam does."""
    return rates.is_adaptive(result.verified.optimizers)


def rate_factor(result: BatchSearchResult) -> float:
    """Return the factor of the learning rate for the batch at which throughput saturates."""
    return round(rates.rate_factor(result.saturated / result.own, is_adaptive(result)), 2)


def rule(result: BatchSearchResult) -> str:
    """Return the rule that gives `rate_factor`, and its source."""
    if is_adaptive(result):
        return "a rule, not measured: the square root, and beta2 to the power, of the batch's factor; arXiv 2507.07101"
    return "a rule, not measured: in proportion to the batch, with a warm-up; Goyal et al. 2017"


def lines(result: BatchSearchResult) -> list[str]:
    """Return the result as lines for a terminal."""
    bounds = {
        "memory": f"the next ones would not stay within {gigabytes(result.limit)}",
        "samples": "that is the whole data set",
        "time": "larger ones did not finish in time",
        "the script": "the script did not train with a larger one",
    }
    largest = f"largest batch that is safe: {result.largest}   ({bounds[result.bound]}; it has {result.own} now)"
    if not result.is_safe:
        room = gigabytes(result.limit - result.verified.peak)
        largest = f"no batch is safe: the smallest that ran, {result.largest}, left {room} of {gigabytes(result.limit)}"
    page = [
        largest,
        f"throughput saturates at:    {result.saturated}   (the smallest within 5 % of the best)",
        "",
        "   batch      peak   samples/s",
    ]
    for run in sorted(result.attempts, key=lambda attempt: attempt.size):
        figures = f"{gigabytes(run.peak):>10}  {run.rate:>10,.0f}" if run.outcome == "ok" else f"  {run.outcome}"
        page.append(f"{run.size:>8}{figures}")
    page += [
        "",
        f"memory needed = {gigabytes(result.line.fixed)} + {result.line.per_sample / 1e6:.3g} MB x batch",
        *_leaner(result),
        f"at batch {result.largest} it goes to:",
    ]
    page += [f"  {name.replace('_', ' '):<26}{gigabytes(size):>10}" for name, size in split(result).items()]
    if result.saturated > result.own:
        page += ["", f"rate for batch {result.saturated}: {rate_factor(result):g}x the script's ({rule(result)})"]
    page += _critical(result)
    page += [
        "A larger batch takes fewer, larger steps: the same epochs may come to another loss. Nothing was changed.",
        "What the script counts in steps (a schedule's length, warm-up, a last step) has to be divided with it.",
    ]
    return page


def forecast(result: BatchSearchResult) -> dict[str, dict[str, float]]:
    """Return what the noise scale predicts for the batch at which throughput saturates; {} without a prediction."""
    latest = result.critical.last if result.critical is not None else None
    if latest is None or result.saturated == result.own:
        return {}
    own_size, batch = result.own, result.saturated
    return {
        "at_saturated": {
            "batch_size": batch,
            "steps_factor": round(noise_scale.steps_factor(latest.value, own_size, batch), 3),
            "samples_factor": round(noise_scale.samples_factor(latest.value, own_size, batch), 3),
            "sgd_rate_factor": round(noise_scale.rate_factor(latest.value, own_size, batch), 3),
        }
    }


def last_value(result: BatchSearchResult) -> float:
    """Return the latest noise scale; infinite if there is none."""
    latest = result.critical.last if result.critical is not None else None
    return latest.value if latest is not None else math.inf


def _critical(result: BatchSearchResult) -> list[str]:
    """Return lines on the critical batch, and what it means for batch size and learning rate."""
    if result.critical is None:
        return []
    page = ["", *noise.lines(result.critical)]
    latest = result.critical.last
    if latest is not None and latest.high <= result.own:
        page.append(f"batch {result.own} is above it: a larger one saves few steps here.")
    if predicted := forecast(result).get("at_saturated"):
        page.append(
            f"By it, batch {result.saturated} takes {predicted['steps_factor']:.3g}x the steps and"
            f" {predicted['samples_factor']:.3g}x the samples of batch {result.own} to the same loss"
            + ("" if is_adaptive(result) else f", with {predicted['sgd_rate_factor']:.3g}x the rate")
        )
        page.append("(a model of SGD with its best rates, not measured: McCandlish et al. 2018, arXiv 1812.06162).")
        if predicted["batch_size"] > last_value(result):
            page.append("The rule for the rate above holds up to about the critical batch.")
    return page


def _leaner(result: BatchSearchResult) -> list[str]:
    """Return a line on how to need less memory, if the C library keeps much freed memory; else none."""
    excess = max(
        attempt.peak - result.line.peak(attempt.size) for attempt in result.attempts if attempt.outcome == "ok"
    )
    if result.verified.device != "cpu" or excess < 0.2 * result.verified.peak:
        return []
    return [
        f"the C library keeps up to {gigabytes(excess)} more, which MALLOC_MMAP_THRESHOLD_=1048576 has it give back"
    ]


def gigabytes(size: float) -> str:
    """Format an amount of bytes as GB or MB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
