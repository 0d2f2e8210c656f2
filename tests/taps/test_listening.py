"""`hasten run --no-plan --evidence`: what was heard is what happened, and nothing else changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.evidence import Phase
from tests.taps.forks import listened_in_fork
from tests.taps.heard import HEAD, heard
from tests.taps.scripts import Done, listened, plain, write


def test_an_ordinary_training(tmp_path: Path) -> None:
    """Two loaders, validation after each epoch and inside it, dropout, gradient clipping, a scheduler."""
    evidence, said = heard(
        tmp_path,
        """
data = TensorDataset(torch.randn(130, 6), torch.randint(0, 3, (130,)))
train = DataLoader(data, batch_size=16, shuffle=True)
val = DataLoader(data, batch_size=50)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
batches, validations = 0, []
def validate():
    model.eval()
    with torch.no_grad():
        losses = [criterion(model(x), y).item() for x, y in val]
    model.train()
    validations.append([batches, sum(losses) / len(losses)])
for epoch in range(3):
    for x, y in train:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        told.append(loss.item())
        batches += 1
        if batches % 12 == 0:
            validate()
    scheduler.step()
    validate()
    torch.save(model.state_dict(), "last.pt")
tell(batches=batches, validations=validations, weights=digest(model))
""",
    )
    assert evidence.step_of == "batch"
    assert len(evidence.step_start) == said["batches"] == 27
    assert evidence.losses == pytest.approx(said["losses"], abs=1e-7)
    assert [loader.role for loader in evidence.loaders] == ["train", "validation"]
    train = evidence.train_loader
    assert train is not None
    assert (train.batches, train.samples, train.batch_size, train.dataset) == (9, 130, 16, "TensorDataset")
    assert train.where.startswith(str(tmp_path / "train.py:"))
    assert train.batch_bytes == 16 * (6 * 4 + 8)
    assert [(over.loader, over.batches) for over in evidence.passes if over.trained] == [(0, 9)] * 3
    # One inside the second epoch, one inside the third, three after.
    assert [over.batches for over in evidence.passes if not over.trained] == [3] * 5
    assert sum(step[Phase.VALIDATION] > 0 for step in evidence.step_phases) == 2
    (model,) = evidence.models
    assert (model.name, model.train_calls, model.eval_calls) == ("Sequential", 27, 15)
    assert model.layers == {"Linear": 2, "BatchNorm1d": 1, "ReLU": 1, "Dropout": 1}
    assert not model.backward_through_eval
    assert not model.compiled
    (optimizer,) = evidence.optimizers
    assert (optimizer.name, optimizer.steps, optimizer.parameters) == ("Adam", 27, 6)
    assert [one.loss for one in evidence.validations] == pytest.approx([v[1] for v in said["validations"]], rel=1e-5)
    assert [one.step for one in evidence.validations] == pytest.approx([v[0] for v in said["validations"]], abs=1)


def test_what_a_function_built_is_known_when_it_is_gone(tmp_path: Path) -> None:
    evidence, _ = heard(
        tmp_path,
        """
def main():
    loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=8)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for (rows,) in loader:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
main()
tell()
""",
    )
    assert [(model.name, model.train_calls, model.device) for model in evidence.models] == [("Linear", 6, "cpu")]
    assert [(one.name, one.steps, one.options["lr"]) for one in evidence.optimizers] == [("AdamW", 6, 0.25)]


def test_a_ctrl_c_that_nobody_handles_ends_the_script_as_ever(tmp_path: Path) -> None:
    """Python ends by the signal itself, whatever is done at its exit."""
    text = """
import os, signal, torch
torch.nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()
os.kill(os.getpid(), signal.SIGINT)
"""
    (tmp_path / "train.py").write_text(text)
    expected = plain(tmp_path, "train.py")
    done, _ = listened(tmp_path, "train.py")
    assert expected.code in (-2, 130)
    assert (done.code, done.err) == (expected.code, expected.err)


def test_two_models_two_optimizers(tmp_path: Path) -> None:
    """A GAN: two backwards and two optimizer steps a batch, one step each."""
    evidence, said = heard(
        tmp_path,
        """
loader = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=8)
maker, judge = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
by_maker, by_judge = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters(), 0.1)
loss = nn.BCEWithLogitsLoss()
for epoch in range(2):
    for (real,) in loader:
        fake = maker(torch.randn(8, 2))
        by_judge.zero_grad()
        a = loss(judge(real), torch.ones(8, 1)) + loss(judge(fake.detach()), torch.zeros(8, 1))
        a.backward()
        by_judge.step()
        by_maker.zero_grad()
        b = loss(judge(fake), torch.ones(8, 1))
        b.backward()
        by_maker.step()
        told.append(a.item() + b.item())
tell(weights=digest(maker, judge))
""",
    )
    assert len(evidence.step_start) == 12
    assert evidence.losses == pytest.approx(said["losses"], rel=1e-6)
    assert {model.name: model.train_calls for model in evidence.models} == {"Linear": 12, "Sequential": 36}
    assert {one.name: one.steps for one in evidence.optimizers} == {"Adam": 12, "SGD": 12}


def test_accumulated_gradients_and_an_endless_stream(tmp_path: Path) -> None:
    """A step is a batch, not an optimizer step; the stream is left by `break`."""
    evidence, said = heard(
        tmp_path,
        """
class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(5)
class Loader(DataLoader):  # as libraries do
    def __init__(self, dataset, size):
        super().__init__(dataset, batch_size=size)
        self.given = 0
    def __iter__(self):
        for batch in super().__iter__():
            self.given += 1
            yield batch * 2
loader = Loader(Stream(), 4)
model = nn.Linear(5, 1)
optimizer = torch.optim.AdamW(model.parameters())
for number, x in enumerate(loader):
    if number == 40:
        break
    loss = model(x).square().mean() / 4
    loss.backward()
    told.append(loss.item())
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
tell(weights=digest(model))
""",
    )
    assert len(evidence.step_start) == 40
    assert evidence.losses == pytest.approx(said["losses"], rel=1e-6)
    assert evidence.optimizers[0].steps == 10
    (loader,) = evidence.loaders
    assert loader.iterable
    assert loader.role == "train"
    assert loader.batches is None
    assert evidence.flags.zeroed_gradients.startswith(str(tmp_path / "train.py:"))


def test_workers_closures_scaled_losses_and_a_stateful_loader(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    evidence, said = heard(
        tmp_path,
        """
from torchdata.stateful_dataloader import StatefulDataLoader
data = TensorDataset(torch.randn(40, 5))
model = nn.Linear(5, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
calls = 0
stateful = StatefulDataLoader(data, 8), StatefulDataLoader(data, 8, num_workers=1)
for loader in (*stateful, DataLoader(data, 8, num_workers=2)):
    for (x,) in loader:
        def closure():
            global calls
            calls += 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss
        told.append(optimizer.step(closure).item())
    if hasattr(loader, "state_dict"):
        loader.load_state_dict(loader.state_dict())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
sgd = torch.optim.SGD(model.parameters(), lr=0.0)
for (x,) in DataLoader(data, 8):
    sgd.zero_grad()
    loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(sgd)
    scaler.update()
    told.append(loss.item())
tell(calls=calls, weights=digest(model))
""",
    )
    assert len(evidence.step_start) == 20
    assert [loader.role for loader in evidence.loaders] == ["train"] * 4
    assert [loader.num_workers for loader in evidence.loaders] == [0, 1, 2, 0]
    assert evidence.losses == pytest.approx(said["losses"], rel=1e-6)
    assert evidence.flags.grad_scaler


def test_compiled_models_are_compiled_as_before(tmp_path: Path) -> None:
    """The same graphs, no more breaks, no more compilations; losses, eval mode and all."""
    evidence, said = heard(
        tmp_path,
        """
import torch._dynamo
from torch._dynamo.utils import counters
def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
wrapped, in_place, explained = torch.compile(net(), backend="eager"), net(), net()
in_place.compile(backend="eager")
stepped = net()
@torch.compile(backend="eager")
def loss_of(x, y):
    return nn.functional.cross_entropy(stepped(x), y)
loader = DataLoader(TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,))), batch_size=8)
criterion = nn.CrossEntropyLoss()
found = []
for kind in ("wrapped", "in_place", "stepped"):
    counters.clear()
    model = globals()[kind]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(x, y) if kind == "stepped" else criterion(model(x), y)
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                loss_of(x, y) if kind == "stepped" else criterion(model(x), y)
    breaks = sum(counters["graph_break"].values())
    found.append([kind, counters["stats"]["unique_graphs"], breaks, len(counters["recompiles"])])
report = torch._dynamo.explain(explained)(torch.randn(2, 6))
weights = digest(wrapped, in_place, stepped)
tell(found=found, breaks=report.graph_break_count, graphs=report.graph_count, weights=weights)
""",
    )
    assert said["breaks"] == 0
    assert said["graphs"] == 1
    assert [breaks for _, _, breaks, _ in said["found"]] == [0, 0, 0]
    assert len(evidence.step_start) == 48
    assert evidence.losses == pytest.approx(said["losses"], rel=1e-5)
    assert [model.compiled for model in evidence.models if model.train_calls][:2] == [True, True]


def test_torch_may_be_looked_for_before_it_is_imported(tmp_path: Path) -> None:
    """Libraries ask `find_spec("torch")` to learn whether it is there; the taps still come with the import."""
    text = (
        "import importlib.util, json\nassert importlib.util.find_spec('torch')\n"
        "assert importlib.util.find_spec('torch.nn')\n"
        + HEAD
        + """
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(8, 2)), 2):
    model(x).sum().backward()
    optimizer.step()
"""
    )
    (tmp_path / "train.py").write_text(text)
    done, evidence = listened(tmp_path, "train.py")
    assert done == Done(0, "", "")
    assert len(evidence.step_start) == 4


def test_evidence_of_a_script_that_was_stopped(tmp_path: Path) -> None:
    """What was heard until `sys.exit` inside the loop is kept."""
    write(
        tmp_path,
        "train.py",
        """
        import sys, torch
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Linear(2, 1)
        for i, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(8, 2)), 1)):
            if i == 5:
                sys.exit(3)
            model(x).sum().backward()
        """,
    )
    done, evidence = listened_in_fork(tmp_path, "train.py")
    assert done.code == 3
    assert len(evidence.step_start) == 5
