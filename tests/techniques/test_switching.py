"""Techniques switched on and off every few steps of a training: it is left as if they had never been there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hasten.techniques import CATALOGUE, Effect
from hasten.techniques.compute.compile import compiler
from tests.techniques.conftest import Train, Trained, close, identical
from tests.techniques.switched_training import script

STEPS = 18  # six passes of three steps


def every_other(name: str, setting: Any) -> dict[int, dict[str, Any]]:
    """A schedule that switches every two steps, and so at edges of passes and within them."""
    return {step: {name: setting} if step % 4 == 2 else {} for step in range(2, STEPS, 2)}


def both(train: Train, folder: Path, kind: str, settings: list[Any], schedule: Any, **more: Any) -> tuple[Any, Any]:
    """A switched training, and the plain one, which then goes on from where the switched one was."""
    switched = train(script(kind, settings, schedule, **more), listen=False)
    assert switched.code == 0, switched.err
    assert not switched.left["broken"], switched.left["broken"]
    assert not switched.left["skipped"]
    more |= {"before": "", "between": ""}
    plain = train(script(kind, go_on=str(folder / "run1" / "left.pt"), **more), listen=False)
    assert plain.code == 0, plain.err
    return switched, plain


def check(switched: Trained, plain: Trained, effect: Effect, tolerance: float) -> None:
    """All as it would be without, as far as the effect allows; and from there on to the bit."""
    mine, other = switched.left["trained"], plain.left["trained"]
    if effect is Effect.EXACT:
        for what in ("trained", "losses", "validated"):
            assert identical(switched.left[what], plain.left[what]), what
    else:
        assert identical(mine["random"], other["random"])
        assert mine["layout"] == other["layout"]
        assert close(mine["model"], other["model"], tolerance)
        assert close(switched.left["losses"], plain.left["losses"], tolerance)
    assert identical(switched.left["after"], plain.left["after"])


CASES = [
    ("images", "precision", "bf16-mixed", 5e-2),
    ("words", "precision", "bf16-mixed", 5e-2),
    ("images", "precision", "16-mixed", 5e-2),
    ("images", "channels_last", True, 1e-4),
    ("images", "fused_optimizer", True, 1e-5),
    ("words", "fused_optimizer", True, 1e-5),
    ("large", "set_to_none", True, 1e-6),
    ("images", "no_grad_validation", True, 0.0),
    ("images", "matmul_precision", "medium", 5e-2),
    ("images", "allocator", "glibc", 0.0),
    ("images", "activation_checkpointing", "sqrt", 0.0),
    ("blocks", "activation_checkpointing", True, 0.0),
    ("blocks", "activation_checkpointing", "1.0,1.2", 0.0),
]


@pytest.mark.parametrize(("kind", "name", "setting", "tolerance"), CASES)
def test_a_training_is_left_as_it_would_be_without(
    train: Train, tmp_path: Path, kind: str, name: str, setting: Any, tolerance: float
) -> None:
    switched, plain = both(train, tmp_path, kind, [(name, setting)], every_other(name, setting))
    assert name in switched.left["acted"]
    check(switched, plain, CATALOGUE[name].effect_of(setting), tolerance)


FETCHER = "type(getattr(iterator, '_dataset_fetcher', None)).__name__"
DECODED = "not object.__getattribute__(dataset.loader, '_hasten_call').memo.is_over()"
PASSES = [
    ("images", "batched_fetch", True, 0, f"{FETCHER} == '_Gather'"),
    ("made", "sample_cache", "samples", 0, f"{FETCHER} == '_CachedFetcher'"),
    ("drawn", "sample_cache", "decoded", 0, DECODED),
    ("drawn", "read_ahead", 2, 0, "type(iterator._sampler_iter).__name__ == 'ReadAheadSampler'"),
    ("made", "loader_workers", {"num_workers": 1}, 0, "getattr(iterator, '_hasten_workers', None) is not None"),
    ("made", "loader_workers", {"num_workers": 2}, 1, "iterator._num_workers == 2"),
    ("made", "loader_workers", {"num_workers": 0}, 1, "iterator._num_workers == 0"),
]


@pytest.mark.parametrize(("kind", "name", "setting", "workers", "acts"), PASSES)
def test_a_pass_goes_by_what_was_on_when_it_began(
    train: Train, tmp_path: Path, kind: str, name: str, setting: Any, workers: int, acts: str
) -> None:
    """A pass has three steps: on from the second to within it, and from the fifth on to within the sixth."""
    schedule = {2: {name: setting}, 5: {}, 11: {name: setting}, 16: {}}
    switched, plain = both(
        train, tmp_path, kind, [(name, setting)], schedule, between=f"told.add((steps, {acts}))", workers=workers
    )
    on = {4, 5, 6, 13, 14, 15, 16, 17, 18} if acts != DECODED else {2, 3, 4, 11, 12, 13, 14, 15}  # at once
    assert {step for step, acted in switched.left["told"] if acted} == on
    assert name in switched.left["acted"]
    check(switched, plain, Effect.EXACT, 0.0)


def test_samples_that_draw_random_numbers_are_not_kept(train: Train, tmp_path: Path) -> None:
    switched, plain = both(
        train, tmp_path, "words", [("sample_cache", "samples")], every_other("sample_cache", "samples")
    )
    assert "draw random numbers" in switched.left["acted"]["sample_cache"]
    check(switched, plain, Effect.EXACT, 0.0)


@pytest.mark.skipif(not compiler(), reason="no C++ compiler")
# slow: compiles C++
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_is_made_once(train: Train, tmp_path: Path, backend: str) -> None:
    """By torch's own "eager" backend, which spares the C++ compiler, and by inductor, which runs it and is slow."""
    before = f"""
plain = torch.compile
if {backend == "eager"}:
    torch.compile = lambda model, **options: plain(model, backend="eager")
"""
    on = {"compile": "default"}
    between = """
import torch._dynamo
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
told.add((steps, model._compiled_call_impl is not None, graphs, torch._dynamo.config.use_numpy_random_stream))
"""
    switched, plain = both(
        train,
        tmp_path,
        "small",
        list(on.items()),
        {1: on, 3: {}, 5: on, 6: {}},
        before=before,
        between=between,
        passes=2,
    )
    # The first forward with a graph is looked at, and compiled is the second.
    as_compiled = {1: (True, 0, True), 2: (True, 0, True), 5: (True, 1, True)}
    expected = {step: as_compiled.get(step, (False, 1, False)) for step in range(1, 8)}
    assert {step: tuple(rest) for step, *rest in switched.left["told"] if step < 8} == expected
    check(switched, plain, Effect.ROUNDING, 1e-5)


def test_all_of_them_by_lot(train: Train, tmp_path: Path) -> None:
    """Every two steps another handful is on."""
    lot = random.Random(7)
    settings: list[tuple[str, Any]] = [
        *[(name, True) for name in ("batched_fetch", "debug_off", "no_grad_validation", "cudnn_benchmark")],
        *[(name, True) for name in ("fused_optimizer", "set_to_none", "channels_last", "pin_memory")],
        *[("cpu_threads", 1), ("cpu_threads", 2), ("attention", "math"), ("allocator", "glibc")],
        *[("precision", "bf16-mixed"), ("precision", "16-mixed"), ("sample_cache", "samples")],
        *[("loader_workers", {"num_workers": 1}), ("loader_workers", {"num_workers": 2})],
        *[("matmul_precision", "medium"), ("device_prefetch", True), ("activation_checkpointing", True)],
    ]
    schedule = {step: dict(lot.sample(settings, lot.randrange(len(settings)))) for step in range(1, 30, 2)}
    switched, plain = both(train, tmp_path, "images", settings, schedule, passes=10)
    idle = {"pin_memory", "device_prefetch", "debug_off", "set_to_none", "sample_cache"}  # nothing to act on
    assert set(dict(settings)) - set(switched.left["acted"]) <= idle
    check(switched, plain, Effect.ROUNDING, 0.1)


TRACEBACK = "'traceback_' in torch.ones(1, requires_grad=True).exp().grad_fn.metadata"


@pytest.mark.parametrize(
    ("name", "setting", "read", "off", "on"),
    [
        ("attention", "math", "torch.backends.cuda.flash_sdp_enabled()", True, False),
        ("cpu_threads", 2, "torch.get_num_threads()", 1, 2),
        ("matmul_precision", "medium", "torch.get_float32_matmul_precision()", "highest", "medium"),
        ("cudnn_benchmark", True, "torch.backends.cudnn.benchmark", False, True),
        ("debug_off", True, TRACEBACK, True, False),
    ],
)
def test_a_global_switch_follows(train: Train, name: str, setting: Any, read: str, off: Any, on: Any) -> None:
    between = f"torch.autograd.set_detect_anomaly({name == 'debug_off'}); told.add((steps, {read}))"
    switched = train(
        script("words", [(name, setting)], every_other(name, setting), between=between, passes=3), listen=False
    )
    assert switched.code == 0, switched.err
    seen = dict(switched.left["told"])
    assert {seen[step] for step in (2, 3, 6, 7)} == {on}
    assert {seen[step] for step in (1, 4, 5, 8, 9)} == {off}
    assert name in switched.left["acted"]
