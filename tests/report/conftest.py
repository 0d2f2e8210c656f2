"""Realistic proofs to show."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from hasten.evidence import Machine
from hasten.tuner.proof import (
    Curves,
    FullRun,
    Kept,
    Memory,
    Pair,
    Parity,
    ParityCheck,
    Proof,
    Ratio,
    Skipped,
    TrialRow,
    Tried,
)

MACHINE = Machine(
    cpu="Intel(R) Xeon(R) Processor @ 2.60GHz",
    cores=2,
    memory_bytes=8 << 30,
    shm_bytes=64 << 20,
    device="cpu",
    gpus=(),
    platform="Linux-6.1.0-x86_64-with-glibc2.36",
    python="3.11.2",
    cpu_flags=("amx_bf16", "avx2", "avx512f"),
)
TECHNIQUES = (
    Kept(
        "loader_workers",
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        "sampling",
        1.62,
        1.57,
        1.68,
        "left out of the plan",
        "the step waited 61 % of its time for data",
    ),
    Kept(
        "precision",
        "bf16-mixed",
        "rounding",
        1.38,
        1.33,
        1.44,
        "left out of the plan",
        "41 convolutions in fp32",
    ),
    Kept("channels_last", True, "rounding", 1.11, 1.08, 1.15, "left out of the plan", "4-D activations"),
    Kept("fused_optimizer", True, "rounding", 1.02, 1.01, 1.04, "when it was added", "62 tensors, one by one"),
)
TRIED = (
    Tried("precision", "bf16-mixed", "kept", "faster", 1.41, 1.36, 1.47, 14.2),
    Tried(
        "compile",
        "default",
        "lost",
        "compilation of 38 s is not won back in 90 epochs",
        1.03,
        0.99,
        1.08,
        61.0,
    ),
    Tried("threads", 1, "lost", "slower", 0.71, 0.69, 0.74, 12.9),
    Tried(
        "batched_fetch",
        True,
        "crashed",
        "RuntimeError: stack expects each tensor to be equal size",
        seconds=3.1,
    ),
    Tried("allocator", "jemalloc", "dropped", "no longer helps beside loader_workers", 1.004, 0.99, 1.01, 13.0),
    Tried("precision", "fp16-mixed", "nan", "loss is NaN from step 12", seconds=9.0),
)
SKIPPED = (
    Skipped("pinned_memory", "needs a GPU; this machine has none"),
    Skipped("sample_cache", "the same index gave two different samples: the dataset augments at random"),
    Skipped("jemalloc", "not installed (apt install libjemalloc2)"),
)


def curves(seeds: int = 3, points: int = 120) -> Curves:
    steps = tuple(range(0, points * 2, 2))
    noise = random.Random(0)

    def line() -> tuple[float, ...]:
        rate = noise.uniform(0.9, 1.1)
        return tuple(1.2 + 1.1 * math.exp(-rate * step / 60) + noise.gauss(0, 0.03) for step in steps)

    return Curves(steps, tuple(line() for _ in range(seeds)), tuple(line() for _ in range(seeds)))


def trials() -> tuple[TrialRow, ...]:
    plan: dict[str, Any] = {one.name: one.setting for one in TECHNIQUES}
    good = [
        TrialRow(side, seed, "ok", "", 12.0 + seed, 0.0512 if not side else 0.0221, 40.0, 3.0, 900 << 20)
        for seed in (0, 1, 2)
        for side in ({}, plan)
    ]
    return (*good, TrialRow({"batched_fetch": True}, 0, "crashed", "RuntimeError: stack expects ...", 3.1))


def build(**changes: Any) -> Proof:
    """A proof of a tune that went well, with some fields otherwise."""
    proof = Proof(
        created="2026-11-20T12:00:00+00:00",
        hasten="0.1.0",
        command=("train.py", "--epochs", "90"),
        machine=MACHINE,
        versions={"python": "3.11.2", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
        speedup=Ratio(2.314, 2.241, 2.383),
        epoch_speedup=Ratio(2.117, 2.031, 2.205),
        full_run=FullRun(90, "--epochs 90 on the command line", 11520.0, 5470.0, 2.106, 3.1, 9.4, 1),
        parity=Parity(
            True,
            "the plan's mean lies within mean +- t(0.975, n-1) * s * sqrt(1/n + 1/m) of the baseline's seeds",
            (
                ParityCheck(
                    "training loss", (1.53, 1.51, 1.56), (1.52, 1.54, 1.55), 1.47, 1.60, 1.537, 0.041, True
                ),
                ParityCheck(
                    "validation loss", (1.71, 1.69, 1.74), (1.70, 1.72, 1.73), 1.64, 1.78, 1.717, 0.0409, True
                ),
            ),
        ),
        memory=Memory(1_480_000_000, 2_110_000_000),
        phases={
            "baseline": {
                "data": 0.0312, "transfer": 0.0, "forward": 0.0071, "backward": 0.0098,
                "sync": 0.0, "optimizer": 0.0024, "other": 0.0007,
            },
            "plan": {
                "data": 0.0016, "transfer": 0.0, "forward": 0.0069, "backward": 0.0104,
                "sync": 0.0, "optimizer": 0.0023, "other": 0.0009,
            },
        },
        curves=curves(),
        pairs=(Pair(0, 0.0514, 0.0223), Pair(1, 0.0509, 0.0219), Pair(2, 0.0516, 0.0224)),
        techniques=TECHNIQUES,
        tried=TRIED,
        skipped=SKIPPED,
        trials=trials(),
        budget_seconds=300.0,
        used_seconds=243.0,
        notes=("validation ran once in each trial; its loss is compared too",),
    )  # fmt: skip
    return dataclasses.replace(proof, **changes)


def nothing_helped(**changes: Any) -> Proof:
    """A proof of a tune that kept no technique and could measure no more than steps."""
    return build(
        **{
            "techniques": (),
            "speedup": Ratio(1.0, 1.0, 1.0),
            "epoch_speedup": None,
            "full_run": None,
            "parity": Parity(True, "not made", (), "nothing was kept"),
            "curves": Curves((), (), ()),
            "pairs": (),
            "phases": {"baseline": {"forward": 0.01}},
            "tried": tuple(dataclasses.replace(one, outcome="lost") for one in TRIED),
            **changes,
        }
    )


@pytest.fixture
def make() -> Callable[..., Proof]:
    return build


@pytest.fixture
def nothing() -> Callable[..., Proof]:
    return nothing_helped
