"""Decides whether functions give the same result each time, by their code and what it reaches."""

from __future__ import annotations

from typing import Any

from hasten.data.code_references import SAYS, UNREAD, UNSEEN, WRITES, words
from hasten.data.snapshot import Snapshot

# Names by which code draws random numbers, in random, NumPy and torch.
_DRAWS = words(
    "rand randn randint randrange randperm choice choices shuffle sample uniform gauss normal normal_ uniform_ random_ "
    "bernoulli bernoulli_ multinomial exponential_ permutation permuted betavariate triangular poisson binomial beta "
    "laplace standard_normal integers getrandbits dropout dropout2d alpha_dropout manual_seed set_state setstate"
)


def why_not_deterministic(snapshot: Snapshot) -> str:
    """Return why the code in a snapshot may not give the same result each time; "" if it does."""
    if snapshot.blind:
        return f"what samples are made of {snapshot.blind}"
    named = sorted(snapshot.names & (SAYS | WRITES | UNSEEN | UNREAD))
    if named:
        return f"samples' code names `{named[0]}`: what that does cannot be seen"
    if "ops" in snapshot.names and not snapshot.names & {"aten", "prim", "prims", "torchvision"}:
        return "samples' code names `ops`: an operator may be one that the script has defined"
    return "making a sample changes what the dataset holds" if snapshot.stores else ""


def why_not_threaded(snapshot: Snapshot) -> str:
    """Return why the code in a snapshot must not run in a thread during the training; "" if it may.

    Code that draws random numbers there would advance the training's generators, and nobody could restore them. So it
    is refused before anything runs, by names: in code, and of reached objects (a `RandomCrop` in a list of
    transforms).
    """
    if why := why_not_deterministic(snapshot) or why_it_draws(snapshot):
        return why
    module = next((reached for reached in snapshot.reached() if _is_module(reached)), None)
    return "" if module is None else f"it reaches a {type(module).__qualname__}, which may draw random numbers"


def why_it_draws(snapshot: Snapshot) -> str:
    """Return why the code in a snapshot may draw random numbers, by its names; "" if none says so.

    It does not consider torch.nn.Modules, which may draw too.
    """
    drawing = sorted(name for name in snapshot.names if name in _DRAWS or "random" in name.lower())
    if drawing:
        return f"its code names `{drawing[0]}`: it may draw random numbers"
    for reached in snapshot.reached():
        kind = type(reached)
        if "random" in kind.__name__.lower() or kind.__name__ == "Generator":
            return f"it reaches a {kind.__qualname__}, which may draw random numbers"
    return ""


def _is_module(value: Any) -> bool:
    """Return whether an object is a torch.nn.Module, whose forward may have dropout; torchvision v2 transforms are."""
    return any(f"{base.__module__}.{base.__name__}" == "torch.nn.modules.module.Module" for base in type(value).__mro__)
