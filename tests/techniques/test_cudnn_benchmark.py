"""cuDNN's search is switched on for convolutions on a GPU, unless the script asks otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hasten.techniques import CATALOGUE, Choices, Refusal
from hasten.techniques.compute.cudnn_benchmark import CudnnBenchmark
from tests.techniques.conftest import CPU, FLAGS, GPU, MODEL, Train, evidence_of


def test_the_switch_is_on_when_the_script_starts(train: Train) -> None:
    script = 'import torch; torch.save({"on": torch.backends.cudnn.benchmark}, "left.pt")'
    assert train(script).left == {"on": False}
    changed = train(script, cudnn_benchmark=True)
    assert changed.left == {"on": True}
    assert changed.installed == {"cudnn_benchmark": "process"}


@pytest.mark.parametrize(
    ("machine", "model", "flags", "expected"),
    [
        (GPU, {"device": "cuda"}, {}, (True,)),
        (GPU, {"device": "cuda", "layers": {"Conv1d": 1}}, {}, (True,)),
        (GPU, {"device": "cuda", "layers": {"Linear": 1}}, {}, "no convolution"),
        (GPU, {"device": "cuda"}, {"cudnn_benchmark": True}, "sets it already"),
        (GPU, {"device": "cuda"}, {"deterministic": True}, "deterministic"),
        (GPU, {"device": "cpu"}, {}, "trains on the CPU although"),
        (CPU, {}, {}, "no NVIDIA GPU"),
    ],
)
def test_worth_trying(machine: Any, model: dict[str, Any], flags: dict[str, Any], expected: Any) -> None:
    answer = CudnnBenchmark.settings(
        evidence_of(
            machine=machine, models=(dataclasses.replace(MODEL, **model),), flags=dataclasses.replace(FLAGS, **flags)
        )
    )
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


def test_useless_without_a_gpu() -> None:
    assert "CUDA only" in CATALOGUE["cudnn_benchmark"].useless(True, CPU)
    assert CATALOGUE["cudnn_benchmark"].useless(True, GPU) == ""
