"""Pinned memory and prefetch to the GPU: what they decide, on a GPU that is pretended."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler, Subset, TensorDataset

from hasten.run import Run
from hasten.techniques import CATALOGUE, Choices, Refusal, build
from hasten.techniques.transfer.device_prefetch import DevicePrefetch
from hasten.techniques.transfer.pin_memory import PinMemory
from tests.techniques.conftest import CPU, GPU, MODEL, Train, evidence_of


class Pinned(torch.Tensor):
    """A CPU tensor that says it is pinned."""

    def is_pinned(self, *_: Any) -> bool:
        return True


class OnGpu(torch.Tensor):
    """A copy that says it is on the first GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def record_stream(self, *_: Any) -> None: ...


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Every copy that is asked for, on a machine that seems to have two GPUs."""
    asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Stream:
        def wait_event(self, event: Any) -> None:
            asked.append(("wait", (event,), {}))

        def record_event(self) -> str:
            return "event"

    def pretended(name: str, plain: Any) -> Callable[..., Any]:
        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append((name, args, kwargs))
            target = str(kwargs.get("device", args[0] if args else "cuda"))
            if name == "to" and not (target.startswith("cuda") or target.isdigit()):
                return plain(tensor, *args, **kwargs)
            return tensor.detach().as_subclass(torch.Tensor).clone().as_subclass(OnGpu)

        copy.__name__ = name
        return copy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "to", pretended("to", torch.Tensor.to))
    monkeypatch.setattr(torch.Tensor, "cuda", pretended("cuda", torch.Tensor.cuda))
    return asked


Copies = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


def pinned(*values: float) -> Any:
    return torch.tensor(values).as_subclass(Pinned)


@pytest.mark.parametrize(
    ("copy", "waits"),
    [
        (lambda x: x.to("cuda"), False),
        (lambda x: x.to("cuda:1"), False),
        (lambda x: x.to(torch.device("cuda")), False),
        (lambda x: x.to(0), False),
        (lambda x: x.to(device="cuda"), False),
        (lambda x: x.to(device="cuda", dtype=torch.float16), False),
        (lambda x: x.cuda(), False),
        (lambda x: x.cuda(0), False),
        (lambda x: x.to("cuda", torch.float16), True),  # a conversion on the way: left as it is
        (lambda x: x.to(torch.float64), True),
        (lambda x: x.to("cpu"), True),
        (lambda x: x.to(torch.ones(1)), True),
        (lambda x: x.to("cuda", non_blocking=False), True),  # the script's own word
    ],
)
def test_copies_from_pinned_memory_do_not_wait(copies: Copies, copy: Callable[[Any], Any], waits: bool) -> None:
    run = Run(build({"pin_memory": True}, CATALOGUE))
    run.process()
    batch = {"x": [pinned(1, 2)]}
    assert run.batches(lambda: batch, Workers(0))() is batch
    copy(batch["x"][0])
    (_, _, kwargs) = copies[-1]
    assert bool(kwargs.get("non_blocking")) is not waits


def test_copies_from_pageable_memory_and_from_what_the_script_pinned_wait(copies: Copies) -> None:
    run = Run(build({"pin_memory": True}, CATALOGUE))
    run.process()
    (given,) = run.batches(lambda: [torch.ones(2)], Workers(0))()
    staging = pinned(1, 2)  # written to again for the next copy
    for tensor in (given, staging):
        tensor.to("cuda")
        tensor.cuda()
    assert [kwargs for _, _, kwargs in copies] == [{}] * 4


class OnDevice:
    """A dataset, or a part of one, on a device."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def test_loaders_are_pinned_unless_their_samples_are_on_a_device() -> None:
    def options(dataset: Any, own: bool = False) -> tuple[Any, dict[str, int]]:
        run = Run(build({"pin_memory": True}, CATALOGUE))
        return run.loader_options({"dataset": dataset, "pin_memory": own})["pin_memory"], run.techniques[0].acted

    host = TensorDataset(torch.ones(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert options(host) == (True, {"loader": 1})
        assert options(host, own=True) == (True, {})
        elsewhere = torch.ones(3).as_subclass(OnGpu)
        for dataset in (Subset(TensorDataset(elsewhere), [0]), OnDevice(x=[elsewhere]), OnDevice(d={"k": elsewhere})):
            setting, acted = options(dataset)
            assert setting is False
            assert "a tensor on cuda" in next(iter(acted))
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert options(host) == (False, {})


class Workers:
    """An iterator of a loader with, or without, worker processes."""

    def __init__(self, workers: int) -> None:
        self._num_workers = workers
        self._pin_memory = True


def prefetching(batches: list[Any], workers: int = 2) -> tuple[Callable[[], Any], list[Any]]:
    """The function that gives the next batch, and the batches taken from the workers so far."""
    taken: list[Any] = []
    source = iter(batches)

    def fetch() -> Any:
        taken.append(next(source))
        return taken[-1]

    run = Run(build({"device_prefetch": True}, CATALOGUE))
    run.process()
    return run.batches(fetch, Workers(workers)), taken


def test_each_batch_is_copied_one_step_early_and_handed_out_once(copies: Copies) -> None:
    batches = [{"x": pinned(1, 2), "y": [pinned(3)], "name": "a"}, {"x": pinned(4), "y": [], "name": "b"}]
    give, taken = prefetching(batches)
    first = give()
    assert first is batches[0]
    assert len(taken) == 2
    started = len(copies)
    copy = first["x"].to("cuda")
    assert [name for name, *_ in copies[started:]] == ["wait"]
    assert copy.tolist() == [1, 2]
    again = first["x"].to("cuda")  # a second copy is a tensor of its own
    assert again is not copy
    assert copies[-1][0] == "to"
    assert first["y"][0].cuda().tolist() == [3]
    assert copies[-1][0] == "wait"
    assert give() is batches[1]
    for _ in range(2):
        with pytest.raises(StopIteration):
            give()
    assert len(taken) == 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.to("cuda", torch.float16),
        lambda x: x.to("cuda", dtype=torch.float16),
        lambda x: x.to("cuda:1"),
        lambda x: x.cuda(1),
        lambda x: x.to(torch.float64),
        lambda x: x.add_(1).to("cuda"),
    ],
    ids=["dtype", "dtype by name", "another GPU", "another GPU by cuda", "no device", "changed in between"],
)
def test_what_is_not_that_copy_is_copied_as_ever(copies: Copies, ask: Callable[[Any], Any]) -> None:
    give, _ = prefetching([[pinned(1, 2)], [pinned(3, 4)]])
    batch = give()
    copies.clear()
    ask(batch[0])
    assert "wait" not in [name for name, *_ in copies]


def test_an_error_comes_when_its_batch_is_asked_for(copies: Copies) -> None:
    run = Run(build({"device_prefetch": True}, CATALOGUE))
    run.process()
    steps: list[Any] = [[pinned(1)], ValueError("sample 7"), [pinned(2)], StopIteration()]

    def fetch() -> Any:
        step = steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    give = run.batches(fetch, Workers(2))
    assert give()[0].tolist() == [1]
    with pytest.raises(ValueError, match="sample 7"):
        give()
    assert give()[0].tolist() == [2]
    with pytest.raises(StopIteration):
        give()


def test_a_sampler_that_may_depend_on_the_training_is_asked_when_it_was(copies: Copies) -> None:
    class Hardest(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    run = Run(build({"device_prefetch": True}, CATALOGUE))
    run.process()
    for sampler, early in ((Hardest(), False), (SequentialSampler(range(4)), True)):
        iterator: Any = Workers(2)
        iterator._index_sampler, iterator._dataset_kind = BatchSampler(sampler, 2, False), 0
        taken: list[Any] = []

        def fetch(taken: list[Any] = taken) -> Any:
            taken.append([pinned(1)])
            return taken[-1]

        run.batches(fetch, iterator)()
        assert len(taken) == 1 + early


def test_without_workers_no_batch_is_made_early(copies: Copies) -> None:
    give, taken = prefetching([[pinned(1)], [pinned(2)]], workers=0)
    give()
    assert len(taken) == 1
    assert copies == []


def test_without_a_gpu_nothing_changes(train: Train) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader
        plain = torch.Tensor.to.__qualname__, torch.Tensor.cuda.__qualname__
        loader = DataLoader(torch.arange(6.0), 2, num_workers=1)
        seen = [x.to("cpu").tolist() for x in loader]
        torch.save({"plain": plain, "seen": seen, "pin": loader.pin_memory}, "left.pt")
    """
    assert torch.cuda.is_available() or train(script).left == train(script, pin_memory=True, device_prefetch=True).left


@pytest.mark.parametrize("technique", [PinMemory, DevicePrefetch])
def test_worth_trying(technique: Any) -> None:
    on_gpu = dataclasses.replace(MODEL, device="cuda")
    answer = technique.settings(evidence_of(machine=GPU, models=(on_gpu,)))
    assert isinstance(answer, Choices)
    assert answer.settings == (True,)
    for evidence, words in (
        (evidence_of(machine=CPU), "no NVIDIA GPU"),
        (evidence_of(machine=GPU), "trains on the CPU although"),
        (evidence_of(machine=GPU, models=(on_gpu,), loaders=()), "without a DataLoader"),
    ):
        refusal = technique.settings(evidence)
        assert isinstance(refusal, Refusal)
        assert words in refusal.reason
    assert "CUDA only" in technique.useless(True, CPU)
    assert technique.useless(True, GPU) == ""
