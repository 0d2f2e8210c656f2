"""Pairs of techniques whose effects do not add up, and what an earlier tune knows of them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hasten.online.options import Candidate
from hasten.online.prior import Prior, pair_key

# Techniques that relieve the same part of the step, or of which one feeds the other: their effects do not add up.
_INTERACTIONS = {
    ("loader_workers", "cpu_threads"): (-0.15, 0.25),  # threads that wait for work keep the workers' cores busy
    ("loader_workers", "sample_cache"): (0.0, 0.15),
    ("read_ahead", "sample_cache"): (0.0, 0.15),
    ("precision", "matmul_precision"): (0.0, 0.1),
    ("precision", "channels_last"): (0.0, 0.12),
    ("precision", "allocator"): (0.0, 0.12),
    ("precision", "attention"): (0.0, 0.2),  # kernels differ by dtype: by hand may lose alone and win beside bf16
    ("matmul_precision", "attention"): (0.0, 0.2),
    ("compile", "precision"): (0.0, 0.12),
    ("compile", "channels_last"): (0.0, 0.12),
    ("compile", "attention"): (0.0, 0.12),
    ("compile", "cpu_threads"): (0.0, 0.12),
}
"""Expectation of what two do together beyond what each does alone (log(seconds per step): mean, standard deviation)."""


# Workers make whole samples, so that nothing is left to read ahead: on together, one of the two does nothing.
_IN_PLACE_OF = {"read_ahead": "loader_workers"}


def place_of(technique: str) -> str:
    """Return the name under which a technique excludes others: settings of one technique, and what does the same."""
    return _IN_PLACE_OF.get(technique, technique)


def pairs_of(candidates: Sequence[Candidate], prior: Prior | None) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the pairs of candidates that may interact, with the prior (mean, deviation) of each interaction."""
    pairs = {
        (i, j): _INTERACTIONS[first.name, second.name]
        for i, first in enumerate(candidates)
        for j, second in enumerate(candidates)
        if (first.name, second.name) in _INTERACTIONS
    }
    if prior is not None:
        for pair, name in zip(pairs, rows_of(candidates, pairs)[len(candidates) :], strict=True):
            if name in prior.rows:
                row = prior.rows.index(name)
                pairs[pair] = prior.mean[row], prior.spread(row)
    return pairs


def covariances_of(candidates: Sequence[Candidate], prior: Prior | None) -> dict[tuple[int, int], float]:
    """Return the covariance of the effects of candidates and pairs that an earlier tune left; {} without one."""
    if prior is None:
        return {}
    rows = rows_of(candidates, pairs_of(candidates, None))
    rows_in_prior = {number: prior.rows.index(name) for number, name in enumerate(rows) if name in prior.rows}
    return {
        (i, j): prior.covariance[rows_in_prior[i]][rows_in_prior[j]]
        for i in rows_in_prior
        for j in rows_in_prior
        if i != j
    }


def rows_of(candidates: Sequence[Candidate], pairs: Iterable[tuple[int, int]]) -> list[str]:
    """Return the names of the effects: of the candidates, then of the pairs."""
    names = [candidate.key for candidate in candidates]
    return [*names, *(pair_key(names[i], names[j]) for i, j in pairs)]
