"""Describe the result of a search for a batch size, as lines for a terminal and as JSON."""

from __future__ import annotations

import math
from typing import Any

from hasten.batch import noise
from hasten.batch.search import BatchSearchResult
from hasten.techniques.convergence import noise_scale, rates

SCHEMA = "hasten-batch/1"


def as_json(found: BatchSearchResult, command: tuple[str, ...]) -> dict[str, Any]:
    """Return the result as plain data for a file."""
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
                "batch_size": attempt.size,
                "outcome": attempt.outcome,
                "reason": attempt.reason,
                "peak_bytes": attempt.peak,
                "samples_per_second": round(attempt.rate, 1),
            }
            for attempt in found.attempts
        ],
    }


def split(found: BatchSearchResult) -> dict[str, int]:
    """Return the largest batch's peak by part, in bytes; "rest" is torch, the script and its data."""
    parts = dict(found.verified.split)
    parts["activations_and_batches"] = round(found.line.per_sample * found.verified.size)
    return {**parts, "rest": max(0, found.verified.peak - sum(parts.values()))}


def is_adaptive(found: BatchSearchResult) -> bool:
    """Return whether an optimizer divides by the size of gradients, as Adam does."""
    return rates.is_adaptive(found.verified.optimizers)


def rate_factor(found: BatchSearchResult) -> float:
    """Return the factor of the learning rate for the batch at which throughput saturates."""
    return round(rates.rate_factor(found.saturated / found.own, is_adaptive(found)), 2)


def rule(found: BatchSearchResult) -> str:
    """Return the rule that gives `rate_factor`, and its source."""
    if is_adaptive(found):
        return "a rule, not measured: the square root, and beta2 to the power, of the batch's factor; arXiv 2507.07101"
    return "a rule, not measured: in proportion to the batch, with a warm-up; Goyal et al. 2017"


def lines(found: BatchSearchResult) -> list[str]:
    """Return the result as lines for a terminal."""
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
    for run in sorted(found.attempts, key=lambda attempt: attempt.size):
        figures = f"{gigabytes(run.peak):>10}  {run.rate:>10,.0f}" if run.outcome == "ok" else f"  {run.outcome}"
        page.append(f"{run.size:>8}{figures}")
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
    """Return what the noise scale predicts for the batch at which throughput saturates; {} without a prediction."""
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
    """Return the latest noise scale; infinite if there is none."""
    last = found.critical.last if found.critical is not None else None
    return last.value if last is not None else math.inf


def _critical(found: BatchSearchResult) -> list[str]:
    """Return lines on the critical batch, and what it means for batch size and learning rate."""
    if found.critical is None:
        return []
    page = ["", *noise.lines(found.critical)]
    last = found.critical.last
    if last is not None and last.high <= found.own:
        page.append(f"batch {found.own} is above it: a larger one saves few steps here.")
    if predicted := forecast(found).get("at_saturated"):
        page.append(
            f"By it, batch {found.saturated} takes {predicted['steps_factor']:.3g}x the steps and"
            f" {predicted['samples_factor']:.3g}x the samples of batch {found.own} to the same loss"
            + ("" if is_adaptive(found) else f", with {predicted['sgd_rate_factor']:.3g}x the rate")
        )
        page.append("(a model of SGD with its best rates, not measured: McCandlish et al. 2018, arXiv 1812.06162).")
        if predicted["batch_size"] > last_value(found):
            page.append("The rule for the rate above holds up to about the critical batch.")
    return page


def _leaner(found: BatchSearchResult) -> list[str]:
    """Return a line on how to need less memory, if the C library keeps much freed memory; else none."""
    kept = max(each.peak - found.line.peak(each.size) for each in found.attempts if each.outcome == "ok")
    if found.verified.device != "cpu" or kept < 0.2 * found.verified.peak:
        return []
    return [f"the C library keeps up to {gigabytes(kept)} more, which MALLOC_MMAP_THRESHOLD_=1048576 has it give back"]


def gigabytes(size: float) -> str:
    """Format an amount of bytes as GB or MB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
