"""What is tried on the machine after a run, and how: real processes, real layers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from hasten.doctor.verdict import measure as measuring
from hasten.doctor.verdict.jobs import jobs
from hasten.doctor.verdict.measure import measure, run_jobs
from hasten.doctor.verdict.measure_cases import TINY_OPERATORS, Case, Job, attention_shape, groups, preferred_multiples
from hasten.doctor.verdict.measure_process import build, global_settings, take_turns
from hasten.evidence import Event, Evidence, Layer, Measurement, Sampled, read_evidence
from hasten.techniques.memory.allocator import TUNABLES
from tests.doctor.findings.made import event, evidence

LINEAR = Layer("head", "Linear", {"in_features": 63, "out_features": 130}, True, (32, 63), "float32", seconds=0.001)
CONV = Layer(
    "conv", "Conv2d",
    {"in_channels": 3, "out_channels": 16, "groups": 1, "kernel_size": 3, "stride": 1, "padding": 1, "dilation": 1},
    True, (4, 3, 16, 16), "float32", "norm (BatchNorm2d)", 1.0, 0.001,
)  # fmt: skip
SHAPES = ((64, 64), (64,)) * 20


def names(seen: Evidence) -> list[str]:
    return [job.finding for job in jobs(seen)]


class TestWhatIsTried:
    def test_each_rule_on_the_layers_it_is_about(self) -> None:
        seen = evidence(
            layers=(LINEAR, CONV),
            machine={"cpu_flags": ("avx512_bf16",)},
            optimizer={"fused": False, "shapes": SHAPES},
            flags={"anomaly": True},
            events=(Event("attention", "/home/me/net.py:5", 400, 200, detail="4 x 2 x 16 x 16"),),
            sampled=Sampled((3,), calls=2000.0),
        )
        assert set(names(seen)) == {
            "per_tensor_optimizer", "full_precision", "channels_first", "attention_by_hand", "odd_sizes",
            "bias_before_norm", "debug_tools_on", "launch_bound",
        }  # fmt: skip
        odd = next(job for job in jobs(seen) if job.detail == "in_features=64")
        assert (odd.before.shape, odd.after.shape) == ((32, 63), (32, 64))
        assert next(job.calls for job in jobs(seen) if job.finding == "attention_by_hand") == 2.0

    def test_nothing_about_a_training_without_steps(self) -> None:
        assert jobs(dataclasses.replace(evidence(layers=(LINEAR,)), step_phases=(), step_start=())) == []

    def test_nothing_about_layers_that_cannot_matter(self) -> None:
        quick = dataclasses.replace(LINEAR, seconds=1e-6)
        assert names(evidence(layers=(quick,), machine={"cpu_flags": ("avx512_bf16",)})) == []

    def test_nothing_that_is_so_already(self) -> None:
        done = dataclasses.replace(CONV, channels_last=True, bias=False, normed_by="")
        assert names(evidence(layers=(done,))) == []
        assert names(evidence(optimizer={"fused": True, "shapes": SHAPES})) == []

    def test_layers_that_are_alike_are_tried_once(self) -> None:
        many = tuple(dataclasses.replace(LINEAR, path=f"layers.{n}") for n in range(12))
        (group,) = groups(evidence(layers=many), frozenset({"Linear"}))
        assert (group.others, group.calls) == (11, 12.0)
        assert group.seconds == pytest.approx(12 * 0.003)

    def test_a_layer_that_takes_long_is_tried_on_fewer_samples(self) -> None:
        slow = dataclasses.replace(CONV, shape=(256, 3, 64, 64), seconds=0.2)
        job = next(job for job in jobs(evidence(layers=(slow,))) if job.finding == "channels_first")
        assert job.before.shape[0] == 24
        assert job.time_factor == pytest.approx(256 / 24)

    def test_a_batch_rounded_down_is_compared_per_sample(self) -> None:
        layer = dataclasses.replace(LINEAR, sizes={"in_features": 64, "out_features": 128}, shape=(33, 64))
        (job,) = jobs(evidence(layers=(layer,), loader={"batch_size": 33}))
        assert (job.detail, job.after_factor) == ("batch_size=32", 33 / 32)
        layer = dataclasses.replace(layer, shape=(31, 64))
        (job,) = jobs(evidence(layers=(layer,), loader={"batch_size": 31}))
        assert (job.detail, job.after_factor) == ("batch_size=32", 1.0)

    def test_on_a_gpu(self) -> None:
        seen = evidence(on_gpu=True, layers=(LINEAR, CONV), flags={"bf16": True})
        assert {"tf32_off", "cudnn_benchmark_off", "full_precision"} <= set(names(seen))

    @pytest.mark.parametrize(
        ("changes", "dtype", "multiples"),
        [
            ({"on_gpu": True}, "bfloat16", (8, 64)),
            ({"on_gpu": True, "machine": {"gpus": ("Tesla T4",)}}, "float16", (8,)),
            ({"on_gpu": True, "machine": {"gpus": ("NVIDIA A100-SXM4-40GB",)}}, "float32", (4, 32)),
            ({}, "float32", (8, 16, 64)),
        ],
    )
    def test_multiples_by_device_and_type(
        self, changes: dict[str, Any], dtype: str, multiples: tuple[int, ...]
    ) -> None:
        assert preferred_multiples(evidence(**changes), dtype) == multiples

    @pytest.mark.parametrize(
        ("detail", "shape"),
        [
            ("8 x 6 x 32 x 32", (8, 6, 32, 64)),
            ("8 x 6 x 64 x 64", (8, 6, 64, 32)),
            ("8 x 6 x 64 x 64 in blocks.0.attn", (8, 6, 64, 32)),
            ("8 x 64 x 64", (8, 1, 64, 192)),
            ("", ()),
            ("5", ()),
        ],
    )
    def test_shape_of_attention(self, detail: str, shape: tuple[int, ...]) -> None:
        sizes = {"in_features": 192, "out_features": 576}
        layers = (Layer("blocks.0.attn.qkv", "Linear", sizes, True, (8, 64, 192)),)
        assert attention_shape(detail, layers) == shape


CASES = [
    Case("Linear", {"in_features": 7, "out_features": 5}, True, (3, 4, 7)),
    Case("Linear", {"in_features": 7, "out_features": 5}, True, (4, 7), autocast="bfloat16"),
    Case("Linear", {"in_features": 7, "out_features": 5}, True, (4, 7), norm="BatchNorm1d"),
    Case("Conv1d", {"in_channels": 3, "out_channels": 4, "kernel_size": 5}, True, (2, 3, 20)),
    Case("Conv2d", CONV.sizes, True, (2, 3, 8, 8), channels_last=True, norm="BatchNorm2d"),
    Case("Conv3d", {"in_channels": 3, "out_channels": 4, "kernel_size": 3}, False, (2, 3, 4, 4, 4)),
    Case("Embedding", {"num_embeddings": 11, "embedding_dim": 4}, False, (3, 5)),
    Case("LSTM", {"hidden_size": 6, "num_layers": 2}, True, (2, 5, 3)),
    Case("GRU", {"hidden_size": 6}, True, (2, 5, 3)),
    Case("attention", shape=(2, 2, 6, 4)),
    Case("sdpa", shape=(2, 2, 6, 4)),
    Case("tiny", shape=(8, 8)),
    Case("tiny", shape=(8, 8), anomaly=True),
    Case("tiny", shape=(8, 8), profiler=True),
    Case("AdamW", parameters=SHAPES, fused=True, options={"weight_decay": 0.1}),
    Case("AdamW", parameters=SHAPES, foreach=False),
    Case("SGD", parameters=SHAPES, options={"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_every_case_can_be_built_and_called(case: Case) -> None:
    call = build(case, "cpu")
    with global_settings(case):
        call()
        call()


def test_both_attentions_compute_the_same_gradients() -> None:
    import torch

    def gradients(kind: str) -> Any:
        torch.manual_seed(1)
        return build(Case(kind, shape=(2, 2, 6, 4)), "cpu")()

    for one, other in zip(gradients("attention"), gradients("sdpa"), strict=True):
        torch.testing.assert_close(one, other)


def test_the_tiny_case_runs_as_many_operators_as_it_says() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += func not in (
                torch.ops.aten.t.default,
                torch.ops.aten.detach.default,
                torch.ops.aten.view.default,
            )
            return func(*args, **(kwargs or {}))

    call = build(Case("tiny", shape=(8, 8)), "cpu")
    call()
    with Count() as count:
        call()
    assert count.seen == TINY_OPERATORS


def test_switches_are_put_back() -> None:
    import torch

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    with global_settings(Case("tiny", matmul_precision="high", cudnn_benchmark=True, anomaly=True)):
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.is_anomaly_enabled()
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled())


def test_turns_are_paired() -> None:
    before, after = take_turns(CASES[0], CASES[1], "cpu", 0.1)
    assert len(before) == len(after) >= 1
    assert all(seconds > 0 for seconds in (*before, *after))


@pytest.fixture(scope="module")
def measured() -> tuple[Measurement, ...]:
    """One real process, for an odd layer, an optimizer, and a layer that nobody can build."""
    options = {"lr": 1e-3, "weight_decay": 0.01, "amsgrad": False, "betas": "0.9, 0.999"}
    optimizer = {"fused": False, "shapes": SHAPES, "options": options}
    seen = evidence(layers=(LINEAR,), optimizer=optimizer, flags={"threads": 1})
    broken = Job("odd_sizes", "a layer that is none", Case("Nothing", shape=(1,)), Case("Nothing", shape=(1,)), "x")
    return run_jobs([*jobs(seen), broken], "cpu", 1, 30.0)  # seconds; as a rule it takes two


class TestInAProcessOfItsOwn:
    def test_what_was_asked_for_was_measured(self, measured: tuple[Measurement, ...]) -> None:
        *good, _ = measured
        assert [one.finding for one in good] == ["per_tensor_optimizer", "odd_sizes", "odd_sizes", "odd_sizes"]
        assert all(one.turns >= 1 and one.before > 0 and one.after > 0 and not one.failed for one in good), good
        assert good[0].where == "/home/me/train.py:9"

    def test_one_that_fails_is_named_and_saves_nothing(self, measured: tuple[Measurement, ...]) -> None:
        assert "Nothing" in measured[-1].failed
        assert measured[-1].saved == 0

    def test_it_stays_in_the_evidence(self, measured: tuple[Measurement, ...], tmp_path: Any) -> None:
        seen = evidence(measured=measured)
        seen.write(tmp_path / "evidence.json")
        assert read_evidence(tmp_path / "evidence.json").measured == measured

    def test_without_anything_to_try_no_process_is_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
        assert measure(evidence()) == ()

    def test_a_process_that_dies_spoils_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        dies = tmp_path / "python"
        dies.write_text("#!/bin/sh\necho 'Illegal instruction' >&2\nexit 132\n")
        dies.chmod(0o755)
        monkeypatch.setattr(measuring.sys, "executable", str(dies))
        (one,) = run_jobs([Job("odd_sizes", "what", CASES[0], CASES[0])], "cpu", 1, 1.0)
        assert one.failed == "Illegal instruction"

    @pytest.mark.parametrize("own", ["", "glibc.malloc.check=3"])
    def test_it_keeps_its_memory_unless_told_otherwise(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, own: str
    ) -> None:
        tells = tmp_path / "python"
        tells.write_text('#!/bin/sh\necho "$GLIBC_TUNABLES" >&2\nexit 1\n')
        tells.chmod(0o755)
        monkeypatch.setattr(measuring.sys, "executable", str(tells))
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
        if own:
            monkeypatch.setenv("GLIBC_TUNABLES", own)
        (one,) = run_jobs([Job("odd_sizes", "what", CASES[0], CASES[0])], "cpu", 1, 1.0)
        assert one.failed == (own or TUNABLES)

    def test_no_python_no_measurement(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring.sys, "executable", "/nowhere/python")
        (one,) = run_jobs([Job("odd_sizes", "what", CASES[0], CASES[0])], "cpu", 1, 1.0)
        assert one.failed.startswith("FileNotFoundError")

    def test_what_calls_it_imports_no_torch(self) -> None:
        code = "import hasten.doctor.verdict.measure, sys, json; print(json.dumps('torch' in sys.modules))"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert json.loads(ran.stdout) is False


def test_what_is_within_the_noise_saves_nothing() -> None:
    one = Measurement("odd_sizes", "what", "", 2.0, 1.0, 0.6, 9)
    assert one.saved == 0.0
    assert dataclasses.replace(one, wins=1.0).saved == 1.0
    assert dataclasses.replace(one, wins=0.0, after=3.0).saved == -1.0
    assert dataclasses.replace(one, wins=1.0, turns=4).saved == 0.0
    assert dataclasses.replace(one, wins=0.75, turns=25).saved == 1.0
    assert dataclasses.replace(one, wins=1.0, failed="no memory").saved == 0.0
    assert evidence(measured=(one,), events=(event("item"),)).measured_for("odd_sizes") == [one]
