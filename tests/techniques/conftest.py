"""Evidence to ask techniques about, and real trainings to run under them."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hasten.evidence import Evidence, Flags, LoaderFacts, Machine, ModelFacts, OptimizerFacts, Probe, read_evidence
from hasten.plan import Setting
from hasten.taps.config import RunConfig
from tests.taps.forks import run_in_fork

CPU = Machine(
    cpu="Some CPU",
    cores=4,
    memory_bytes=16 << 30,
    shm_bytes=8 << 30,
    device="cpu",
    gpus=(),
    platform="Linux",
    python="3.11.7",
    cpu_flags=("avx2", "avx512_bf16"),
)
GPU = dataclasses.replace(CPU, device="cuda", gpus=("NVIDIA H200",))
OLD_CPU = dataclasses.replace(CPU, cpu_flags=("avx2",))
LOADER = LoaderFacts(
    dataset="ImageFolder",
    where="train.py:7",
    iterable=False,
    batches=100,
    samples=3200,
    batch_size=32,
    num_workers=0,
    prefetch_factor=None,
    persistent_workers=False,
    pin_memory=False,
    start_method="fork",
    default_collate=True,
    own_worker_init=False,
    role="train",
    batch_bytes=1 << 20,
    probe=Probe(repeatable=True, sample_seconds=1e-3, sample_bytes=4096),
)
MODEL = ModelFacts(
    name="Net",
    parameters=1000,
    trained_parameters=1000,
    layers={"Conv2d": 2, "Linear": 1, "ReLU": 2},
    dtype="float32",
    device="cpu",
    compiled=False,
    autocast="",
    train_calls=100,
    eval_calls=10,
    eval_calls_with_graph=10,
    backward_through_eval=False,
    input_shapes=((32, 3, 32, 32),),
)
OPTIMIZER = OptimizerFacts(
    name="Adam",
    where="train.py:9",
    parameters=10,
    fused=False,
    foreach=None,
    fusable=True,
    why_not_fusable="",
    steps=100,
)
FLAGS = Flags(threads=4, compiler="/usr/bin/g++")


def evidence_of(
    *,
    machine: Machine = CPU,
    flags: Flags = FLAGS,
    loaders: tuple[LoaderFacts, ...] = (LOADER,),
    models: tuple[ModelFacts, ...] = (MODEL,),
    optimizers: tuple[OptimizerFacts, ...] = (OPTIMIZER,),
    data_share: float = 0.5,
) -> Evidence:
    """Evidence of a slow image training on a CPU, with changes."""
    step = (data_share, 0.0, 0.2 * (1 - data_share), 0.8 * (1 - data_share), 0.0, 0.0, 0.0, 0.0, 0.0)
    return Evidence(
        command=("train.py",),
        machine=machine,
        flags=flags,
        loaders=loaders,
        models=models,
        optimizers=optimizers,
        step_start=tuple(map(float, range(10))),
        step_phases=(step,) * 10,
        losses=(1.0,) * 10,
        validations=(),
        passes=(),
        step_of="batch",
        ended="finished",
        ended_at=10.0,
    )


@dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    code: int
    out: str
    err: str
    left: dict[str, Any]
    evidence: Evidence | None

    @property
    def installed(self) -> dict[str, str]:
        """Technique -> what it acted on."""
        assert self.evidence is not None, self.err
        return self.evidence.installed


def _left_in(folder: Path, code: int) -> Trained:
    import torch

    left, evidence = folder / "left.pt", folder / "evidence.json"
    return Trained(
        code,
        (folder / "out").read_text(),
        (folder / "err").read_text(),
        torch.load(left, weights_only=False) if left.exists() else {},
        read_evidence(evidence) if evidence.exists() else None,
    )


Train = Callable[..., Trained]
_plain: dict[str, tuple[Path, int]] = {}  # a script that Python ran -> where, and its exit code


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run a script: by Python, or with a plan (`name=setting`) as `hasten run` does, by default with `--evidence`.

    The script leaves what is to be compared by `torch.save({...}, "left.pt")`. By Python it is run once in a session:
    most tests compare several techniques with the same plain run.
    """
    count = [0]

    def run(script: str, listen: bool = True, **plan: Setting) -> Trained:
        count[0] += 1
        folder = tmp_path / f"run{count[0]}"
        folder.mkdir()
        text = textwrap.dedent(script)
        shared = not plan and "run1" not in text  # else it reads what another run of its own test has left
        if shared and text in _plain:
            before, code = _plain[text]
            shutil.copytree(before, folder, dirs_exist_ok=True)
            return _left_in(folder, code)
        # Every run is of the same file name, which is part of tracebacks and of what evidence says.
        (folder / "train.py").write_text(text)
        evidence = folder / "evidence.json" if listen else ""
        config = RunConfig(techniques=plan, evidence=str(evidence), command=("train.py",))
        out, err = folder / "out", folder / "err"
        code = run_in_fork(folder / "train.py", folder, out, err, config=config if plan else None)
        if shared:
            _plain[text] = folder, code
        return _left_in(folder, code)

    return run


def identical(one: Any, other: Any) -> bool:
    """Whether two results are the same bit by bit (so NaN is NaN, and 0.0 is not -0.0)."""
    import torch

    if isinstance(one, torch.Tensor):
        return bool(
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and (one.numel() == 0 or torch.equal(_bytes(one), _bytes(other)))
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and list(one) == list(other) and all(identical(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(identical, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two lists of losses, or two state dicts, differ by rounding only."""
    import torch

    if isinstance(one, dict):
        return list(one) == list(other) and all(close(one[key], other[key], tolerance) for key in one)
    return torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=tolerance, atol=tolerance)
