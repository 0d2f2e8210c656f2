"""Which of a plan's techniques it is: halves the plan until no technique can be left out. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def culprits(names: Sequence[str], parts: Callable[[list[str]], bool]) -> list[str]:
    """Return a smallest part of a plan that still parts from the plain run.

    Args:
        names: Techniques that together part from it.
        parts: Whether these techniques alone do.

    Returns:
        One name where one technique is to blame; two or more where only their combination is. Source: A. Zeller,
        R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).
    """
    known: dict[tuple[str, ...], bool] = {}

    def do(names: list[str]) -> bool:
        key = tuple(names)
        if key not in known:
            known[key] = parts(names)
        return known[key]

    left = list(names)
    pieces = 2
    while len(left) > 1:
        size = -(-len(left) // pieces)
        chunks = [left[start : start + size] for start in range(0, len(left), size)]
        if smaller := next((chunk for chunk in chunks if len(chunk) < len(left) and do(chunk)), None):
            left, pieces = smaller, 2
            continue
        rests = [[name for name in left if name not in chunk] for chunk in chunks]
        if pieces > 2 and (smaller := next((rest for rest in rests if do(rest)), None)):
            left, pieces = smaller, max(2, pieces - 1)
            continue
        if pieces >= len(left):
            break
        pieces = min(len(left), 2 * pieces)
    return left
