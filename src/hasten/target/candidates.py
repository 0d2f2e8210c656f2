"""What is tried: the script's own arguments for rate and batch with other values, and at other lengths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from hasten.errors import HastenError
from hasten.target.arguments import Argument, Arguments, Role, role_of, shown
from hasten.target.whole import Candidate
from hasten.techniques.convergence.rates import rate_factor

_BATCHES = (1, 4, 16)  # times the script's own
_RATES = (1, 3)  # times what the rule says for that batch
_RATES_ALONE = (3, 10, 0.3)
_BATCHES_ALONE = (2, 4, 16)
_MOST = 64  # combinations of what a person wants varied


def proposed(arguments: Arguments, adaptive: bool) -> list[Candidate]:
    """Return what is worth trying of a script's own arguments.

    The batch 4 and 16 times as large, with the rate that goes with it (the square root for Adam, in proportion for SGD)
    and three times that; the rate alone where there is no argument for the batch.

    Args:
        arguments: The script's.
        adaptive: Whether its optimizer divides by the size of gradients.
    """
    rate, batch = arguments.of.get(Role.RATE), arguments.of.get(Role.BATCH)
    rule = "the square root of the batch's factor" if adaptive else "in proportion to the batch"
    if rate is None and batch is None:
        return []
    if batch is None:
        assert rate is not None
        return [Candidate({rate.name: shown(rate.number * by)}, why=f"the rate x{by:g}") for by in _RATES_ALONE]
    if rate is None:
        return [
            Candidate({batch.name: shown(int(batch.number * by))}, why=f"the batch x{by}, the rate as it is")
            for by in _BATCHES_ALONE
        ]
    found = []
    for times, by in itertools.product(_BATCHES, _RATES):
        if (times, by) == (1, 1):
            continue
        changes = {} if times == 1 else {batch.name: shown(int(batch.number * times))}
        changes[rate.name] = shown(rate.number * rate_factor(times, adaptive) * by)
        beyond = f", x{by}" if by != 1 else ""
        why = f"the rate x{by}" if times == 1 else f"the batch x{times}, the rate {rule}{beyond}"
        found.append(Candidate(changes, why=why))
    return found


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
    return Candidate(changes, candidate.plan, candidate.why)


def _batch_factor(candidate: Candidate, arguments: Arguments) -> float:
    """Return how many times as large a candidate's batch is as the script's own."""
    batch = arguments.of.get(Role.BATCH)
    if batch is None or batch.name not in candidate.arguments:
        return 1.0
    number = Argument(batch.name, candidate.arguments[batch.name]).number
    return 1.0 if math.isnan(number) else number / batch.number
