"""Realistic proofs to show."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from hasten.check.agreement import Agreement
from hasten.check.judge import Difference, RunComparison
from hasten.check.result import CheckResult
from hasten.evidence import Machine
from hasten.tuner.proof import (
    Answer,
    Block,
    Curves,
    FullRun,
    KeptTechnique,
    MachineNoise,
    Memory,
    Pair,
    Parity,
    ParityCheck,
    Proof,
    Ratio,
    Skipped,
    TrialRow,
    TriedSetting,
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
    KeptTechnique(
        "loader_workers",
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        "sampling",
        1.32,
        1.27,
        1.38,
        0.998,
        24,
        "the step waited 61 % of its time for data",
    ),
    KeptTechnique("precision", "bf16-mixed", "rounding", 1.38, 1.33, 1.44, 0.999, 26, "41 convolutions in fp32"),
    KeptTechnique("channels_last", True, "rounding", 1.11, 1.08, 1.15, 0.99, 25, "4-D activations"),
    KeptTechnique(
        "compile", "default", "rounding", 1.12, 1.05, 1.19, 0.97, 9, "64 pointwise operators that could be fused"
    ),
    KeptTechnique("fused_optimizer", True, "rounding", 1.02, 0.99, 1.04, 0.86, 21, "62 tensors, one by one"),
)
TRIED = (
    TriedSetting("precision", "bf16-mixed", "kept", "faster", 1.38, 1.33, 1.44, 0.999, 26),
    TriedSetting("cpu_threads", 1, "lost", "slower", 0.71, 0.69, 0.74, 0.001, 7),
    TriedSetting("batched_fetch", True, "crashed", "RuntimeError: stack expects each tensor to be equal size"),
    TriedSetting("allocator", "glibc", "dropped", "too little to be sure of", 1.004, 0.97, 1.04, 0.58, 22),
    TriedSetting("precision", "fp16-mixed", "nan", "loss is NaN from step 12"),
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


def blocks() -> tuple[Block, ...]:
    """The course of a search: all on, one left out at a time, compile, then the claim A B B A."""
    draw = random.Random(1)
    worth = {"precision=bf16-mixed": 1.38, "channels_last": 1.11, "loader_workers": 1.32, "compile": 1.12,
             "fused_optimizer": 1.02, "allocator": 1.004, "cpu_threads=1": 0.71}  # fmt: skip
    good = [name for name in worth if name not in ("compile", "cpu_threads=1")]
    done: list[Block] = []
    now = 21.0

    def block(on: list[str], part: str, trouble: str = "") -> None:
        nonlocal now
        step = 0.0512 / math.prod(worth.get(name, 1.0) for name in on) * math.exp(draw.gauss(0, 0.03))
        done.append(Block(round(now, 2), 1.0, round(1 / step), step, tuple(on), part, trouble))
        now += 1.0 + draw.uniform(0.2, 0.6)

    block([], "all on")
    block(good, "all on")
    block([*good, "batched_fetch"], "all on", "RuntimeError: stack expects each tensor to be equal size")
    for number in range(20):
        left_out = good[number % len(good)]
        extra = ["cpu_threads=1"] if number in (4, 9, 13) else []
        block([name for name in good if name != left_out] + extra if number % 7 else [], "search")
    now += 14.0  # compilation
    plan = [name for name in good if name != "allocator"]
    for on in ([*plan, "compile"], plan, [*plan, "compile"]):
        block(on, "compile")
    for on in 3 * ([], [*plan, "compile"], [*plan, "compile"], []):
        block(on, "claim")
    return tuple(done)


def trials() -> tuple[TrialRow, ...]:
    plan: dict[str, Any] = {one.name: one.setting for one in TECHNIQUES}
    good = [
        TrialRow(side, seed, "ok", "", 12.0 + seed, 0.0512 if not side else 0.0221, 40.0, 3.0, 900 << 20)
        for seed in (0, 1, 2)
        for side in ({}, plan)
    ]
    return (*good, TrialRow({"batched_fetch": True}, 0, "crashed", "RuntimeError: stack expects ...", 3.1))


def checked(ok: bool | None = True) -> CheckResult:
    """What the check said of the plan."""
    plan: dict[str, Any] = {one.name: one.setting for one in TECHNIQUES}
    first = Difference("step 2", "conv1.weight", "differs by 3 %") if ok is False else None
    run = RunComparison(
        plan, "sampling", ok, first=first, counts={"step": 3}, note="" if ok else "it did not come to a step"
    )
    return CheckResult(plan, (run,))


def build(**changes: Any) -> Proof:
    """A proof of a tune that went well, with some fields otherwise."""
    proof = Proof(
        created="2026-11-20T12:00:00+00:00",
        hasten="0.1.0",
        command=("train.py", "--epochs", "90"),
        machine=MACHINE,
        versions={"python": "3.11.2", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
        speedup=Ratio(2.314, 2.241, 2.383),
        speedup_how="baseline and plan in turn, A B B A, on 12 fresh blocks of a second each",
        epoch_speedup=Ratio(2.117, 2.031, 2.205),
        full_run=FullRun(90, "--epochs 90 on the command line", 11520.0, 5470.0, 2.106, 3.1, 9.4, 1),
        parity=Parity(
            Answer.HOLDS,
            "the 95 % interval of the mean difference between paired runs holds 0, or lies within 1 %",
            (
                ParityCheck(
                    "training loss", (1.53, 1.51, 1.56), (1.52, 1.515, 1.555), -0.0022, -0.0107, 0.0063, 0.0085, True
                ),
                ParityCheck(
                    "validation loss", (1.71, 1.69, 1.74), (1.70, 1.70, 1.74), 0.0001, -0.0145, 0.0146, 0.0145, True
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
        pairs=(Pair(0, 0.0514, 0.0223), Pair(1, 0.0509, 0.0219)),
        techniques=TECHNIQUES,
        tried=TRIED,
        skipped=SKIPPED,
        trials=trials(),
        budget_seconds=120.0,
        used_seconds=96.0,
        spent_seconds={"start": 0.2, "the script as it is": 7.0, "search": 58, "check": 21.0, "fresh processes": 10.0},
        agreement=Agreement(3, 0.0004, 0.99991, "", 0.0061, "layer4.1.conv2.weight", 0.012),
        blocks=blocks(),
        would_ask=(
            "whether fused_optimizer helps at all: 86 % sure after 21 blocks",
            "compile = \"max-autotune\": its compilation did not fit in the budget",
        ),
        noise=MachineNoise(0.03, 0.4, 0.031),
        notes=("validation ran once in each trial; its loss is compared too",),
        check=checked(),
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
            "parity": Parity(Answer.NOT_KNOWN, "not made", (), "nothing was kept"),
            "curves": Curves((), (), ()),
            "pairs": (),
            "phases": {"baseline": {"forward": 0.01}},
            "tried": tuple(dataclasses.replace(one, outcome="lost") for one in TRIED),
            "agreement": None,
            "check": None,
            **changes,
        }
    )


def interrupted(**changes: Any) -> Proof:
    """A proof of a tune that Ctrl-C ended before anything but speed was looked at."""
    return build(
        **{
            "epoch_speedup": None,
            "full_run": None,
            "parity": Parity(Answer.NOT_KNOWN, "", (), "Ctrl-C came first"),
            "curves": Curves((), (), ()),
            "pairs": (),
            "agreement": None,
            "check": None,
            "notes": ("stopped by Ctrl-C: the plan is the best found until then",),
            **changes,
        }
    )


@pytest.fixture
def stopped() -> Callable[..., Proof]:
    return interrupted


@pytest.fixture
def make() -> Callable[..., Proof]:
    return build


@pytest.fixture
def nothing() -> Callable[..., Proof]:
    return nothing_helped
