"""Measure the critical batch size: the gradient noise scale of an unchanged script, after some of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.batch.attempt import Attempts
from hasten.errors import HastenError
from hasten.techniques.convergence.noise_scale import FEWEST, NoiseScale, noise_scale

_GRADIENTS = 32  # batches per measurement


@dataclass(frozen=True)
class CriticalBatch:
    """A script's critical batch size, by its gradients.

    Attributes:
        looks: (steps made before, noise scale) of each measurement, in order.
        why: Why there are no more measurements; "" if all were made.
    """

    looks: tuple[tuple[int, NoiseScale], ...]
    why: str = ""

    @property
    def last(self) -> NoiseScale | None:
        """The latest measurement; None if there is none."""
        return self.looks[-1][1] if self.looks else None


def steps_to_look_at(text: str) -> tuple[int, ...]:
    """Parse `--noise-at`, such as "10,30,90"; "0" means none.

    Raises:
        HastenError: The text is not an ascending list of steps.
    """
    numbers = [number.strip() for number in text.split(",")]
    steps = tuple(int(number) for number in numbers if number.isdecimal())
    if steps == (0,) and len(numbers) == 1:
        return ()
    if len(steps) != len(numbers) or not steps or steps[0] < 1 or list(steps) != sorted(set(steps)):
        raise HastenError(
            f"--noise-at {text}: not a list of rising numbers of steps", 'write "10,30,90", or 0 for none'
        )
    return steps


def critical_batch(
    attempts: Attempts, own_size: int, samples: int, after_steps: Sequence[int], say: Callable[[str], None]
) -> CriticalBatch:
    """Measure the noise scale with the script's own batch size, in a separate process.

    Args:
        attempts: Runs the measurement.
        own_size: The script's own batch size.
        samples: Number of samples in the training loader's dataset; 0 if unknown.
        after_steps: Steps after which to measure, since the noise scale rises from near 0 at the start.
        say: Receives a line of progress.
    """
    # At most one pass: without shuffling, a second pass would bring the same gradients again.
    batches = min(_GRADIENTS, samples // own_size) if samples else _GRADIENTS
    if batches < FEWEST:
        return CriticalBatch((), f"a pass through the data has fewer than {FEWEST} batches")
    when = f"after {', '.join(map(str, after_steps))} steps"
    say(f"gradients of {batches} batches of {own_size} at weights that stand still, {when}")
    attempt, sampled = attempts.gradients(after_steps, batches)
    looks, why = [], str(sampled["why"])
    for look in sampled["looks"]:
        try:
            looks.append((int(look["step"]), noise_scale(look["products"], own_size * look["batches"])))
        except ValueError as error:
            why = why or str(error)
    if not why and attempt.outcome != "ok" and len(looks) < len(after_steps):
        why = attempt.reason or attempt.outcome
    if not why and len(looks) < len(after_steps):
        why = "the script ended before" if looks else f"the script made fewer than {after_steps[0] + batches} steps"
    return CriticalBatch(tuple(looks), why)


def as_json(critical: CriticalBatch) -> dict[str, Any]:
    """Return the result as plain data for a file. An infinite number becomes null."""
    return {
        "looks": [
            {
                "after_steps": step,
                "batch_size": _finite(noise.value),
                "low": _finite(noise.low),
                "high": _finite(noise.high),
                "gradients": noise.gradients,
                "samples_in_each": noise.samples,
            }
            for step, noise in critical.looks
        ],
        "why_no_more": critical.why,
    }


def lines(critical: CriticalBatch) -> list[str]:
    """Return the measurements as lines for the terminal."""
    if not critical.looks:
        return [f"critical batch: not measured: {critical.why}"]
    page = [
        "critical batch (noise scale of the gradient, at weights that stand still):",
        "   after step     batch   95 % interval",
    ]
    page += [
        f"{step:>13}{_number(noise.value):>10}   {_number(noise.low)} to {_number(noise.high)}"
        for step, noise in critical.looks
    ]
    if critical.why:
        page.append(f"no later look: {critical.why}")
    return [
        *page,
        "As a rule it rises as the loss falls: later in a training, more samples a step pay than at its start.",
    ]


def _number(value: float) -> str:
    """Format a batch size, with three significant digits."""
    if math.isinf(value):
        return "no bound"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else round(value, 1)
