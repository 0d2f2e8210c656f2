"""Candidates to try: the script's own arguments for rate and batch with other values, and at other lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hasten.errors import HastenError
from hasten.plan import Setting
from hasten.target.arguments import Argument, Arguments, Role, role_of, shown
from hasten.target.full_run import Candidate
from hasten.techniques.convergence.rates import rate_factor

_BATCHES = (1, 4, 16)  # times the script's own
_RATES = (1, 3)  # times what the rule says for that batch
_FALLING = ((1, 3), (4, 3))  # batch and rate where the rate falls to zero: it bears a larger one
_RATES_ALONE = (3, 10, 0.3)
_BATCHES_ALONE = (2, 4, 16)
_MOST = 64  # combinations of what a person wants varied


def proposed(
    arguments: Arguments, adaptive: bool, optimizes: bool = False, loads: bool = False, steps: int = 0
) -> list[Candidate]:
    """Return what is worth trying, of a script's own arguments; by techniques what it has no argument for.

    The batch 4 and 16 times as large, with the rate that goes with it (the square root for Adam, in proportion for SGD)
    and three times that; the rate alone, or the batch alone, where nothing sets the other. Where the script has no
    schedule, three times the rate falling to zero, with its own batch and four times that.

    Args:
        arguments: The script's.
        adaptive: Whether its optimizer divides by the size of gradients.
        optimizes: Whether its rate can be scaled by `lr_scale`.
        loads: Whether its batch can be by `batch_scale`.
        steps: Of its optimizer in the whole length, for `schedule`; 0: it gets none.
    """
    rate, batch = arguments.of.get(Role.RATE), arguments.of.get(Role.BATCH)
    has_rate, has_batch = rate is not None or optimizes, batch is not None or loads
    tried: list[tuple[int, float]] = []
    if has_rate and has_batch:
        tried = [(times, by) for times, by in itertools.product(_BATCHES, _RATES) if (times, by) != (1, 1)]
    elif has_rate:
        tried = [(1, by) for by in _RATES_ALONE]
    elif has_batch:
        tried = [(times, 1) for times in _BATCHES_ALONE]
    goes_with = {times: rate_factor(times, adaptive) if has_rate else 1.0 for times, _ in tried}
    found = [_candidate(rate, batch, times, goes_with[times], by) for times, by in tried]
    if steps and has_rate and has_batch:  # at the end: where time is short, what is safer was tried
        for times, by in _FALLING:
            one = _candidate(rate, batch, times, goes_with[times], by)
            plan: dict[str, Setting] = {**one.plan, "schedule": {"kind": "linear", "steps": math.ceil(steps / times)}}
            found.append(Candidate(one.arguments, plan, f"{one.why}, falling to zero"))
    return found


def _candidate(rate: Argument | None, batch: Argument | None, times: int, rule: float, by: float) -> Candidate:
    """Return a candidate with a batch so many times as large, and `by` times the rate that goes with it by the rule."""
    changes: dict[str, str] = {}
    plan: dict[str, Setting] = {}
    # `batch_scale` brings the rate that goes with it.
    factor = by if batch is None else by * rule
    if times != 1 and batch is not None:
        changes[batch.name] = shown(int(batch.number * times))
    elif times != 1:
        plan["batch_scale"] = times
    if factor != 1 and rate is not None:
        changes[rate.name] = shown(rate.number * factor)
    elif factor != 1:
        plan["lr_scale"] = float(f"{factor:.4g}")
    said = [f"the batch x{times}, the rate x{rule:g}" if times != 1 else "", f"the rate x{by:g}" if by != 1 else ""]
    return Candidate(changes, plan, ", ".join(filter(None, said)))


def asked_for(wanted: Mapping[str, Sequence[str]], arguments: Arguments) -> list[Candidate]:
    """Return every combination of the values that a person wants tried, without the script's own.

    Raises:
        HastenError: They are too many.
    """
    count = math.prod(map(len, wanted.values()))
    if count > _MOST:
        raise HastenError(f"--vary asks for {count} combinations of values", f"ask for {_MOST} at the most")
    found = []
    for values in itertools.product(*wanted.values()):
        changes = dict(zip(wanted, values, strict=True))
        own = {name: argument.value for name in changes if (argument := arguments.every.get(name)) is not None}
        if changes != own:
            found.append(Candidate(changes, why="asked for"))
    return found


def lengths_of(arguments: Arguments, wanted: Mapping[str, Sequence[str]]) -> list[float]:
    """Return the lengths at which candidates are tried, shortest first: a quarter, a half, all of the script's own.

    One (the whole) where the script has no argument for its length, or a person varies it.
    """
    length = arguments.length
    if length is None or any(role_of(name) in (Role.EPOCHS, Role.STEPS) for name in wanted):
        return [1.0]
    lengths = sorted({max(1, math.ceil(length.number * share)) for share in (0.25, 0.5, 1.0)})
    return [min(1.0, whole / length.number) for whole in lengths]


def at_length(candidate: Candidate, arguments: Arguments, share: float) -> Candidate:
    """Return a candidate for a shorter training whose schedule is as complete as that of the whole one.

    What is counted in steps goes with it: warm-up and decay, and with a larger batch the length itself and the steps
    between two looks at the quality, so that as many samples pass between them.

    Args:
        candidate: For the whole length.
        arguments: The script's.
        share: Of the length, from 0 to 1.
    """
    times = _batch_factor(candidate, arguments)
    changes = dict(candidate.arguments)

    def set_to(argument: Argument, by: float, most: float = math.inf) -> None:
        if argument.name not in candidate.arguments:
            value = max(1, min(most, math.ceil(argument.number * by - 1e-9)))
            if value != argument.number:
                changes[argument.name] = shown(int(value))

    length, most = arguments.length, math.inf
    if length is not None:
        set_to(length, share / times if length is arguments.of.get(Role.STEPS) else share)
        if length is arguments.of.get(Role.STEPS):
            most = float(changes.get(length.name, length.value))
    for argument in arguments.all_of(Role.FOLLOWS):
        set_to(argument, share / times)
    for argument in arguments.all_of(Role.PARTS):
        set_to(argument, share)
    for argument in arguments.all_of(Role.LOOKS):
        set_to(argument, 1 / times, most)
    plan = dict(candidate.plan)
    if isinstance(schedule := plan.get("schedule"), dict):  # its steps are of the whole length, with this batch
        plan["schedule"] = {
            **schedule,
            "steps": max(1, math.ceil(int(schedule["steps"]) * _shortened(changes, arguments, times))),
        }
    return Candidate(changes, plan, candidate.why)


def _shortened(changes: Mapping[str, str], arguments: Arguments, times: float) -> float:
    """Return the share of the script's own samples that a command line trains on, its batch `times` as large."""
    length = arguments.length
    if length is None:
        return 1.0
    share = float(changes.get(length.name, length.value)) / length.number
    return share * times if length is arguments.of.get(Role.STEPS) else share


def _batch_factor(candidate: Candidate, arguments: Arguments) -> float:
    """Return how many times as large a candidate's batch is as the script's own."""
    if isinstance(times := candidate.plan.get("batch_scale"), int):
        return float(times)
    batch = arguments.of.get(Role.BATCH)
    if batch is None or batch.name not in candidate.arguments:
        return 1.0
    number = Argument(batch.name, candidate.arguments[batch.name]).number
    return 1.0 if math.isnan(number) else number / batch.number
