"""Narrower products inside float32 matrix multiplications, on hardware that has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hasten.techniques import CATALOGUE, Choices, Refusal
from hasten.techniques.compute.matmul_precision import MatmulPrecision
from tests.techniques.conftest import CPU, FLAGS, GPU, MODEL, OLD_CPU, Train, close, evidence_of


def test_the_numbers_stay_float32_and_close(train: Train) -> None:
    script = """
        import torch
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(256, 256), torch.randn(64, 256)
        out, precision = layer(x), torch.get_float32_matmul_precision()
        torch.save({"out": out.tolist(), "dtype": out.dtype, "set": precision}, "left.pt")
    """
    plain, changed = train(script), train(script, matmul_precision="medium")
    assert (plain.left["set"], changed.left["set"]) == ("highest", "medium")
    assert str(changed.left["dtype"]) == "torch.float32"
    assert close(plain.left["out"], changed.left["out"], 0.03)
    assert changed.installed == {"matmul_precision": "process"}


@pytest.mark.parametrize(
    ("machine", "device", "flags", "expected"),
    [
        (CPU, "cpu", {}, ("medium",)),
        (GPU, "cuda", {}, ("high",)),
        (OLD_CPU, "cpu", {}, "no bf16 instructions"),
        (GPU, "cpu", {}, "trains on the CPU although"),
        (CPU, "cpu", {"matmul_precision": "medium"}, "sets it already (medium)"),
    ],
)
def test_worth_trying(machine: Any, device: str, flags: dict[str, Any], expected: Any) -> None:
    answer = MatmulPrecision.settings(
        evidence_of(
            machine=machine,
            models=(dataclasses.replace(MODEL, device=device),),
            flags=dataclasses.replace(FLAGS, **flags),
        )
    )
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


def test_useless_settings() -> None:
    useless = CATALOGUE["matmul_precision"].useless
    assert "TF32" in useless("high", CPU)
    assert "no bf16" in useless("medium", OLD_CPU)
    assert useless("medium", CPU) == useless("high", GPU) == useless("medium", GPU) == ""
