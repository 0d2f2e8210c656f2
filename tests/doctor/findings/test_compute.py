"""Findings about computing: precision, layout, compiling, launching, debug tools."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any, ClassVar

import pytest

from hasten.doctor.findings import FINDINGS
from hasten.doctor.findings.cudnn_benchmark_varying import CudnnBenchmarkVarying
from hasten.doctor.findings.graph_breaks import GraphBreaks
from hasten.doctor.findings.launch_bound import LaunchBound
from hasten.doctor.findings.recompilations import Recompilations
from hasten.evidence import (
    Event,
    Evidence,
    Finding,
    HowKnown,
    Inputs,
    LiveTrial,
    Measurement,
    Operator,
    ProcessEnvironment,
    Sampled,
    Severity,
)
from tests.doctor.findings.made import event, evidence

CONV = Measurement("", "Conv2d 64 -> 128, 3x3: changed", "layer1.conv", 0.006, 0.003, wins=1.0, turns=9)
SLOWER = dataclasses.replace(CONV, after=0.007, wins=0.0)
UNSURE = dataclasses.replace(CONV, after=0.005, wins=0.5)
PRODUCTS = (Operator("aten::addmm", 4.0, 0.004), Operator("aten::relu", 4.0, 0.001))


def of(name: str, seen: Evidence) -> Finding | None:
    return next(iter(FINDINGS[name].findings(seen)), None)


def found(check: Any, seen: Evidence) -> list[Finding]:
    return list(check.findings(seen))


def measured(finding: str, *ones: Measurement) -> tuple[Measurement, ...]:
    return tuple(dataclasses.replace(one, finding=finding) for one in ones)


BF16: dict[str, Any] = {"machine": {"cpu_flags": ("avx512_bf16",)}}


class TestPrecision:
    def test_worth_is_what_was_measured(self) -> None:
        seen = evidence(**BF16, measured=measured("full_precision", CONV))
        finding = of("full_precision", seen)
        assert finding is not None
        assert (finding.name, finding.how_known) == ("full_precision", HowKnown.ESTIMATED)  # not the step was tried
        assert finding.worth == pytest.approx(0.3, rel=0.01)  # 3 ms of a step of 10 ms
        assert finding.severity is Severity.HIGH
        assert "50 %" in finding.what
        assert finding.setting == "bf16-mixed"

    def test_on_a_gpu_it_is_measured(self) -> None:
        finding = of("full_precision", evidence(on_gpu=True, measured=measured("full_precision", CONV)))
        assert finding is not None
        assert finding.how_known is HowKnown.MEASURED
        assert "GLIBC_TUNABLES" not in finding.fix

    def test_the_memory_of_its_casts_is_to_be_kept_where_glibc_gives_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("LD_PRELOAD", "GLIBC_TUNABLES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
        seen = evidence(**BF16, measured=measured("full_precision", CONV))
        finding = of("full_precision", seen)
        assert finding is not None
        assert "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=" in finding.fix
        other = of(
            "full_precision", dataclasses.replace(seen, surroundings=ProcessEnvironment(preload="libjemalloc.so"))
        )
        assert other is not None
        assert "GLIBC_TUNABLES" not in other.fix
        monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.top_pad=67108864")
        chosen = of("full_precision", seen)
        assert chosen is not None
        assert "set, which" not in chosen.fix

    def test_silent_on_a_cpu_where_it_would_hardly_show(self) -> None:
        little = dataclasses.replace(CONV, before=0.001, after=0.0006)  # 4 % of the step
        assert of("full_precision", evidence(**BF16, measured=measured("full_precision", little))) is None
        assert of("full_precision", evidence(on_gpu=True, measured=measured("full_precision", little)))

    def test_silent_with_a_line_search(self) -> None:
        seen = evidence(**BF16, optimizer={"name": "LBFGS"}, measured=measured("full_precision", CONV))
        assert of("full_precision", seen) is None

    @pytest.mark.parametrize("one", [SLOWER, UNSURE])
    def test_silent_where_it_brought_nothing(self, one: Measurement) -> None:
        assert of("full_precision", evidence(**BF16, measured=measured("full_precision", one))) is None

    def test_what_one_layer_loses_counts_against_what_another_gains(self) -> None:
        loses = dataclasses.replace(SLOWER, before=0.002, after=0.005, where="b")
        seen = evidence(**BF16, measured=measured("full_precision", CONV, loses))
        assert of("full_precision", seen) is None

    def test_a_cpu_is_not_guessed_at(self) -> None:
        assert of("full_precision", evidence(**BF16, sampled=Sampled((3,), PRODUCTS))) is None

    def test_a_gpu_is_estimated_without_a_measurement(self) -> None:
        finding = of("full_precision", evidence(on_gpu=True, flags={"bf16": True}, sampled=Sampled((3,), PRODUCTS)))
        assert finding is not None
        assert finding.how_known is HowKnown.ESTIMATED
        assert finding.worth == pytest.approx(0.2, rel=0.01)  # half of 4 ms of 10

    def test_silent_under_autocast(self) -> None:
        seen = evidence(on_gpu=True, model={"autocast": "bfloat16"}, sampled=Sampled((3,), PRODUCTS))
        assert of("full_precision", seen) is None

    def test_fp16_asks_for_a_scaler(self) -> None:
        finding = of("full_precision", evidence(on_gpu=True, sampled=Sampled((3,), PRODUCTS)))
        assert finding is not None
        assert "GradScaler" in finding.fix


class TestTF32:
    def test_off_on_a_gpu(self) -> None:
        finding = of("tf32_off", evidence(on_gpu=True, sampled=Sampled((3,), PRODUCTS)))
        assert finding is not None
        assert (finding.name, finding.how_known) == ("tf32_off", HowKnown.ESTIMATED)

    def test_convolutions_have_it_by_default(self) -> None:
        operators = (Operator("aten::cudnn_convolution", 4.0, 0.004),)
        assert of("tf32_off", evidence(on_gpu=True, sampled=Sampled((3,), operators))) is None

    def test_measured(self) -> None:
        finding = of("tf32_off", evidence(on_gpu=True, measured=measured("tf32_off", CONV)))
        assert finding is not None
        assert finding.how_known is HowKnown.MEASURED

    @pytest.mark.parametrize(
        "changes",
        [
            {"on_gpu": False, "machine": {"cpu_flags": ("avx512_bf16",)}},
            {"on_gpu": True, "flags": {"matmul_precision": "high"}},
            {"on_gpu": True, "model": {"autocast": "bfloat16"}},
            {"on_gpu": True, "model": {"dtype": "bfloat16"}},
        ],
    )
    def test_silent(self, changes: dict[str, Any]) -> None:
        assert of("tf32_off", evidence(**changes, sampled=Sampled((3,), PRODUCTS))) is None


class TestChannelsLast:
    def test_measured(self) -> None:
        finding = of("channels_first", evidence(measured=measured("channels_first", CONV)))
        assert finding is not None
        assert finding.name == "channels_first"
        assert finding.worth == pytest.approx(0.3, rel=0.01)

    @pytest.mark.parametrize("one", [SLOWER, UNSURE])
    def test_silent_where_it_brought_nothing(self, one: Measurement) -> None:
        assert of("channels_first", evidence(measured=measured("channels_first", one))) is None

    def test_never_recited(self) -> None:
        assert of("channels_first", evidence()) is None


class TestCudnnBenchmark:
    def test_off_with_fixed_sizes(self) -> None:
        inputs = Inputs((((32, 3, 32, 32), 9), ((7, 3, 32, 32), 1)), 10)  # the last batch is smaller
        seen = evidence(on_gpu=True, inputs=inputs, measured=measured("cudnn_benchmark_off", CONV))
        finding = of("cudnn_benchmark_off", seen)
        assert finding is not None
        assert finding.name == "cudnn_benchmark_off"

    def test_silent_with_varying_sizes_and_where_it_is_on(self) -> None:
        varying = Inputs(tuple(((32, 3, 32, 32 + n), 1) for n in range(9)), 9)
        ones = measured("cudnn_benchmark_off", CONV)
        assert of("cudnn_benchmark_off", evidence(on_gpu=True, inputs=varying, measured=ones)) is None
        assert of("cudnn_benchmark_off", evidence(on_gpu=True, flags={"cudnn_benchmark": True}, measured=ones)) is None
        assert of("cudnn_benchmark_off", evidence(measured=ones)) is None

    def test_on_with_varying_sizes(self) -> None:
        varying = Inputs(tuple(((32, 3, 32, 32 + n), 1) for n in range(9)), 9)
        seen = with_slow_steps(evidence(on_gpu=True, flags={"cudnn_benchmark": True}, inputs=varying))
        (finding,) = found(CudnnBenchmarkVarying, seen)
        assert finding.worth == pytest.approx(0.31, abs=0.02)

    def test_on_with_fixed_sizes_or_without_a_gpu(self) -> None:
        fixed = Inputs((((32, 3, 32, 32), 9),), 9)
        varying = Inputs(tuple(((32, 3, 32, 32 + n), 1) for n in range(9)), 9)
        on = {"cudnn_benchmark": True}
        assert not found(CudnnBenchmarkVarying, with_slow_steps(evidence(on_gpu=True, flags=on, inputs=fixed)))
        assert not found(CudnnBenchmarkVarying, with_slow_steps(evidence(flags=on, inputs=varying)))


def with_slow_steps(seen: Evidence) -> Evidence:
    """Every twentieth step takes ten times as long."""
    phases = tuple(
        tuple(10 * seconds for seconds in step) if index % 20 == 15 else step
        for index, step in enumerate(seen.step_phases)
    )
    return dataclasses.replace(seen, step_phases=phases)


class TestFusedOptimizer:
    ADAM: ClassVar[dict[str, Any]] = {"optimizer": {"fused": False}, "phases": {"optimizer": 0.0025}}
    TRIED = Measurement("per_tensor_optimizer", "AdamW on 10 tensors: fused", "/home/me/train.py:9", 4e-4, 1e-4, 1.0, 9)

    def test_worth_is_its_gain_times_the_optimizers_share(self) -> None:
        finding = of("per_tensor_optimizer", evidence(**self.ADAM, measured=(self.TRIED,)))
        assert finding is not None
        assert finding.worth == pytest.approx(0.75 * 2.5 / 12, rel=0.01)
        assert (finding.file, finding.line) == ("/home/me/train.py", 9)

    def test_silent_when_fused_unsure_or_without_share(self) -> None:
        unsure = dataclasses.replace(self.TRIED, wins=0.5)
        small = {**self.ADAM, "phases": {"optimizer": 0.0001}}
        assert of("per_tensor_optimizer", evidence(measured=(self.TRIED,))) is None
        assert of("per_tensor_optimizer", evidence(**self.ADAM, measured=(unsure,))) is None
        assert of("per_tensor_optimizer", evidence(**small, measured=(self.TRIED,))) is None
        assert of("per_tensor_optimizer", evidence(**self.ADAM)) is None


class TestCompile:
    CHAIN = Sampled((3,), pointwise_seconds=0.004, pointwise_calls=40.0)

    def test_pointwise_chains(self) -> None:
        finding = of("unfused_pointwise", evidence(sampled=self.CHAIN))
        assert finding is not None
        assert (finding.name, finding.how_known) == ("unfused_pointwise", HowKnown.ESTIMATED)
        assert finding.worth == pytest.approx(0.2, rel=0.01)

    def test_a_model_of_one_layer_and_functions_can_be_fused(self) -> None:
        assert of("unfused_pointwise", evidence(model={"layers": {"Linear": 1}}, sampled=self.CHAIN))
        assert (
            of("unfused_pointwise", evidence(model={"name": "Linear", "layers": {"Linear": 1}}, sampled=self.CHAIN))
            is None
        )

    def test_silent_when_compiled_or_with_few(self) -> None:
        few = dataclasses.replace(self.CHAIN, pointwise_calls=8.0)  # two layers, each with a ReLU
        short = dataclasses.replace(self.CHAIN, pointwise_seconds=0.0005)
        assert of("unfused_pointwise", evidence(model={"compiled": True}, sampled=self.CHAIN)) is None
        assert of("unfused_pointwise", evidence(flags={"compiler": ""}, sampled=self.CHAIN)) is None
        assert of("unfused_pointwise", evidence(sampled=few)) is None
        assert of("unfused_pointwise", evidence(sampled=short)) is None
        assert of("unfused_pointwise", evidence()) is None


class TestLaunchBound:
    def test_small_operators_on_a_cpu(self) -> None:
        tried = Measurement("launch_bound", "an operator on 64 numbers", "", 3e-6, 3e-6, 0.5, 9)
        seen = evidence(sampled=Sampled((3,), calls=2500.0), measured=(tried,))
        (finding,) = found(LaunchBound, seen)
        assert finding.worth == pytest.approx(0.375, rel=0.01)  # half of 2500 x 3 us of 10 ms
        assert "2500 operators" in finding.what
        assert "compile the model" in finding.fix

    def test_what_is_compiled_is_not_to_be_compiled(self) -> None:
        (finding,) = found(LaunchBound, evidence(model={"compiled": True}, sampled=Sampled((3,), calls=2500.0)))
        assert "compile" not in finding.fix

    def test_a_busy_machine_does_not_make_operators_small(self) -> None:
        tried = Measurement("launch_bound", "an operator on 64 numbers", "", 40e-6, 50e-6, 0.5, 9)
        assert not found(LaunchBound, evidence(sampled=Sampled((3,), calls=300.0), measured=(tried,)))

    def test_what_operators_compute_is_not_their_start(self) -> None:
        """Of 10 ms 7.5 go into 60 matrix products: 2000 operators beside them take no more than what is left."""
        products = Operator("aten::addmm", 60.0, 0.0075)
        assert not found(LaunchBound, evidence(sampled=Sampled((3,), (products,), calls=2060.0)))
        small = Operator("aten::add", 2000.0, 0.0075)
        assert found(LaunchBound, evidence(sampled=Sampled((3,), (small,), calls=2060.0)))

    def test_silent_about_the_many_operators_of_a_line_search(self) -> None:
        sampled = Sampled((3,), calls=2500.0)
        assert not found(LaunchBound, evidence(optimizer={"name": "LBFGS"}, sampled=sampled))

    def test_silent_with_operators_that_compute(self) -> None:
        assert not found(LaunchBound, evidence(sampled=Sampled((3,), calls=300.0)))
        assert not found(LaunchBound, evidence())

    def test_an_idle_gpu(self) -> None:
        (finding,) = found(LaunchBound, evidence(on_gpu=True, sampled=Sampled((3,), launches=900.0, device_busy=0.3)))
        assert finding.worth == pytest.approx(0.35, rel=0.01)

    @pytest.mark.parametrize(("launches", "busy"), [(900.0, 0.95), (20.0, 0.3), (None, 0.3), (900.0, None)])
    def test_silent_with_a_busy_gpu_or_few_launches(self, launches: float | None, busy: float | None) -> None:
        sampled = Sampled((3,), launches=launches, device_busy=busy)
        assert not found(LaunchBound, evidence(on_gpu=True, sampled=sampled))


class TestCompiled:
    BREAK = (
        'Graph break: call to print\n  File "/venv/site-packages/torch/x.py", line 9\n  File "/home/me/net.py", line 31'
    )

    def test_graph_breaks_have_a_line(self) -> None:
        seen = evidence(
            steps=100, phases={"forward": 0.001, "backward": 0.002}, sampled=Sampled(graph_breaks=(self.BREAK,))
        )
        (finding,) = found(GraphBreaks, seen)
        assert (finding.file, finding.line) == ("/home/me/net.py", 31)
        assert finding.how_known is HowKnown.ESTIMATED

    def test_a_break_in_a_long_step_is_a_note(self) -> None:
        (finding,) = found(GraphBreaks, evidence(phases={"forward": 0.5}, sampled=Sampled(graph_breaks=(self.BREAK,))))
        assert (finding.severity, finding.worth) == (Severity.NOTE, None)

    def test_no_graph_breaks(self) -> None:
        assert not found(GraphBreaks, evidence(sampled=Sampled()))
        assert not found(GraphBreaks, evidence())

    def test_recompilations_cost_what_slow_steps_took(self) -> None:
        reasons = tuple(f"net.py:7: size mismatch at index 0. expected {n}" for n in range(5))
        (finding,) = found(Recompilations, with_slow_steps(evidence(sampled=Sampled(recompilations=reasons))))
        assert finding.worth == pytest.approx(0.31, abs=0.02)
        assert (finding.file, finding.line) == ("net.py", 7)
        assert len(finding.details) == 5

    def test_where_every_step_is_compiled_anew_the_operators_tell_how_long_it_should_take(self) -> None:
        sampled = Sampled(operators=PRODUCTS, recompilations=("a", "b", "c", "d"))  # 5 ms of operators
        (finding,) = found(Recompilations, evidence(steps=5, phases={"forward": 3.0}, sampled=sampled))
        assert finding.worth == pytest.approx(1.0, abs=0.01)

    def test_two_recompilations_are_how_torch_learns_which_sizes_vary(self) -> None:
        assert not found(Recompilations, evidence(sampled=Sampled(recompilations=("a", "b"))))


class TestDebugTools:
    SLOW = Measurement("debug_tools_on", "an operator without anomaly detection", "anomaly", 5e-6, 2e-6, 1.0, 9, 1000.0)

    def test_anomaly_detection(self) -> None:
        seen = evidence(events=(event("anomaly"),), measured=(self.SLOW,))
        finding = of("debug_tools_on", seen)
        assert finding is not None
        assert finding.worth == pytest.approx(0.3, rel=0.01)  # 1000 operators, 3 us each, of 10 ms
        assert (finding.line, finding.severity, finding.technique) == (20, Severity.HIGH, "debug_off")

    def test_no_step_owes_it_more_than_an_empty_operator_does(self) -> None:
        many = dataclasses.replace(self.SLOW, calls=9000.0)  # 27 ms of a step of 10 ms
        finding = of("debug_tools_on", evidence(events=(event("anomaly"),), measured=(many,)))
        assert finding is not None
        assert finding.worth == pytest.approx(0.6)

    def test_anomaly_detection_that_was_switched_off_in_the_run(self) -> None:
        live = LiveTrial("debug_tools_on", "debug_off", "true", (), 2.0, 1.9, 2.1, blocks=4, steps=20.0, before=0.01)
        seen = evidence(events=(event("anomaly"),), measured=(self.SLOW,), tried=(live,))
        finding = of("debug_tools_on", seen)
        assert finding is not None
        assert (finding.worth, finding.how_known) == (0.5, HowKnown.MEASURED)
        assert "2.00x [1.90, 2.10] as fast a step" in finding.details[0]
        both = of("debug_tools_on", dataclasses.replace(seen, events=(event("anomaly"), event("profiler"))))
        assert both is not None
        assert both.how_known is HowKnown.ESTIMATED, "the profiler was on in all blocks"

    def test_a_profiler_that_never_ends(self) -> None:
        finding = of("debug_tools_on", evidence(events=(event("profiler"),)))
        assert finding is not None
        assert finding.worth is None
        assert finding.severity is Severity.MEDIUM

    def test_gradient_checks_in_the_loop(self) -> None:
        finding = of("debug_tools_on", evidence(events=(event("gradcheck", seconds=0.4),)))
        assert finding is not None
        assert finding.worth == pytest.approx(0.2, rel=0.01)
        assert finding.technique == ""

    def test_silent_with_a_schedule_that_ended(self) -> None:
        assert (
            of("debug_tools_on", evidence(events=(event("profiler", count=8),), flags={"profiler": "profile"})) is None
        )
        assert of("debug_tools_on", evidence()) is None


class TestAttention:
    TRIED = Measurement("attention_by_hand", "attention of 8x8x256x64", "/home/me/net.py:14", 2e-3, 1e-3, 1.0, 9, 2.0)

    def test_by_hand(self) -> None:
        finding = of("attention_by_hand", evidence(measured=(self.TRIED,)))
        assert finding is not None
        assert (finding.name, finding.line) == ("attention_by_hand", 14)
        assert finding.worth == pytest.approx(0.2, rel=0.01)

    def test_silent_where_torchs_own_is_no_faster(self) -> None:
        slower = dataclasses.replace(self.TRIED, after=3e-3, wins=0.0)
        events = (Event("attention", "/home/me/net.py:14", 200, 200, detail="(8, 8, 256, 64)"),)
        assert of("attention_by_hand", evidence(measured=(slower,), events=events)) is None
        assert of("attention_by_hand", evidence(events=events)) is None
