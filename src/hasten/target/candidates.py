"""Propose candidates: other learning rates and batch sizes, and the same candidates for shorter trainings.

A candidate changes the script's own arguments. If the script has no argument for a quantity, it uses a technique
(`batch_scale`, `lr_scale`, `schedule`) instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hasten.errors import HastenError
from hasten.plan import Setting
from hasten.target.arguments import Argument, Arguments, Role, format_number, role_of
from hasten.target.full_run import Candidate
from hasten.techniques.convergence.rates import rate_factor

_BATCHES = (1, 4, 16)  # factors of the script's batch size
_RATES = (1, 3)  # factors of the rate that the scaling rule gives for that batch
_FALLING = ((1, 3), (4, 3))  # (batch, rate) factors with a rate that falls to zero, which allows larger rates
_RATES_ALONE = (3, 10, 0.3)
_BATCHES_ALONE = (2, 4, 16)
_MOST = 64  # combinations of `--vary` values


def proposed(
    arguments: Arguments, adaptive: bool, optimizes: bool = False, loads: bool = False, steps: int = 0
) -> list[Candidate]:
    """Return the candidates to try when the user names none.

    Batches 4 and 16 times as large, each with the scaled rate (square root for Adam, linear for SGD) and with three
    times that; the rate alone or the batch alone if the other cannot be set. If the script has no schedule, also three
    times the rate falling linearly to zero, with the script's batch and with one four times as large.

    Args:
        arguments: The script's arguments.
        adaptive: Whether its optimizer divides by the size of gradients.
        optimizes: Whether `lr_scale` can scale its rate.
        loads: Whether `batch_scale` can scale its batch.
        steps: Optimizer steps of the whole training, for `schedule`; 0: no schedule is added.
    """
    rate, batch = arguments.by_role.get(Role.RATE), arguments.by_role.get(Role.BATCH)
    has_rate, has_batch = rate is not None or optimizes, batch is not None or loads
    tried: list[tuple[int, float]] = []
    if has_rate and has_batch:
        tried = [
            (times, rate_times)
            for times, rate_times in itertools.product(_BATCHES, _RATES)
            if (times, rate_times) != (1, 1)
        ]
    elif has_rate:
        tried = [(1, rate_times) for rate_times in _RATES_ALONE]
    elif has_batch:
        tried = [(times, 1) for times in _BATCHES_ALONE]
    scaled = {times: rate_factor(times, adaptive) if has_rate else 1.0 for times, _ in tried}
    candidates = [_candidate(rate, batch, times, scaled[times], rate_times) for times, rate_times in tried]
    if steps and has_rate and has_batch:  # last: if time is short, the safer candidates have been tried
        for times, rate_times in _FALLING:
            base = _candidate(rate, batch, times, scaled[times], rate_times)
            plan: dict[str, Setting] = {**base.plan, "schedule": {"kind": "linear", "steps": math.ceil(steps / times)}}
            candidates.append(Candidate(base.arguments, plan, f"{base.why}, falling to zero"))
    return candidates


def _candidate(rate: Argument | None, batch: Argument | None, times: int, rule: float, rate_times: float) -> Candidate:
    """Return a candidate with a batch `times` as large, and `rate_times` the rate that the rule gives for it."""
    changes: dict[str, str] = {}
    plan: dict[str, Setting] = {}
    # `batch_scale` scales the rate by the rule too, so only `rate_times` is left to apply.
    factor = rate_times if batch is None else rate_times * rule
    if times != 1 and batch is not None:
        changes[batch.name] = format_number(int(batch.number * times))
    elif times != 1:
        plan["batch_scale"] = times
    if factor != 1 and rate is not None:
        changes[rate.name] = format_number(rate.number * factor)
    elif factor != 1:
        plan["lr_scale"] = float(f"{factor:.4g}")
    reasons = [
        f"the batch x{times}, the rate x{rule:g}" if times != 1 else "",
        f"the rate x{rate_times:g}" if rate_times != 1 else "",
    ]
    return Candidate(changes, plan, ", ".join(filter(None, reasons)))


def combinations(values_by_name: Mapping[str, Sequence[str]], arguments: Arguments) -> list[Candidate]:
    """Return every combination of the `--vary` values, except the script's own values.

    Raises:
        HastenError: There are more than 64 combinations.
    """
    count = math.prod(map(len, values_by_name.values()))
    if count > _MOST:
        raise HastenError(f"--vary asks for {count} combinations of values", f"ask for {_MOST} at the most")
    candidates = []
    for values in itertools.product(*values_by_name.values()):
        changes = dict(zip(values_by_name, values, strict=True))
        script_values = {
            name: argument.value for name in changes if (argument := arguments.by_name.get(name)) is not None
        }
        if changes != script_values:
            candidates.append(Candidate(changes, why="asked for"))
    return candidates


def lengths_of(arguments: Arguments, values_by_name: Mapping[str, Sequence[str]]) -> list[float]:
    """Return the lengths at which candidates are tried, as shares of the script's own: about 1/4, 1/2 and 1.

    Only the whole length if the script has no argument for it, or the user varies that argument.
    """
    length = arguments.length
    if length is None or any(role_of(name) in (Role.EPOCHS, Role.STEPS) for name in values_by_name):
        return [1.0]
    lengths = sorted({max(1, math.ceil(length.number * share)) for share in (0.25, 0.5, 1.0)})
    return [min(1.0, rounded / length.number) for rounded in lengths]


def at_length(candidate: Candidate, arguments: Arguments, share: float) -> Candidate:
    """Return a candidate for a shorter training, with a schedule that still completes.

    Arguments that count steps are scaled too: warm-up and decay; and with a larger batch the length itself and the
    steps between two validations, so that the same number of samples is trained between them.

    Args:
        candidate: The candidate for the whole length.
        arguments: The script's arguments.
        share: Share of the script's length, from 0 to 1.
    """
    times = _batch_factor(candidate, arguments)
    changes = dict(candidate.arguments)

    def set_to(argument: Argument, factor: float, most: float = math.inf) -> None:
        if argument.name not in candidate.arguments:
            # Less 1e-9: rounding errors of the product must not add a step.
            value = max(1, min(most, math.ceil(argument.number * factor - 1e-9)))
            if value != argument.number:
                changes[argument.name] = format_number(int(value))

    length, most = arguments.length, math.inf
    if length is not None:
        set_to(length, share / times if length is arguments.by_role.get(Role.STEPS) else share)
        if length is arguments.by_role.get(Role.STEPS):
            most = float(changes.get(length.name, length.value))
    for argument in arguments.all_of(Role.FOLLOWS):
        set_to(argument, share / times)
    for argument in arguments.all_of(Role.PARTS):
        set_to(argument, share)
    for argument in arguments.all_of(Role.LOOKS):
        set_to(argument, 1 / times, most)
    plan = dict(candidate.plan)
    if isinstance(schedule := plan.get("schedule"), dict):  # its steps are for the whole length, with this batch
        plan["schedule"] = {
            **schedule,
            "steps": max(1, math.ceil(int(schedule["steps"]) * _shortened(changes, arguments, times))),
        }
    return Candidate(changes, plan, candidate.why)


def _shortened(changes: Mapping[str, str], arguments: Arguments, times: float) -> float:
    """Return the share of the script's samples that a command line trains on, with a batch `times` as large."""
    length = arguments.length
    if length is None:
        return 1.0
    share = float(changes.get(length.name, length.value)) / length.number
    return share * times if length is arguments.by_role.get(Role.STEPS) else share


def _batch_factor(candidate: Candidate, arguments: Arguments) -> float:
    """Return how many times larger a candidate's batch is than the script's own."""
    if isinstance(times := candidate.plan.get("batch_scale"), int):
        return float(times)
    batch = arguments.by_role.get(Role.BATCH)
    if batch is None or batch.name not in candidate.arguments:
        return 1.0
    number = Argument(batch.name, candidate.arguments[batch.name]).number
    return 1.0 if math.isnan(number) else number / batch.number
