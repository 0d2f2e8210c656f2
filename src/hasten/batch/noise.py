"""The critical batch: the gradient noise scale of an unchanged script, after some of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.batch.attempt import Attempts
from hasten.errors import HastenError
from hasten.techniques.convergence.noise_scale import FEWEST, NoiseScale, noise_scale

_GRADIENTS = 32  # batches in a look


@dataclass(frozen=True)
class Critical:
    """The critical batch of a script, by its gradients.

    Attributes:
        looks: Steps made before, and the noise scale there, in this order.
        why: Why there are no more; "" where all went as asked.
    """

    looks: tuple[tuple[int, NoiseScale], ...]
    why: str = ""

    @property
    def last(self) -> NoiseScale | None:
        """The latest look; None where there is none."""
        return self.looks[-1][1] if self.looks else None


def steps_to_look_at(text: str) -> tuple[int, ...]:
    """Read what `--noise-at` says: "10,30,90"; "0": none.

    Raises:
        HastenError: It is no list of rising steps.
    """
    words = [word.strip() for word in text.split(",")]
    steps = tuple(int(word) for word in words if word.isdecimal())
    if steps == (0,) and len(words) == 1:
        return ()
    if len(steps) != len(words) or not steps or steps[0] < 1 or list(steps) != sorted(set(steps)):
        raise HastenError(
            f"--noise-at {text}: not a list of rising numbers of steps", 'write "10,30,90", or 0 for none'
        )
    return steps


def critical_batch(
    attempts: Attempts, own: int, samples: int, at: Sequence[int], say: Callable[[str], None]
) -> Critical:
    """Measure the noise scale with the script's own batch size, in a process of its own.

    Args:
        attempts: Makes it.
        own: Samples in a batch.
        samples: In the training loader's dataset; 0: nobody knows.
        at: Steps after which to look: the noise scale rises from near 0 at the start.
        say: Gets a line.
    """
    # Without shuffling a second pass brings the same gradients: they must not be taken twice.
    many = min(_GRADIENTS, samples // own) if samples else _GRADIENTS
    if many < FEWEST:
        return Critical((), f"a pass through the data has fewer than {FEWEST} batches")
    say(f"gradients of {many} batches of {own} at weights that stand still, after {', '.join(map(str, at))} steps")
    attempt, seen = attempts.gradients(at, many)
    looks, why = [], str(seen["why"])
    for look in seen["looks"]:
        try:
            looks.append((int(look["step"]), noise_scale(look["products"], own * look["batches"])))
        except ValueError as error:
            why = why or str(error)
    if not why and attempt.outcome != "ok" and len(looks) < len(at):
        why = attempt.reason or attempt.outcome
    if not why and len(looks) < len(at):
        why = "the script ended before" if looks else f"the script made fewer than {at[0] + many} steps"
    return Critical(tuple(looks), why)


def as_json(critical: Critical) -> dict[str, Any]:
    """Return plain data, for a file; a number without bound is null."""
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


def lines(critical: Critical) -> list[str]:
    """Return the part of the page that shows the looks."""
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
    """Return a batch size in words, with three digits."""
    if math.isinf(value):
        return "no bound"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else round(value, 1)
