"""Evidence made up: a healthy training, and what a test changes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from hasten.evidence import (
    EVENTS,
    PHASES,
    Event,
    Evidence,
    Finding,
    Flags,
    GpuUse,
    Inputs,
    Layer,
    LoaderFacts,
    Machine,
    MachineUse,
    MemoryPoint,
    ModelFacts,
    Operator,
    OptimizerFacts,
    Pass,
    Probe,
    ProcessEnvironment,
    Sampled,
    SampledLine,
    Stages,
)

GIB = 1 << 30
CPU = Machine("Some CPU", 4, 16 * GIB, 8 * GIB, "cpu", (), "Linux", "3.11.7", ("avx2",))
GPU = dataclasses.replace(CPU, cores=16, memory_bytes=128 * GIB, device="cuda", gpus=("NVIDIA H200",))
LOADER = LoaderFacts(
    dataset="Images",
    where="/home/me/train.py:7",
    iterable=False,
    batches=100,
    samples=3200,
    batch_size=32,
    num_workers=2,
    prefetch_factor=2,
    persistent_workers=True,
    pin_memory=True,
    start_method="fork",
    default_collate=True,
    own_worker_init=False,
    role="train",
    batch_bytes=1 << 20,
)
MODEL = ModelFacts(
    name="Net",
    parameters=1_000_000,
    trained_parameters=1_000_000,
    layers={"Conv2d": 2, "Linear": 1, "ReLU": 2},
    dtype="float32",
    device="cpu",
    compiled=False,
    autocast="",
    train_calls=200,
    eval_calls=0,
    eval_calls_with_graph=0,
    backward_through_eval=False,
    input_shapes=((32, 3, 32, 32),),
)
OPTIMIZER = OptimizerFacts(
    name="AdamW",
    where="/home/me/train.py:9",
    parameters=10,
    fused=True,
    foreach=None,
    fusable=True,
    why_not_fusable="",
    steps=200,
    options={"lr": 1e-3, "weight_decay": 0.01},
    schedule="CosineAnnealingLR",
    rates=(1e-3, 9e-4),
)
FLAGS = Flags(threads=4, compiler="/usr/bin/g++", torch="2.13.0")
STEP = {"data": 0.0001, "forward": 0.003, "backward": 0.006, "optimizer": 0.0005, "other": 0.0004}  # 10 ms


def evidence(
    *,
    on_gpu: bool = False,
    steps: int = 200,
    phases: Mapping[str, float] | None = None,
    epochs: int = 1,
    first_batch: float | None = None,
    loader: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    machine: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Evidence:
    """A healthy training of 10 ms a step (one loader with two workers, one model, one optimizer), and changes of it.

    Args:
        on_gpu: It trains on a GPU.
        steps: How many steps there were, in `epochs` passes of equal length.
        phases: Mean seconds by name of the phase, over those of `STEP`.
        first_batch: Seconds that the first batch of each pass was waited for; None: like every other.
        loader, model, optimizer, flags, machine: Fields of these that differ.
        fields: Of the evidence itself.
    """
    seconds = {**STEP, **(phases or {})}
    step = tuple(seconds.get(name, 0.0) for name in PHASES)
    starts, taken, passes, at = [], [], [], 2.0
    for epoch in range(epochs):
        begun, length = at, steps // epochs
        for index in range(length):
            wait = step[0] if index or first_batch is None else first_batch
            starts.append(at)
            taken.append((wait, *step[1:]))
            at += sum(taken[-1])
        passes.append(Pass(0, begun, begun + taken[epoch * length][0], at, length, True))
    here = dataclasses.replace(GPU if on_gpu else CPU, **(machine or {}))
    plain: dict[str, Any] = {
        "command": ("train.py",),
        "machine": here,
        "flags": dataclasses.replace(FLAGS, **(flags or {})),
        "loaders": (dataclasses.replace(LOADER, **(loader or {})),),
        "models": (dataclasses.replace(MODEL, **{"device": "cuda" if on_gpu else "cpu", **(model or {})}),),
        "optimizers": (dataclasses.replace(OPTIMIZER, **(optimizer or {})),),
        "step_start": tuple(starts),
        "step_phases": tuple(taken),
        "losses": (1.0,) * len(starts),
        "validations": (),
        "passes": tuple(passes),
        "step_of": "batch",
        "ended": "complete",
        "ended_at": at,
        "steps": len(starts),
        "listened": "doctor",
        "surroundings": ProcessEnvironment(threads=4, interop_threads=4, jpeg="libjpeg-turbo", filesystem="ext4"),
    }
    return Evidence(**{**plain, **fields})


def event(kind: str, seconds: float = 0.0, count: int = 200, line: int = 20, **more: Any) -> Event:
    """An event of line `line` of the script, in each of 200 steps; `seconds`: of all of them together."""
    return Event(kind, f"/home/me/train.py:{line}", count, min(count, 200), seconds, **more)


def use(**constant: Any) -> MachineUse:
    """The machine over ten seconds; a number stands for a series that does not change."""
    series = {
        name: (value,) * 10 if isinstance(value, int | float) else tuple(value) for name, value in constant.items()
    }
    return MachineUse(at=tuple(map(float, range(10))), **series)


def gpu_use(**constant: Any) -> GpuUse:
    """One GPU over the same ten seconds."""
    plain = {"memory_total": 140 * GIB, "power_limit": 700.0, **constant}
    series = {
        name: (value,) * 10 if name not in ("memory_total", "power_limit", "name") else value
        for name, value in plain.items()
    }
    return GpuUse(**{"name": "NVIDIA H200", **series})


def only(findings: Any, name: str) -> Finding:
    """The one finding of this name."""
    found = [finding for finding in findings if finding.name == name]
    assert len(found) == 1, found
    return found[0]


# -- any evidence at all ---------------------------------------------------------------------------------

_seconds = st.one_of(st.just(0.0), st.floats(1e-7, 100.0))
_shares = st.floats(0.0, 1.0)
_bytes = st.integers(0, 1 << 42)
_few = st.integers(0, 70)
_places = st.sampled_from(["", "/home/me/train.py:12", "train.py", "<string>:1", "C:\\train.py:3"])
_details = st.sampled_from(["", "pageable", "pinned", "ndarray", "none unused", "5 of 8", "block 5242880, used 100"])


def _series(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=12).map(tuple)


_probes = st.builds(
    Probe, st.sampled_from([None, True, False]), _seconds, _bytes, st.sampled_from(["", "loader"]), st.booleans(),
    _seconds, _bytes, st.booleans(), st.sampled_from(["", "holds an open file (.f)"]), st.sampled_from(["", "no"]),
)  # fmt: skip
_loaders = st.builds(
    LoaderFacts,
    dataset=st.sampled_from(["Images", "TensorDataset", "Subset"]),
    where=_places,
    iterable=st.booleans(),
    batches=st.none() | _few,
    samples=st.none() | _few,
    batch_size=st.none() | _few,
    num_workers=_few,
    prefetch_factor=st.none() | st.integers(1, 8),
    persistent_workers=st.booleans(),
    pin_memory=st.booleans(),
    start_method=st.sampled_from(["fork", "spawn"]),
    default_collate=st.booleans(),
    own_worker_init=st.booleans(),
    role=st.sampled_from(["train", "validation", "unused"]),
    batch_bytes=_bytes,
    probe=st.none() | _probes,
)
_models = st.builds(
    ModelFacts,
    name=st.sampled_from(["Net", "DataParallel", "DistributedDataParallel"]),
    parameters=_bytes,
    trained_parameters=_bytes,
    layers=st.dictionaries(st.sampled_from(["Conv2d", "Linear", "LSTM", "BatchNorm2d", "ReLU"]), _few),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", ""]),
    device=st.sampled_from(["cpu", "cuda", ""]),
    compiled=st.booleans(),
    autocast=st.sampled_from(["", "bfloat16"]),
    train_calls=_few,
    eval_calls=_few,
    eval_calls_with_graph=_few,
    backward_through_eval=st.booleans(),
    input_shapes=st.lists(st.lists(_few, max_size=4).map(tuple), max_size=2).map(tuple),
)
_optimizers = st.builds(
    OptimizerFacts,
    name=st.sampled_from(["Adam", "SGD", "AdamW"]),
    where=_places,
    parameters=_few,
    fused=st.booleans(),
    foreach=st.sampled_from([None, True, False]),
    fusable=st.booleans(),
    why_not_fusable=st.sampled_from(["", "its gradients are sparse"]),
    steps=_few,
    options=st.dictionaries(st.sampled_from(["lr", "weight_decay", "momentum"]), st.floats(0, 1)),
    schedule=st.sampled_from(["", "StepLR"]),
    rates=_series(st.floats(0, 1)),
    shapes=_series(st.lists(st.integers(1, 70), max_size=4).map(tuple)),
)
_flags = st.builds(
    Flags,
    anomaly=st.booleans(),
    profiler=st.sampled_from(["", "train.py:3"]),
    cudnn_benchmark=st.booleans(),
    matmul_precision=st.sampled_from(["highest", "high"]),
    threads=_few,
    zeroed_gradients=st.sampled_from(["", "/home/me/train.py:30"]),
    distributed=st.integers(1, 8),
    bf16=st.booleans(),
    missing_gradients=st.booleans(),
    attention=st.booleans(),
)
_events = st.builds(
    Event, st.sampled_from(sorted(EVENTS)), _places, _few, _few, _seconds, st.sampled_from(["", "cpu", "cuda"]),
    _details,
)  # fmt: skip
_layers = st.builds(
    Layer,
    path=st.sampled_from(["a", "a.b", ""]),
    kind=st.sampled_from(["Linear", "Conv2d", "BatchNorm2d", "Embedding", "LSTM"]),
    sizes=st.dictionaries(st.sampled_from(["in_features", "out_features", "in_channels", "out_channels"]), _few),
    bias=st.booleans(),
    shape=_series(_few),
    dtype=st.sampled_from(["float32", "bfloat16", ""]),
    normed_by=st.sampled_from(["", "a.bn"]),
    calls=st.floats(0, 100),
    seconds=_seconds,
    where=_places,
)
_lines = st.builds(
    SampledLine, _places, st.sampled_from(["", "f"]), st.sampled_from(PHASES), st.floats(0, 1), _few, st.booleans()
)
_operators = st.builds(Operator, st.sampled_from(["aten::mm", "aten::conv2d"]), st.floats(0, 100), _seconds, _seconds)
_sampled = st.builds(
    Sampled,
    steps=_series(_few),
    operators=_series(_operators),
    calls=st.floats(0, 1e4),
    launches=st.none() | st.floats(0, 1e4),
    device_busy=st.none() | _shares,
    pointwise_seconds=_seconds,
    pointwise_calls=st.floats(0, 1e4),
    graph_breaks=_series(st.just("a print")),
    recompilations=_series(st.just("size 3")),
)
_inputs = st.builds(
    Inputs,
    shapes=_series(st.tuples(st.lists(_few, max_size=4).map(tuple), _few)),
    batches=_few,
    dtype=st.sampled_from(["", "float32", "uint8", "int64"]),
    mean=st.none() | st.floats(-1e4, 1e4),
    std=st.none() | st.floats(0, 1e4),
    low=st.none() | st.floats(-1e4, 1e4),
    high=st.none() | st.floats(-1e4, 1e4),
    last_mean=st.none() | st.floats(0, 1e4),
    last_std=st.none() | st.floats(0, 1e4),
    padding=_shares,
)
_stages = st.builds(
    Stages, st.integers(-1, 3), _few, _seconds, _seconds, _seconds, _seconds, _seconds, _shares, _places,
    st.sampled_from(["", "PIL", "cv2"]), _shares,
)  # fmt: skip
_gpus = st.builds(
    GpuUse, st.just("H200"), _bytes, st.floats(0, 700), _series(_shares), _series(_bytes), _series(st.floats(0, 700)),
)  # fmt: skip
_uses = st.builds(
    MachineUse,
    at=_series(_seconds),
    cpu=_series(st.floats(0, 70)),
    main=_series(st.floats(0, 70)),
    workers=_series(st.floats(0, 70)),
    worker_count=_series(_few),
    cores=_series(_shares),
    rss=_series(_bytes),
    main_rss=_series(_bytes),
    shm=_series(_bytes),
    disk_read=_series(st.floats(0, 1e10)),
    disk_write=_series(st.floats(0, 1e10)),
    net_in=_series(st.floats(0, 1e10)),
    net_out=_series(st.floats(0, 1e10)),
    waiting=_series(_shares),
    gpus=_series(_gpus),
)
_surroundings = st.builds(
    ProcessEnvironment, st.none() | _few, _few, _few, _few, st.sampled_from(["", "libjemalloc.so"]),
    st.sampled_from(["", "expandable_segments:True"]), _places,
    st.sampled_from(["", "ext4", "nfs4", "overlay", "fuse.gcsfuse"]), st.sampled_from([None, True, False]),
    st.sampled_from(["", "libjpeg", "libjpeg-turbo"]),
)  # fmt: skip
_memory = st.builds(MemoryPoint, _few, _bytes, st.none() | _bytes)
_passes = st.builds(
    lambda loader, start, wait, rest, batches, trained: Pass(
        loader, start, start + wait, start + wait + rest, batches, trained
    ),
    st.integers(0, 3), _seconds, _seconds, _seconds, _few, st.booleans(),
)  # fmt: skip
_machines = st.builds(
    Machine, st.just("CPU"), st.integers(1, 64), st.integers(1, 1 << 42), st.integers(0, 1 << 42),
    st.sampled_from(["cpu", "cuda"]), _series(st.just("NVIDIA H200")), st.just("Linux"), st.just("3.11.7"),
)  # fmt: skip


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    """Evidence of any run, likely or not; its numbers need not suit each other."""
    phases = draw(st.lists(st.tuples(*(_seconds for _ in PHASES)), max_size=30))
    kept = len(phases)
    return Evidence(
        command=("train.py",),
        machine=draw(_machines),
        flags=draw(_flags),
        loaders=draw(_series(_loaders)),
        models=draw(_series(_models)),
        optimizers=draw(_series(_optimizers)),
        step_start=tuple(map(float, range(kept))),
        step_phases=tuple(phases),
        losses=(None,) * kept,
        validations=(),
        passes=draw(_series(_passes)),
        step_of=draw(st.sampled_from(["batch", "optimizer"])),
        ended=draw(st.sampled_from(["finished", "complete", "failed"])),
        ended_at=draw(_seconds),
        steps=draw(st.sampled_from([kept, 2 * kept])),
        every=draw(st.sampled_from([1, 2])),
        bad_losses=draw(_few),
        error=draw(st.sampled_from(["", "RuntimeError: no"])),
        peak_memory_bytes=draw(_bytes),
        peak_gpu_bytes=draw(st.none() | _bytes),
        device_clock=draw(st.booleans()),
        disturbed=draw(_series(_few)),
        events=draw(_series(_events)),
        layers=draw(_series(_layers)),
        lines=draw(_series(_lines)),
        strays=draw(_series(st.sampled_from(["a", "a.b", ""]))),
        sampled=draw(st.none() | _sampled),
        inputs=draw(st.none() | _inputs),
        stages=draw(_series(_stages)),
        use=draw(st.none() | _uses),
        surroundings=draw(st.none() | _surroundings),
        memory=draw(_series(_memory)),
    )
