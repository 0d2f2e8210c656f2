"""A plan as a whole: what must be true of its rows, what it takes from evidence, what it asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from hasten.errors import HastenError
from hasten.evidence import Evidence, Flags, Layer, OptimizerFacts
from hasten.planner.cluster import MEASURED, ClusterPlan, Row, plan
from hasten.planner.collectives import Network
from hasten.planner.job import Job, JobOverrides, job_of
from hasten.planner.strategies import STRATEGIES
from tests.techniques.conftest import GPU, LOADER, MODEL, OPTIMIZER, evidence_of

NETWORK = Network(25e9, 10e-6)
SHAPES = ((1000, 64), *((64, 64), (64,)) * 12, (1000, 64))
NUMEL = 128_000 + 12 * (64 * 64 + 64)
BLOCKS = tuple(Layer(f"blocks.{index}.linear", "Linear") for index in range(12))

jobs = some.builds(
    Job,
    **dict.fromkeys(("data", "transfer", "forward", "other", "optimizer"), some.floats(0, 1)),
    backward=some.floats(1e-4, 1),
    batches=some.integers(1, 4),
    parameters=some.just(4 * NUMEL),
    gradients=some.just(4 * NUMEL),
    states=some.just(8 * NUMEL),
    beside=some.just(10 << 20),
    peak=some.just(16 * NUMEL + (10 << 20)),
    shapes=some.sampled_from([(), SHAPES]),
    units=some.integers(1, 40),
)
networks = some.builds(Network, some.floats(1e6, 1e12), some.floats(0, 1e-2))


def gpt(**changes: Any) -> Evidence:
    """Evidence of a small transformer on one GPU, its layers looked at."""
    whole = evidence_of(
        machine=GPU,
        models=(dataclasses.replace(MODEL, parameters=NUMEL, trained_parameters=NUMEL, device="cuda"),),
        optimizers=(dataclasses.replace(OPTIMIZER, name="AdamW", shapes=SHAPES),),
    )
    found = {"layers": BLOCKS, "peak_gpu_bytes": 100 << 20, "device_clock": True, "steps": 100}
    return dataclasses.replace(whole, **{**found, **changes})


def rows(found: ClusterPlan, devices: int) -> dict[str, Row]:
    return {row.strategy: row for row in found.rows if row.devices == devices}


@given(jobs, some.integers(2, 5000), networks)
def test_no_strategy_is_slower_on_a_faster_network(job: Job, ranks: int, network: Network) -> None:
    for name, cost_of in STRATEGIES.items():
        slow = cost_of(job, ranks, network)
        fast = cost_of(job, ranks, Network(2 * network.bandwidth, network.latency / 2))
        assert (slow is None) == (fast is None) == (name == "ddp-powersgd" and not job.shapes)
        if slow is not None and fast is not None:
            assert fast.step <= slow.step * (1 + 1e-12)
            assert fast.memory == slow.memory
            assert -1e-9 <= slow.waits <= slow.exchange * (1 + 1e-9) + 1e-9


@given(jobs, some.integers(1, 500), networks)
def test_messages_beside_the_backward_never_cost_more_than_behind_it(job: Job, ranks: int, network: Network) -> None:
    network = dataclasses.replace(network, latency=0.0)  # buckets are cut otherwise, so there may be more messages
    ddp, run = (STRATEGIES[name](job, ranks, network) for name in ("ddp", "run"))
    assert ddp is not None
    assert run is not None
    assert ddp.step <= run.step * (1 + 1e-9)
    assert run.sent == job.batches * ddp.sent


@given(jobs, some.integers(2, 5000))
def test_what_is_shared_falls_with_the_number_of_devices(job: Job, ranks: int) -> None:
    job = dataclasses.replace(job, batches=1, shapes=(), units=100)
    fsdp, zero = (STRATEGIES[name](job, ranks, NETWORK) for name in ("fsdp", "zero1"))
    assert fsdp is not None
    assert zero is not None
    gathered = 3 / 100 * job.parameters + 2 / 100 * job.gradients
    assert fsdp.memory == pytest.approx((job.parameters + job.gradients + job.states) / ranks + gathered, abs=2)
    own = zero.memory - job.parameters - job.gradients  # its states, and its parameters on their way
    assert own == pytest.approx((job.states + job.gradients) / ranks, abs=32)


def test_a_large_parameter_bounds_what_sharding_the_optimizer_brings() -> None:
    job = job_of(gpt(), JobOverrides())[0]
    many = STRATEGIES["zero1"](job, 64, NETWORK)
    assert many is not None
    whole_table = 1000 * 64 * 4  # is on one of them, with its two states
    assert many.memory - job.parameters - job.gradients == 3 * whole_table


def test_one_device_is_the_measured_step_and_memory() -> None:
    found = plan(gpt(), [1, 8], NETWORK, JobOverrides(), price=3.6)
    row = rows(found, 1)[MEASURED]
    assert row.step == pytest.approx(1.0)
    assert row.memory_bytes == 100 << 20
    assert row.efficiency == 1
    assert row.samples_per_second == pytest.approx(32)
    assert row.seconds == pytest.approx(3200 / 32)
    assert row.cost == pytest.approx(0.1)
    assert set(rows(found, 8)) == set(STRATEGIES)
    in_steps = rows(found, 8)["ddp"]
    assert in_steps.seconds == pytest.approx(13 * in_steps.step)  # 3,200 samples are 12.5 steps of 256
    # ddp holds what one device does: the peak is the same.
    assert rows(found, 8)["ddp"].memory_bytes == 100 << 20


def test_a_batch_that_is_shared_takes_its_share_of_the_time() -> None:
    fast = Network(1e15, 0.0)
    alone = plan(gpt(), [4, 5], fast, JobOverrides(batch="global"))
    assert rows(alone, 4)["ddp"].step == pytest.approx(0.25)
    assert rows(alone, 5)["ddp"].step == pytest.approx(7 / 32)  # seven samples, the others fewer
    assert rows(alone, 4)["ddp"].samples_per_second == pytest.approx(128)
    each = plan(gpt(), [4], fast, JobOverrides())
    assert rows(each, 4)["ddp"].step == pytest.approx(1.0)
    assert rows(each, 4)["ddp"].samples_per_second == pytest.approx(128)
    assert rows(each, 4)["ddp"].efficiency == pytest.approx(1.0)
    with pytest.raises(HastenError, match="64 devices cannot share a batch of 32 samples"):
        plan(gpt(), [64], fast, JobOverrides(batch="global"))
    assert plan(gpt(), [2, 64], fast, JobOverrides(batch="global")).left_out[0].startswith("64 devices cannot share")


def test_memory_that_does_not_fit_is_said() -> None:
    found = plan(gpt(), [8], NETWORK, JobOverrides(), memory=99 << 20)
    assert rows(found, 1)[MEASURED].fits is False
    assert rows(found, 8)["fsdp"].fits is True
    assert rows(plan(gpt(), [8], NETWORK, JobOverrides()), 8)["fsdp"].fits is None


def test_accumulated_gradients_are_sent_once_a_step_by_ddp() -> None:
    optimizer = dataclasses.replace(OPTIMIZER, name="AdamW", shapes=SHAPES, steps=25)
    whole = gpt(optimizers=(optimizer,))
    job, assumed = job_of(whole, JobOverrides())
    assert job.batches == 4
    assert job.step == pytest.approx(4.0)
    assert any("accumulated over 4 batches" in text for text in assumed)
    found = rows(plan(whole, [8], Network(1e9, 0.0), JobOverrides()), 8)
    once = rows(plan(gpt(), [8], Network(1e9, 0.0), JobOverrides()), 8)
    assert found["ddp"].exchange == pytest.approx(once["ddp"].exchange)
    assert found["run"].exchange == pytest.approx(4 * once["run"].exchange)  # after each backward
    assert found["fsdp"].sent_bytes > once["fsdp"].sent_bytes  # parameters are gathered for each batch
    assert (found["fsdp"].memory_bytes or 0) > (once["fsdp"].memory_bytes or 0)  # gradients stay whole until then


def test_gradients_of_16_bits_are_not_halved_again_and_fsdp_adds_them_in_float32() -> None:
    model = dataclasses.replace(MODEL, parameters=NUMEL, trained_parameters=NUMEL, device="cuda", dtype="bfloat16")
    found = plan(gpt(models=(model,)), [8], NETWORK, JobOverrides())
    assert found.job.gradients == 2 * NUMEL
    assert "ddp-16-bit" not in rows(found, 8)
    assert any(text.startswith("ddp-16-bit") for text in found.left_out)
    gathers = 2 * 13 - 1
    assert rows(found, 8)["fsdp"].sent_bytes == pytest.approx(7 / 8 * NUMEL * (2 * gathers / 13 + 4), rel=1e-6)


def test_frozen_parameters_are_held_and_not_sent() -> None:
    model = dataclasses.replace(MODEL, parameters=10 * NUMEL, trained_parameters=NUMEL, device="cuda")
    job = job_of(gpt(models=(model,)), JobOverrides())[0]
    assert job.parameters == 40 * NUMEL
    assert job.gradients == 4 * NUMEL
    assert job.states == 8 * NUMEL


def test_units_are_entries_of_lists_with_layers_inside() -> None:
    assert job_of(gpt(), JobOverrides())[0].units == 13
    assert job_of(gpt(), JobOverrides(units=4))[0].units == 4
    plain = tuple(Layer(path, "Linear") for path in ("0", "2", "4"))  # a Sequential of layers has no blocks
    assert job_of(gpt(layers=plain), JobOverrides())[0].units == 1
    without = plan(gpt(layers=()), [8], NETWORK, JobOverrides())
    assert "fsdp" not in rows(without, 8)
    assert any("--units" in text for text in without.left_out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flags": Flags(distributed=4)}, "of a run on 4 processes"),
        ({"step_phases": (), "step_start": (), "losses": ()}, "has no whole step"),
        ({"step_phases": ((1.0, *(0.0,) * 8),) * 10}, "has no backward"),
        ({"models": (), "optimizers": ()}, "neither a trained model nor"),
        ({"optimizers": ()}, "has no optimizer"),
        ({"optimizers": (dataclasses.replace(OPTIMIZER, name="Shampoo"),)}, "what Shampoo keeps"),
    ],
)
def test_evidence_that_is_not_enough_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HastenError, match=message) as caught:
        plan(gpt(**change), [8], NETWORK, JobOverrides())
    assert caught.value.fix


def test_what_evidence_does_not_hold_is_assumed_in_words_or_asked_for() -> None:
    unknown = (dataclasses.replace(OPTIMIZER, name="Shampoo"),)
    found = plan(gpt(optimizers=unknown, peak_gpu_bytes=None, loaders=()), [8], NETWORK, JobOverrides(state=12.0))
    assert found.job.states == 12 * NUMEL
    assert rows(found, 8)["ddp"].memory_bytes is None
    assert rows(found, 8)["ddp"].seconds is None
    for words in ("--activations", "gradients come in even parts"):
        assert any(words in text for text in found.assumed), words
    said = plan(
        gpt(peak_gpu_bytes=None, loaders=()),
        [8],
        NETWORK,
        JobOverrides(activations=1 << 20, batch_size=10, samples=1000),
    )
    assert rows(said, 8)["ddp"].memory_bytes == 16 * NUMEL + (1 << 20)
    assert rows(said, 1)[MEASURED].seconds == pytest.approx(100)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "SGD"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "SGD"),
        (lambda p: torch.optim.Adam(p), "Adam"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW"),
        (lambda p: torch.optim.NAdam(p), "NAdam"),
        (lambda p: torch.optim.RAdam(p), "RAdam"),
        (lambda p: torch.optim.Adamax(p), "Adamax"),
        (lambda p: torch.optim.Adadelta(p), "Adadelta"),
        (lambda p: torch.optim.Adagrad(p), "Adagrad"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), "RMSprop"),
        (lambda p: torch.optim.ASGD(p), "ASGD"),
        (lambda p: torch.optim.Rprop(p), "Rprop"),
    ],
)
def test_what_optimizers_keep_is_what_torch_keeps(make: Any, name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(30, 20))
    optimizer = make([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[parameter].values() if value.numel() > 1)
    options = {key: value for key, value in optimizer.param_groups[0].items() if isinstance(value, bool | int | float)}
    facts = OptimizerFacts(name, "", 1, False, None, False, "", 100, options, shapes=((30, 20),))
    model = dataclasses.replace(MODEL, parameters=600, trained_parameters=600)
    job = job_of(evidence_of(models=(model,), optimizers=(facts,), loaders=(LOADER,)), JobOverrides())[0]
    assert job.states == kept
