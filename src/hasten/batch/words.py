"""What a search for a batch size found, in words and as JSON."""

from __future__ import annotations

from typing import Any

from hasten.batch.search import Found
from hasten.techniques.convergence import rates

SCHEMA = "hasten-batch/1"


def as_json(found: Found, command: tuple[str, ...]) -> dict[str, Any]:
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


def split(found: Found) -> dict[str, int]:
    """Return what the largest batch's peak goes to, in bytes; the rest is torch, the script and its data."""
    parts = dict(found.verified.split)
    parts["activations_and_batches"] = round(found.line.per_sample * found.verified.size)
    return {**parts, "rest": max(0, found.verified.peak - sum(parts.values()))}


def is_adaptive(found: Found) -> bool:
    """Whether an optimizer divides by the size of gradients, as Adam does."""
    return rates.is_adaptive(found.verified.optimizers)


def rate_factor(found: Found) -> float:
    """Return what the learning rate is multiplied by for the batch at which throughput saturates."""
    return round(rates.rate_factor(found.saturated / found.own, is_adaptive(found)), 2)


def rule(found: Found) -> str:
    """Return the rule behind the rate, and where it comes from."""
    if is_adaptive(found):
        return "a rule, not measured: the square root, and beta2 to the power, of the batch's factor; arXiv 2507.07101"
    return "a rule, not measured: in proportion to the batch, with a warm-up; Goyal et al. 2017"


def lines(found: Found) -> list[str]:
    """Return the page for a terminal."""
    bounds = {
        "memory": f"the next ones would not stay within {gigabytes(found.limit)}",
        "samples": "that is the whole data set",
        "time": "larger ones did not come to an end in time",
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
    page.append(
        "A larger batch takes fewer, larger steps: the same epochs may come to another loss. Nothing was changed."
    )
    return page


def _leaner(found: Found) -> list[str]:
    """Say how to need less, where the C library keeps much."""
    kept = max(one.peak - found.line.peak(one.size) for one in found.attempts if one.outcome == "ok")
    if found.verified.device != "cpu" or kept < 0.2 * found.verified.peak:
        return []
    return [f"the C library keeps up to {gigabytes(kept)} more, which MALLOC_MMAP_THRESHOLD_=1048576 has it give back"]


def gigabytes(size: float) -> str:
    """Return bytes as GB or MB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
