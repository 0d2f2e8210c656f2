"""Embedding tables that stay on the host: the training that it is without. A CPU, or "meta", stands for the GPU."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hasten
from hasten import HastenError, Plan, by_hand
from hasten.techniques import CATALOGUE, Refusal, check
from hasten.techniques.memory import rows_on_host
from hasten.techniques.memory.host_embeddings import HostEmbeddings
from tests.techniques.conftest import CPU, GPU, Train, close, evidence_of, identical

ROWS, COLUMNS = 4200, 64  # just above 1 MiB in float32


def installed(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[HostEmbeddings]:
    """Install the technique, for tables of 1 MiB that are kept from a device, and take it out again."""
    monkeypatch.setattr(HostEmbeddings, "device", device)
    made = HostEmbeddings(1)
    made.process()
    yield made
    made.restore()
    made._on_host.clear()
    made.teardown()
    assert nn.Embedding.forward.__module__ == "torch.nn.modules.sparse"
    assert nn.Embedding._apply is nn.Module._apply


@pytest.fixture
def technique(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostEmbeddings]:
    """The technique on a CPU whose tables are kept from the CPU, so that rows take the whole way."""
    yield from installed(monkeypatch, "cpu")


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each look-up took from the host."""
    plain, seen = rows_on_host._from_host, []

    def counted(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(len(input.unique()))
        return plain(module, input, *args, **kwargs)  # type: ignore[no-any-return]

    monkeypatch.setattr(rows_on_host, "_from_host", counted)
    return seen


class Words(nn.Module):
    """Looks up its table twice in a step, each time some rows twice."""

    def __init__(self, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS, **options)
        self.head = nn.Linear(COLUMNS, 1 if not tied else ROWS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x) + self.table(x.flip(0)))).flatten(1).mean(1)  # type: ignore[no-any-return]


class Bags(nn.Module):
    """Bags of several lengths, some of them empty; weighted where that may be."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, COLUMNS, **options)
        self.head = nn.Linear(COLUMNS, 1)

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([0, 3, 3, 10, 25])
        weights = x.flatten().float() / ROWS if self.table.mode == "sum" else None
        bags = self.table(x.flatten(), offsets, weights).sum(0) + self.table(x)
        return self.head(torch.tanh(bags)).flatten()  # type: ignore[no-any-return]


def adam(model: Any) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)]


def by_rows(model: Any) -> list[Any]:
    table = [model.table.weight]
    return [torch.optim.SparseAdam(table, lr=0.01), torch.optim.Adam(model.head.parameters())]


KINDS: dict[str, tuple[Any, Any]] = {
    "adamw": (Words, adam),
    "adamw of several tensors at once": (Words, lambda model: [torch.optim.AdamW(model.parameters(), foreach=True)]),
    "fused adam": (Words, lambda model: [torch.optim.Adam(model.parameters(), fused=True)]),
    "momentum": (
        Words,
        lambda model: [torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.01, nesterov=True)],
    ),
    "adagrad": (Words, lambda model: [torch.optim.Adagrad(model.parameters())]),
    "rmsprop": (Words, lambda model: [torch.optim.RMSprop(model.parameters(), momentum=0.5)]),
    "two optimizers": (
        Words,
        lambda model: [torch.optim.Adam([model.table.weight]), torch.optim.SGD(model.head.parameters(), 0.1)],
    ),
    "tied weights": (lambda: Words(tied=True), adam),
    "padding": (lambda: Words(padding_idx=3), adam),
    "a padding from the end": (lambda: Words(padding_idx=-ROWS + 3), adam),
    "largest norm": (lambda: Words(max_norm=1.0, norm_type=1.5), adam),
    "gradients by frequency": (lambda: Words(scale_grad_by_freq=True), adam),
    "sum of bags": (lambda: Bags(mode="sum"), adam),
    "mean of bags": (lambda: Bags(mode="mean", padding_idx=3, max_norm=1.0), adam),
    "largest of bags": (lambda: Bags(mode="max"), adam),
}
SPARSE: dict[str, tuple[Any, Any]] = {
    "sparse adam": (lambda: Words(sparse=True), by_rows),
    "sparse adam with padding": (lambda: Words(sparse=True, padding_idx=3, max_norm=2.0), by_rows),
    "sparse sgd": (lambda: Words(sparse=True), lambda model: [torch.optim.SGD(model.parameters(), 0.1)]),
    "sparse adagrad": (lambda: Words(sparse=True), lambda model: [torch.optim.Adagrad(model.parameters(), 0.1)]),
    "sparse bags": (lambda: Bags(mode="mean", sparse=True), by_rows),
}


def batch(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randint(0, 40, (6, 5), generator=draw)  # few of the rows, often the same
    x[0, 0] = 3  # the padding
    return x, torch.randn(6, generator=draw)


def trained(
    kind: tuple[Any, Any], steps: range, begin: Any = None, accumulate: int = 2, autocast: bool = False
) -> dict[str, Any]:
    """What a training leaves: dense gradients are clipped by their norm over all parameters."""
    torch.manual_seed(0)
    make, optimizers_of = kind
    model = make().to("cpu")
    optimizers = optimizers_of(model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
    if begin is not None:
        begin = torch.load(io.BytesIO(begin), weights_only=True)
        model.load_state_dict(begin["model"])
        for part, state in zip([*optimizers, *schedules], begin["rest"], strict=True):
            part.load_state_dict(state)
    losses, norms = [], []
    for number in steps:
        x, y = batch(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (model(x) - y).square().mean()
        (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate:
            if not any(one.grad.is_sparse for one in model.parameters()):
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            for part in (*optimizers, *schedules):
                part.step()
            model.zero_grad()
    model.eval()
    with torch.no_grad():
        losses.append(model(batch(99)[0]).sum().item())
    rest = [part.state_dict() for part in (*optimizers, *schedules)]
    return {"model": model.state_dict(), "rest": rest, "losses": losses, "norms": norms}


def saved(left: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save({"model": left["model"], "rest": left["rest"]}, file)
    return file.getvalue()


def both(kind: tuple[Any, Any], technique: HostEmbeddings, *args: Any, **options: Any) -> tuple[Any, Any]:
    """The training under the technique, and without."""
    with_it = trained(kind, *args, **options)
    technique.restore()
    technique._on_host.clear()
    technique.teardown()
    return with_it, trained(kind, *args, **options)


@pytest.mark.parametrize("name", KINDS)
def test_a_training_is_the_same(technique: HostEmbeddings, looked_up: list[int], name: str) -> None:
    """On one device to the bit: weights, optimizer state, losses and norms."""
    with_it, without = both(KINDS[name], technique, range(6))
    assert identical(with_it, without)
    assert len(looked_up) == 14
    assert max(looked_up) < 30


@pytest.mark.parametrize("name", SPARSE)
def test_a_training_with_sparse_gradients_is_the_same_but_for_rounding(
    technique: HostEmbeddings, looked_up: list[int], name: str
) -> None:
    """Rows that a batch looks up several times are added up before they reach the table."""
    with_it, without = both(SPARSE[name], technique, range(6))
    assert close(with_it["model"], without["model"], 1e-6)
    assert close(with_it["losses"], without["losses"], 1e-6)
    assert len(looked_up) == 14


def test_under_autocast_it_is_the_same(technique: HostEmbeddings, looked_up: list[int]) -> None:
    assert identical(*both(KINDS["adamw"], technique, range(6), autocast=True))
    assert looked_up


@pytest.mark.parametrize("name", ["adamw", "momentum", "padding", "two optimizers"])
def test_a_training_goes_on_with_a_checkpoint_of_the_other_kind(technique: HostEmbeddings, name: str) -> None:
    half, half_plain = both(KINDS[name], technique, range(4))
    from_it = trained(KINDS[name], range(4, 8), saved(half))
    whole = trained(KINDS[name], range(8))
    technique.process()
    from_plain = trained(KINDS[name], range(4, 8), saved(half_plain))
    for one in (from_it, from_plain):
        assert identical(one["model"], whole["model"])
        assert identical(one["rest"], whole["rest"])


@given(
    places=st.lists(st.integers(0, 9), max_size=12),
    padding=st.none() | st.integers(-10, 9),
    largest=st.none() | st.floats(0.5, 4.0),
    norm=st.sampled_from([1.0, 2.0, 3.0]),
    by_frequency=st.booleans(),
    kind=st.sampled_from([torch.int32, torch.int64]),
)
def test_rows_and_gradients_are_those_of_torch(
    places: list[int], padding: int | None, largest: float | None, norm: float, by_frequency: bool, kind: torch.dtype
) -> None:
    found = []
    for forward in (nn.Embedding.forward, rows_on_host.looks_up(nn.Embedding.forward, "cpu")):
        torch.manual_seed(0)
        table = nn.Embedding(10, 3, padding, largest, norm, by_frequency)
        out = forward(table, torch.tensor(places, dtype=kind))
        (out * torch.randn(out.shape)).sum().backward()
        found.append((out.detach(), table.weight.detach(), table.weight.grad))
    assert identical(*found)


def test_gradients_of_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(6, 3, padding_idx=2, dtype=torch.float64)
    forward = rows_on_host.looks_up(nn.Embedding.forward, "cpu")
    places = torch.tensor([[0, 2, 5], [5, 5, 1]])

    def cubes(weight: Tensor) -> Tensor:
        table.weight.data = weight.data
        table.__dict__["_parameters"]["weight"] = weight
        return forward(table, places).pow(3)  # type: ignore[no-any-return]

    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    slopes = []
    for cube in (cubes(weight), F.embedding(places, weight, 2).pow(3)):
        [slope] = torch.autograd.grad(cube.sum(), weight, create_graph=True)
        slopes.append(torch.autograd.grad(slope.square().sum(), weight)[0])
    assert identical(*slopes)


def test_an_index_that_is_not_there_is_torchs_error(technique: HostEmbeddings) -> None:
    model = Words().to("cpu")
    with pytest.raises(IndexError, match="index out of range"):
        model(torch.tensor([[ROWS]]))


def test_scaled_gradients_are_refused(technique: HostEmbeddings) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    model = Words().to("cpu")
    with pytest.raises(HastenError, match="GradScaler"):
        scaler.scale(model(batch(0)[0]).sum())


def test_a_model_that_the_script_compiles_is_the_same(technique: HostEmbeddings, looked_up: list[int]) -> None:
    model = Words().to("cpu")
    compiled = torch.compile(model, backend="eager")
    x = batch(0)[0]
    assert identical(compiled(x), model(x))
    compiled(x).sum().backward()
    assert model.table.weight.grad is not None
    assert looked_up


def test_a_model_is_handed_to_setup_before_it_is_moved(technique: HostEmbeddings, looked_up: list[int]) -> None:
    technique.restore()
    left = []
    for handed in (False, True):
        torch.manual_seed(0)
        model = Words()
        optimizer = torch.optim.Adam(model.parameters())
        if handed:
            model, optimizer = hasten.setup(model, optimizer, host_embeddings=1)
        model.to("cpu")
        x, y = batch(0)
        hasten.backward((model(x) - y).square().mean())
        optimizer.step()
        left.append(model.state_dict())
    made = by_hand._current._run.techniques[0]  # type: ignore[union-attr]
    assert isinstance(made, HostEmbeddings)
    assert len(looked_up) == 2
    hasten.by_hand.end()
    made._on_host.clear()
    made.teardown()
    assert identical(*left)


SCRIPT = """
    import torch
    {first}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(4200, 64), torch.nn.Linear(64, 1)).to("cpu")
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        loss = model(torch.randint(0, 100, (8, 4))).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, "left.pt")
"""
AS_GPU = "from hasten.techniques.memory.host_embeddings import HostEmbeddings; HostEmbeddings.device = 'cpu'"


def test_a_script_under_a_plan_trains_the_same(train: Train) -> None:
    script = SCRIPT.format(first=AS_GPU)
    without, under = train(script), train(script, host_embeddings=1, fused_optimizer=True, precision="bf16-mixed")
    assert under.code == 0, under.err
    assert under.installed["host_embeddings"] == "table"
    assert close(under.left["model"], without.left["model"], 5e-3)
    alone = train(script, host_embeddings=1)
    assert identical(alone.left, without.left)


def test_a_plan_with_it_trains_the_same_on_a_cpu_and_says_that_it_is_of_no_use(train: Train) -> None:
    script = SCRIPT.format(first="")
    without, under = train(script), train(script, host_embeddings=1)
    assert under.code == 0, under.err
    assert identical(under.left, without.left)
    assert "host_embeddings" not in under.installed


def test_it_stands_beside_nothing_that_wants_one_device() -> None:
    for other, setting in (("compile", "default"), ("precision", "16-mixed"), ("optimizer_in_backward", True)):
        with pytest.raises(HastenError, match="host_embeddings cannot act here"):
            check(Plan({"host_embeddings": True, other: setting}))
    check(Plan({"host_embeddings": 512, "precision": "bf16-mixed", "activation_checkpointing": True}))
    for wrong in (0, -1, 2.5, "64MiB"):
        with pytest.raises(HastenError, match="true or a size in MiB"):
            check(Plan({"host_embeddings": wrong}))


def test_tune_does_not_try_it_by_itself_and_a_cpu_has_no_use_for_it() -> None:
    rule = CATALOGUE["host_embeddings"]
    found = rule.settings(evidence_of())
    assert isinstance(found, Refusal)
    assert "CUDA only" in found.reason
    assert "CUDA only" in rule.useless(True, CPU)
    assert rule.useless(True, GPU) == ""
    assert rule(True)._least == 64 << 20  # type: ignore[attr-defined]
