"""How workers start and make batches."""

from __future__ import annotations

from hasten.evidence import Evidence, LoaderFacts, Stages
from hasten.evidence.waiting import (
    EpochStart,
    data_share,
    ordinary_seconds,
    stages_of,
)

BOUND = 0.10  # share of the step from which a training counts as bound by its data


def opening_share(evidence: Evidence, loader: LoaderFacts, start: EpochStart) -> float:
    """Share of an epoch in which its workers are being started; 0 where they stay."""
    if loader.persistent_workers or not loader.num_workers:
        return 0.0
    seconds = start.opening
    if loader.start_method != "fork":  # these come up after `iter(loader)` has returned
        seconds = max(seconds, start.pause - making_seconds(evidence, loader, start.waiting))
    return min(1.0, seconds / start.epoch)


def making_seconds(evidence: Evidence, loader: LoaderFacts, most: float) -> float:
    """Seconds in which one worker makes a batch, at most `most`: as sampled, else what its pace allows."""
    stages = stages_of(evidence, loader)
    return min(most, stages.seconds if stages is not None else loader.num_workers * ordinary_seconds(evidence))


def sampled_stages(evidence: Evidence) -> tuple[LoaderFacts, Stages] | None:
    """The training loader and its stages, where its batches are waited for and were looked into."""
    loader = evidence.train_loader
    if loader is None or data_share(evidence) < BOUND:
        return None
    stages = stages_of(evidence, loader)
    return (loader, stages) if stages is not None else None
