"""Which embedding tables stay on the host when a model is moved. "meta" stands for the GPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hasten.techniques.compute.precision import device_to_cast
from hasten.techniques.memory.host_embeddings import HostEmbeddings
from tests.techniques.conftest import identical
from tests.techniques.test_host_embeddings import COLUMNS, ROWS, Bags, Words, batch, installed


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostEmbeddings]:
    """The technique, which keeps tables of 1 MiB from "meta"."""
    yield from installed(monkeypatch, "meta")


def where(model: nn.Module) -> dict[str, str]:
    return {name: one.device.type for name, one in model.named_parameters()}


def test_a_model_is_moved_without_its_tables(gpu: HostEmbeddings) -> None:
    model = nn.ModuleDict({"words": Words(), "bags": Bags(), "few": nn.Embedding(10, 4)})
    gpu.prepare(model)
    assert gpu.acted == {}  # not moved yet, as when `hasten.setup` gets it
    model["words"].table.weight.grad = torch.ones(ROWS, COLUMNS)
    table, values = model["words"].table.weight, model["words"].table.weight.detach().clone()
    model.to("meta")
    assert where(model) == {
        "words.table.weight": "cpu", "words.head.weight": "meta",
        "bags.table.weight": "cpu", "bags.head.weight": "meta", "bags.head.bias": "meta", "few.weight": "meta",
    }  # fmt: skip
    assert model["words"].table.weight is table
    assert identical(table.detach(), values)
    assert table.grad is not None
    assert table.grad.device.type == "cpu"
    gpu.model(model, ())
    gpu.model(model, ())
    assert gpu.acted == {"table": 2}
    assert device_to_cast(model, torch) == "cpu"  # "meta" is no device to compute on


def test_types_change_all_the_same_and_copies_stay_too(gpu: HostEmbeddings) -> None:
    model = Words().to("meta", torch.float64)
    assert (model.table.weight.device.type, model.table.weight.dtype) == ("cpu", torch.float64)
    model.bfloat16()
    assert (model.table.weight.device.type, model.table.weight.dtype) == ("cpu", torch.bfloat16)
    assert where(model.to("meta"))["table.weight"] == "cpu"  # though it is small by now
    twin = copy.deepcopy(model.float()).to("meta", torch.float64)
    assert (twin.table.weight.device.type, twin.table.weight.dtype) == ("cpu", torch.float64)
    assert isinstance(pickled := torch.load(_as_file(model.table), weights_only=False), nn.Embedding)
    assert "forward" not in vars(pickled)


def _as_file(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


class Shifted(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight.mean()


class Counted(nn.Embedding):
    """Has a part and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__(ROWS, COLUMNS)
        self.part, self.count = nn.Linear(2, 2), nn.Buffer(torch.zeros(ROWS, COLUMNS))


def test_what_is_more_than_an_embedding_goes_whole_or_in_part(gpu: HostEmbeddings) -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Embedding(ROWS, COLUMNS))
    by_frequency = nn.Embedding(ROWS, COLUMNS, scale_grad_by_freq=True, sparse=True)
    for module in (Shifted(ROWS, COLUMNS), spectral, by_frequency):
        assert set(where(module.to("meta")).values()) == {"meta"}
    counted = Counted().to("meta")
    assert where(counted) == {"weight": "cpu", "part.weight": "meta", "part.bias": "meta"}
    assert counted.count.device.type == "meta"


def test_what_was_built_there_and_several_processes_are_left_alone(
    gpu: HostEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = nn.Embedding(ROWS, COLUMNS, device="meta")
    gpu.prepare(there.to("meta"))
    [why] = gpu.acted
    assert why.startswith("left alone: Embedding was built on the GPU")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Words().to("meta")
    assert set(where(model).values()) == {"meta"}
    gpu.prepare(model)
    assert "left alone: several processes train; torchrec shares a table out among them" in gpu.acted


def test_memory_that_is_made_or_shared_in_place_is_torchs_matter(gpu: HostEmbeddings) -> None:
    table = nn.Embedding(ROWS, COLUMNS, device="meta")
    assert table.to_empty(device="cpu").weight.device.type == "cpu"
    assert table.share_memory().weight.is_shared()
    table.float()
    assert table.weight.is_shared()


def test_a_script_that_looks_for_the_table_on_the_gpu_is_told_where_it_is(gpu: HostEmbeddings) -> None:
    model = Words().to("meta")
    call = gpu.forward(lambda module, args, kwargs: module.table(*args, **kwargs) + module.head.weight)
    with pytest.raises(RuntimeError, match="device") as error:
        call(model, (batch(0)[0],), {})  # indices on the CPU, as by `next(model.parameters()).device`
    [note] = error.value.__notes__
    assert "host_embeddings keeps the weight of embeddings on the CPU" in note
