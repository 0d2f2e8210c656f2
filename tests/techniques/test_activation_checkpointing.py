"""Activations computed again: the same numbers from less memory, and the same model from outside."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import hasten
from hasten.memory_search.knapsack import as_setting
from hasten.run import Run
from hasten.techniques import CATALOGUE, Refusal, build
from hasten.techniques.compute.compile import compiler
from hasten.techniques.memory.activation_checkpointing import ActivationCheckpointing, Checkpointed
from hasten.techniques.memory.sequential_segments import cuts
from tests.techniques.conftest import Train, evidence_of, identical

ROWS = 1500


class Block(nn.Module):
    """All that makes a second forward differ: dropout, statistics, vectors that a forward moves on."""

    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(drop)
        if drop:
            self.skip = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        skip = self.skip(x) if hasattr(self, "skip") else x
        return self.drop(self.down(self.up(self.norm(x)).relu() * torch.ones(32))) * scale + skip, None


class Net(nn.Module):
    """A stack of blocks and a head."""

    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
        return self.head(x)


def trained(drop: float = 0.2, **plan: Any) -> tuple[dict[str, Any], int, Run]:
    """What a training leaves, how many bytes its last forward kept, and the run."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Net(drop)
    run = Run(build(plan, CATALOGUE))
    run.process()
    hooked: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: hooked.append(1))
    run.model(model, ())
    forward = run.wrap("forward", lambda module, args, kwargs: module(*args, **kwargs))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, kept = [], [0]
    for number in range(4):
        x = torch.randn(ROWS, 8)
        with torch.profiler.profile(profile_memory=True) if number == 3 else contextlib.nullcontext() as profiler:
            loss = forward(model, (x,), {}).float().pow(2).mean()
        if profiler is not None:
            kept[0] = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(forward(model.eval(), (x,), {}).sum().item())
    return {"losses": losses, "model": model.state_dict(), "hooked": len(hooked)}, kept[0], run


@pytest.mark.parametrize("precision", [False, "bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_the_same_numbers_from_less_memory(precision: Any) -> None:
    plain, kept, _ = trained(precision=precision)
    changed, kept_less, run = trained(precision=precision, activation_checkpointing=True)
    assert identical(plain, changed)
    assert kept_less < kept / 5
    assert run.installed()["activation_checkpointing"] == "3 x block"
    assert run.skipped == []


@pytest.mark.slow  # inductor runs the C++ compiler
@pytest.mark.skipif(not compiler(), reason="no C++ compiler")
def test_a_model_that_is_compiled_afterwards() -> None:
    plain, _, _ = trained(drop=0.0)
    changed, _, run = trained(drop=0.0, activation_checkpointing=True, compile="default")
    assert torch.allclose(torch.tensor(plain["losses"]), torch.tensor(changed["losses"]), rtol=1e-3)
    for one, other in zip(plain["model"].values(), changed["model"].values(), strict=True):
        assert torch.allclose(one.double(), other.double(), atol=1e-3)  # BatchNorm's statistics too: changed once
    assert run.installed() == {"activation_checkpointing": "3 x block", "compile": "model"}


def stack(*blocks: nn.Module) -> nn.Module:
    """Blocks in a container in a model."""
    model = nn.Module()
    model.stack = nn.Sequential(*blocks)
    model.head = nn.Linear(8, 8)
    return model


BLOCKS = [f"stack.1.blocks.{number}" for number in range(3)]
CHOSEN: dict[str, tuple[Any, nn.Module, list[str]]] = {
    "single layers": (True, stack(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), []),
    "one block": (True, stack(Block()), []),
    "two of three": (True, stack(Block(), Net(), Block()), ["stack.0", *BLOCKS, "stack.2"]),
    "outermost": (True, stack(Net(), Net()), ["stack.0", "stack.1"]),
    "by name": ("Block", stack(nn.Identity(), Net(), Block()), [*BLOCKS, "stack.2"]),
    "by paths": ("stack.0,stack.1.blocks.1-2", stack(Block(), Net(), Block()), ["stack.0", *BLOCKS[1:]]),
    "by paths under a wrapper": ("stack.1", nn.DataParallel(stack(Block(), Net())), ["module.stack.1"]),
    "by names": ("Net, Linear", stack(Net(), Block(0.0)), ["stack.0", "stack.1.up", "stack.1.down", "head"]),
    "torch's own": (
        True,
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2),
        ["layers.0", "layers.1"],
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_which_blocks_are_chosen(case: str) -> None:
    setting, model, expected = CHOSEN[case]
    run = Run(build({"activation_checkpointing": setting}, CATALOGUE))
    run.model(model, ())
    chosen = [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), Checkpointed)]
    assert sorted(chosen) == sorted(expected)
    assert bool(run.idle()) is not bool(expected)


def test_copies_are_checkpointed_and_pickles_are_plain() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    names = list(model.state_dict())
    Run(build({"activation_checkpointing": True}, CATALOGUE)).model(model, ())
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"hasten." not in file.getvalue()  # a module of ours; the path of a clone may hold the word
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert list(model.state_dict()) == list(twin.state_dict()) == list(again.state_dict()) == names
    x = torch.randn(3, 2)
    with torch.no_grad():
        for one in (twin, again):
            one[0][0].weight.add_(1)  # its own: the model's stays
    assert not torch.equal(model(x), twin(x))
    assert torch.equal(twin(x), again(x))
    assert isinstance(vars(twin[0])["forward"], Checkpointed)
    assert vars(twin[0])["forward"].block is twin[0]
    twin(x).sum().backward()
    assert twin[0][0].weight.grad is not None
    assert model[0][0].weight.grad is None


@pytest.mark.parametrize("setting", ["Block", "sqrt"])
def test_a_model_that_is_dropped_is_freed_at_once(setting: str) -> None:
    """As plain modules are, whose weights a script that trains one model after another has no room for twice."""
    technique = ActivationCheckpointing(setting)
    gc.collect()
    gc.disable()
    try:
        model = Net(drop=0) if setting == "Block" else nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))
        technique.prepare(model)
        model(torch.randn(4, 8)).sum().backward()
        weights = [weakref.ref(weight) for weight in model.parameters()]
        del model
        assert not any(what.startswith("left alone") for what in technique.acted)
        assert technique.acted
        assert [weight() for weight in weights] == [None] * len(weights)
    finally:
        gc.enable()


def test_under_run(train: Train) -> None:
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for number in range(4):
            loss = model(torch.randn(2, 5, 8), mask=torch.zeros(5, 5)).pow(3).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
        torch.save({"losses": losses, "model": model.state_dict()}, "left.pt")
    """
    plain, changed = train(script), train(script, activation_checkpointing="TransformerEncoderLayer")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    assert changed.installed == {"activation_checkpointing": "3 x block"}


def test_never_tried_by_itself_and_settings_are_checked() -> None:
    technique = CATALOGUE["activation_checkpointing"]
    answer = technique.settings(evidence_of())
    assert isinstance(answer, Refusal)
    assert "costs time" in answer.reason
    for right in (True, 1, 5, "sqrt", "Block", "Block,Other", "Block, Other", "blocks.0", "blocks.0-5, tail.9"):
        assert technique.check(right) == ""
    for setting in (0, -1, 1.0, "", "a b", "Block,", {"a": 1}, "blocks.", "blocks.3-1", "blocks.0-x"):
        assert "names of classes" in technique.check(setting)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_number_takes_the_first_blocks(count: int) -> None:
    plain, kept, _ = trained()
    changed, kept_less, run = trained(activation_checkpointing=count)
    assert identical(plain, changed)
    assert run.installed()["activation_checkpointing"] == ("block" if count == 1 else f"{min(count, 3)} x block")
    every = trained(activation_checkpointing=True)[1]
    assert kept_less < kept * (1 - 0.8 * min(count, 3) / 3)
    assert (kept_less < every * 1.01) is (count >= 3)  # a step counter of 8 bytes may fall inside or outside


def test_a_path_that_a_model_does_not_have_is_said() -> None:
    run = Run(build({"activation_checkpointing": "blocks.1-4"}, CATALOGUE))
    run.model(Net(), ())
    run.model(nn.Linear(8, 8), ())  # another model, of which the plan does not speak
    assert run.left_alone() == ["activation_checkpointing left alone: Net has no blocks.3"]
    assert run.installed()["activation_checkpointing"].endswith("2 x block")


class Uneven(nn.Module):
    """Blocks of 8 and 2 pairs of layers, called in another order than they are listed, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*[nn.Linear(8, 8), nn.Tanh()] * count) for count in (8, 2, 2))

    def forward(self, x: Any) -> Any:
        return self.blocks[0](self.blocks[2](self.blocks[2](self.blocks[1](x))))


def test_what_each_block_saves_and_costs_is_measured_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    [technique] = build({"activation_checkpointing": True}, CATALOGUE)
    assert isinstance(technique, ActivationCheckpointing)
    technique.measure()
    model = Uneven()
    run = Run([technique])
    run.model(model, ())
    for _ in range(5):
        model(torch.randn(ROWS, 8)).sum().backward()
    large, small, twice = technique.measured()
    assert [one.path for one in (large, small, twice)] == ["blocks.0", "blocks.1", "blocks.2"]
    assert small.order < twice.order < large.order
    one = ROWS * 8 * 4  # bytes: each tanh keeps what it returns, but for the last, which the next block holds
    assert (large.bytes, small.bytes, twice.bytes) == (7 * one, one, 2 * one)
    assert large.seconds > 0
    assert technique.check(as_setting([large, small, twice], {0, 2}, 3)) == ""
    assert build({"activation_checkpointing": True}, CATALOGUE)[0].measured() == []


def layers(depth: int, width: int = 16) -> list[nn.Module]:
    """What a script lists in a Sequential: the same kinds over and over, some of them in place."""
    parts = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(0.1))]
    return [copy.deepcopy(layer) for _ in range(depth) for layer in parts[0]]


def trained_sequential(model: nn.Module, plan: dict[str, Any], width: int = 16) -> tuple[dict[str, Any], int, Run]:
    """What a training of a Sequential leaves, how many bytes its last forward kept, and the run."""
    torch.manual_seed(1)
    run = Run(build(plan, CATALOGUE))
    run.model(model, ())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = 0
    for number in range(3):
        x = torch.randn(200, width)
        with torch.profiler.profile(profile_memory=True) if number == 2 else contextlib.nullcontext() as profiler:
            loss = model(x).square().mean()
        if profiler is not None:
            kept = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict(), kept, run


@pytest.mark.parametrize("setting", [True, "sqrt"])
def test_a_long_sequential_without_blocks_is_cut_into_pieces(setting: Any, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers(8), nn.Linear(16, 1))
    twin = copy.deepcopy(model)
    names = list(model.state_dict())
    plain, kept, _ = trained_sequential(model, {})
    changed, kept_less, run = trained_sequential(twin, {"activation_checkpointing": setting})
    assert identical(plain, changed)
    assert list(changed) == names
    assert run.installed() == {"activation_checkpointing": "sequence in pieces"}
    assert kept_less < kept / 2
    assert "activations are kept" not in capfd.readouterr().err
    again = copy.deepcopy(twin)
    assert vars(again)["forward"].owner is again
    file = io.BytesIO()
    torch.save(twin, file)
    assert b"hasten." not in file.getvalue()


def test_a_sequential_that_a_script_changes_later_is_cut_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers(4))
    run = Run(build({"activation_checkpointing": "sqrt"}, CATALOGUE))
    run.model(model, ())
    model(torch.randn(8, 16)).sum().backward()
    model.append(nn.Linear(16, 3))
    model[0] = nn.Linear(16, 16)
    output = model(torch.randn(8, 16))
    assert output.shape == (8, 3)
    output.sum().backward()
    assert model[0].weight.grad is not None
    assert model[-1].weight.grad is not None


@pytest.mark.parametrize("depth", [4, 5, 8, 17, 64, 128])
def test_there_are_about_sqrt_n_pieces_and_none_begins_in_place(depth: int) -> None:
    begins = cuts([nn.Linear(1, 1)] * depth)
    sizes = [end - begin for begin, end in zip(begins, [*begins[1:], depth], strict=True)]
    assert sum(sizes) == depth
    assert max(sizes) <= math.ceil(math.sqrt(depth)) + 1
    assert len(sizes) <= math.ceil(math.sqrt(depth)) + 1
    entries = layers(depth)
    assert not any(getattr(entries[place], "inplace", False) for place in cuts(entries))


class Trained(hasten.Module):
    """A net under the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_under_the_trainer_from_the_first_step_on(capfd: pytest.CaptureFixture[str]) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), 8)
    trainer = hasten.Trainer(
        activation_checkpointing="Block", max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu"
    )
    trainer.fit(Trained(), data)
    assert "activations are kept" not in capfd.readouterr().err
    assert trainer.engine.outermost == ["net"]  # not the layers of a block that runs again within the first step
