"""Realistic diagnoses and evidence to show, and the hostile strings that a script may leave in them."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from hasten.doctor.verdict.diagnosis import Diagnosis, Pauses, Verdict
from hasten.evidence import (
    Event,
    Evidence,
    Finding,
    Flags,
    GpuUse,
    HowKnown,
    Layer,
    LoaderFacts,
    MachineUse,
    MemoryPoint,
    ModelFacts,
    Operator,
    Pass,
    ProcessEnvironment,
    Sampled,
    Severity,
    Stages,
    Validation,
)
from tests.report.conftest import MACHINE

EVIL = (
    "</style></script><script>alert(1)</script>\"'><img src=http://x/y onerror=z> & {{7*7}} "
    "[bold red]x[/bold red] [/] \x1b[2J\x1b]0;title\x07 \r\n\u2028 \udce9 \u202e\x00"
)
FINDINGS = (
    Finding(
        "workers_zero",
        "the step waits 61 % of its time for data and the loader has no workers",
        "give the loader num_workers=2, persistent_workers=True",
        Severity.HIGH,
        0.41,
        HowKnown.MEASURED,
        "train.py",
        41,
        details=("one batch takes 31.2 ms to make", "2 cores stand idle for 48 % of the time"),
        technique="loader_workers",
        setting="{num_workers = 2, persistent_workers = true}",
        sources=("PyTorch performance tuning guide",),
    ),
    Finding(
        "precision",
        "41 convolutions run in fp32 where this CPU has bf16 units",
        'wrap the forward in torch.autocast("cpu", torch.bfloat16)',
        Severity.MEDIUM,
        0.12,
        HowKnown.ESTIMATED,
        "train.py",
        57,
        technique="precision",
        setting="bf16-mixed",
    ),
    Finding(
        "bias_before_norm",
        "20 convolutions add a bias that the BatchNorm after them takes away again",
        "build them with bias=False",
        Severity.LOW,
        0.013,
        HowKnown.READ,
        where="layer1.0.conv1",
    ),
    Finding(
        "unsafe_load",
        "torch.load may run any code that the file holds",
        "pass weights_only=True",
        Severity.NOTE,
        None,
        HowKnown.READ,
        "train.py",
        12,
    ),
    Finding("constant_rate", "the learning rate stayed 0.1", "use a schedule", Severity.NOTE, None),
)
DIAGNOSIS = Diagnosis(
    command=("train.py", "--epochs", "1"),
    verdict=Verdict(
        "data",
        "data-bound: the step waits 61 % of its time for batches",
        ("The loader makes a batch in 31 ms, the model needs 20 ms for it.", "Workers would make them meanwhile."),
    ),
    phases={
        "data": 0.0312,
        "transfer": 0.0,
        "forward": 0.0071,
        "backward": 0.0098,
        "sync": 0.0,
        "optimizer": 0.0024,
        "other": 0.0007,
    },
    step=0.0512,
    median=0.0508,
    spread=0.0021,
    steps=200,
    pauses=Pauses(3.1, 1.24, (0.81, 0.79), ((31, 0.4), (77, 0.22)), 0.12),
    findings=FINDINGS,
    machine=("2 cores are 52 % busy: more cores would not help before there are workers.",),
    unseen=("The GPU: this machine has none.",),
    notes=("Stopped after 200 steps.",),
    ended="complete",
    hasten="0.1.0",
    created="2026-11-20T12:00:00+00:00",
)
LOADER = LoaderFacts(
    dataset="ImageFolder",
    where="train.py:41",
    iterable=False,
    batches=100,
    samples=6400,
    batch_size=64,
    num_workers=0,
    prefetch_factor=None,
    persistent_workers=False,
    pin_memory=False,
    start_method="",
    default_collate=True,
    own_worker_init=False,
    role="train",
)
MODEL = ModelFacts(
    "ResNet", 11_689_512, 11_689_512, {"Conv2d": 20, "BatchNorm2d": 20}, "float32", "cpu", False, "", 200, 0, 0, False,
    ((64, 3, 64, 64),),
)  # fmt: skip


LAYERS = (
    Layer(
        "conv1", "Conv2d", {"in_channels": 3, "out_channels": 64}, True, (64, 3, 64, 64), "float32", "bn1", 1.0, 0.0021
    ),
    Layer("fc", "Linear", {"in_features": 512, "out_features": 1000}, True, (64, 512), "float32", "", 1.0, 0.0002),
)
OPERATORS = (
    Operator("aten::mkldnn_convolution", 20.0, 0.0061, 0.0, "[64, 3, 64, 64]"),
    Operator("aten::relu_", 17.0, 0.0008),
)


def diagnosis(**changes: Any) -> Diagnosis:
    """A diagnosis of a data-bound training, with some fields otherwise."""
    return dataclasses.replace(DIAGNOSIS, **changes)


def evidence(count: int = 200, mean: float = 0.0512, seed: int = 0, **changes: Any) -> Evidence:
    """Evidence of a training of so many steps, two epochs, with validation between them."""
    noise = random.Random(seed)
    phases, starts, at, half = [], [], 3.1, count // 2
    for step in range(count):
        if step == half:
            at += 0.9  # validation between the epochs
        scale = mean / 0.0512 * noise.gauss(1, 0.04)
        one = [0.0312 * scale, 0.0, 0.0071 * scale, 0.0098 * scale, 0.0, 0.0024 * scale, 0.0, 0.0, 0.0007 * scale]
        one[0] += 0.8 if step in (0, half) else 0.0
        one[2] += 0.4 if step in (0, 31) else 0.0
        starts.append(at)
        phases.append(tuple(one))
        at += sum(one)
    seconds = [0.5 * n for n in range(int(at / 0.5) + 1)][:600]
    wave = [abs(math.sin(t / 3)) for t in seconds]
    use = MachineUse(
        at=tuple(seconds),
        cpu=tuple(1.0 + 0.6 * w for w in wave),
        main=tuple(0.9 for _ in wave),
        workers=tuple(0.6 * w for w in wave),
        worker_count=tuple(0 for _ in wave),
        cores=(0.7, 0.6),
        rss=tuple(int(4e8 + 2e6 * t) for t in seconds),
        main_rss=tuple(int(4e8 + 2e6 * t) for t in seconds),
        shm=tuple(int(1e6 * w) for w in wave),
        disk_read=tuple(3e7 * w for w in wave),
        disk_write=tuple(0.0 for _ in wave),
        net_in=tuple(2e5 * w for w in wave),
        net_out=tuple(1e4 * w for w in wave),
        waiting=tuple(0.1 * w for w in wave),
    )
    whole = Evidence(
        command=("train.py", "--epochs", "1"),
        machine=MACHINE,
        flags=Flags(threads=2, torch="2.13.0+cpu"),
        loaders=(LOADER,),
        models=(MODEL,),
        optimizers=(),
        step_start=tuple(starts),
        step_phases=tuple(phases),
        losses=tuple(2.3 * math.exp(-n / count) + noise.gauss(0, 0.05) for n in range(count)),
        validations=(Validation(half, 1.9, 10, starts[half] - 0.05), Validation(count, 1.6, 10, at)),
        passes=(
            Pass(0, 3.1, 3.9, starts[half - 1], half, True),
            Pass(0, starts[half], starts[half] + 0.8, at, half, True),
        ),
        step_of="batch",
        ended="complete",
        ended_at=at,
        steps=count,
        peak_memory_bytes=1_480_000_000,
        listened="doctor",
        disturbed=(50, 51, 52),
        events=(Event("item", "train.py:62", 200, 200, 0.01, "cpu"),),
        layers=LAYERS,
        sampled=Sampled(
            (50, 51, 52),
            OPERATORS,
            calls=212.0,
            pointwise_seconds=0.0019,
            pointwise_calls=60.0,
        ),
        stages=(Stages(0, 12, 0.002, 0.019, 0.007, 0.001, 0.001, 0.1, "train.py:22", "PIL"),),
        use=use,
        surroundings=ProcessEnvironment(None, 2, 2, 1, "", "", "/data", "ext4", False, "libjpeg-turbo"),
        memory=tuple(MemoryPoint(n, int(4e8 + 1e5 * n)) for n in range(0, count, max(1, count // 100))),
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)


def on_gpu(**changes: Any) -> Evidence:
    """The same as if it had run on a GPU."""
    seen = evidence()
    assert seen.use is not None
    count = len(seen.use.at)
    gpu = GpuUse(
        "NVIDIA H200",
        150_754_820_096,
        700.0,
        tuple(0.4 + 0.3 * (n % 5) / 5 for n in range(count)),
        tuple(int(2e10 + 1e8 * n) for n in range(count)),
        tuple(300.0 + n % 9 for n in range(count)),
        tuple(1980.0 for _ in range(count)),
        ("power cap",),
        tuple(1e9 for _ in range(count)),
        tuple(1e8 for _ in range(count)),
    )
    memory = tuple(dataclasses.replace(point, gpu=int(1.9e10 + 1e6 * point.step)) for point in seen.memory)
    return dataclasses.replace(
        seen,
        machine=dataclasses.replace(MACHINE, device="cuda", gpus=("NVIDIA H200",)),
        use=dataclasses.replace(seen.use, gpus=(gpu,)),
        memory=memory,
        device_clock=True,
        peak_gpu_bytes=20 << 30,
        **changes,
    )


def hostile() -> tuple[Diagnosis, Evidence]:
    """A diagnosis and evidence in which every text is hostile, and many numbers are none."""
    nan = math.nan
    finding = Finding(
        EVIL, EVIL, EVIL, Severity.HIGH, nan, HowKnown.MEASURED, EVIL, 3, EVIL, (EVIL,), EVIL, EVIL, (EVIL,)
    )
    note = dataclasses.replace(finding, severity=Severity.NOTE, worth=None, file="")
    found = diagnosis(
        command=("train.py", EVIL),
        verdict=Verdict(EVIL, EVIL, (EVIL,)),
        phases={EVIL: 0.1, "data": nan, "forward": 0.2, "other": math.inf},
        pauses=Pauses(nan, math.inf, (nan,), ((3, nan),), nan),
        findings=(finding, note),
        machine=(EVIL,),
        unseen=(EVIL,),
        notes=(EVIL,),
        ended=EVIL,
        error=EVIL,
        hasten=EVIL,
        created=EVIL,
        spread=nan,
    )
    seen = on_gpu()
    assert seen.use is not None
    assert seen.sampled is not None
    gpu = dataclasses.replace(seen.use.gpus[0], name=EVIL, throttled=(EVIL,), busy=(nan, 0.5, math.inf))
    seen = dataclasses.replace(
        seen,
        command=("train.py", EVIL),
        machine=dataclasses.replace(seen.machine, cpu=EVIL, gpus=(EVIL,), platform=EVIL, python=EVIL),
        flags=dataclasses.replace(seen.flags, torch=EVIL, cuda=EVIL),
        layers=(Layer(EVIL, EVIL, {EVIL: 1}, True, (1,), EVIL, EVIL, 1.0, 0.1, EVIL), Layer("x", "y", seconds=nan)),
        sampled=dataclasses.replace(
            seen.sampled,
            operators=(Operator(EVIL, nan, 0.1, nan, EVIL),),
            graph_breaks=(EVIL,),
            recompilations=(EVIL,),
            trace=EVIL,
            skipped=EVIL,
        ),
        loaders=(dataclasses.replace(LOADER, dataset=EVIL, where=EVIL),),
        models=(dataclasses.replace(MODEL, name=EVIL, dtype=EVIL, device=EVIL),),
        stages=(Stages(0, 3, nan, 0.1, 0.1, 0.1, 0.1, nan, EVIL, EVIL),),
        use=dataclasses.replace(seen.use, cpu=(nan, 1.0, math.inf), gpus=(gpu,)),
        losses=(None, nan, math.inf, *seen.losses[3:]),
        validations=(Validation(100, nan, 1, nan),),
        step_phases=((nan,) * 9, *seen.step_phases[1:]),
        skipped=(EVIL,),
        error=EVIL,
    )
    return found, seen
