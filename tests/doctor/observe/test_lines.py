"""Where the training thread is, line by line; and gradients that nobody uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.doctor.observe import OBSERVERS
from hasten.evidence import Evidence, read_evidence
from hasten.taps.config import DoctorOptions, RunConfig
from tests.doctor.observe.listening import HEAD, at, observed
from tests.taps.forks import forked
from tests.taps.scripts import Done, write

BUSY = """
import threading, time
assert "hasten-lines" not in [thread.name for thread in threading.enumerate()]
def busy(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:  # busy
        pass
class Slow(nn.Module):
    def forward(self, x):
        if not self.training:
            time.sleep(0.02)  # validating
        return x
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 25
    def __getitem__(self, index):
        time.sleep(0.02)  # loading
        return data[index]
model = nn.Sequential(model, Slow())
for x, y in DataLoader(Rows(), batch_size=1):
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    busy(0.03)
    time.sleep(0.02)  # in the loop
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    busy(0.0)
print([p.double().sum().item() for p in model.parameters()])
"""


def looked_at(folder: Path, text: str, sample: bool = True) -> tuple[Done, Evidence]:
    """As `observed`, with the looks that `--no-sample` leaves out."""
    write(folder, "train.py", text)
    path = folder / "evidence.json"
    options = DoctorOptions(steps=0, seconds=0, sample=sample, observers=OBSERVERS)
    config = RunConfig(evidence=str(path), command=("train.py",), doctor=options)
    done = forked(folder, "train.py", config=config)
    assert done.code == 0, done.err
    evidence = read_evidence(path)
    assert evidence.skipped == ()
    return done, evidence


def test_lines_of_each_phase(tmp_path: Path) -> None:
    done, evidence = looked_at(tmp_path, HEAD + BUSY)
    assert done == forked(tmp_path, "train.py")
    seen = {(line.where, line.phase): line for line in evidence.lines}
    for mark, phase in (
        ("busy", "other"),
        ("in the loop", "other"),
        ("validating", "validation"),
        ("loading", "data"),
    ):
        assert seen[at(tmp_path, mark), phase].share > 0.05, mark
    busy = seen[at(tmp_path, "busy"), "other"]
    assert (busy.function, busy.in_loop) == ("busy", False)
    assert busy.looks > 5
    assert seen[at(tmp_path, "in the loop"), "other"].function == ""
    assert sum(line.share for line in evidence.lines) == pytest.approx(1.0)


def test_nobody_looks_without_samples(tmp_path: Path) -> None:
    _, evidence = looked_at(tmp_path, HEAD + BUSY.replace("0.0", "0.000"), sample=False)
    assert evidence.lines == ()


def test_a_forward_is_a_forward_also_where_the_clock_rests(tmp_path: Path) -> None:
    script = """
class Net(nn.Module):
    def forward(self, x):
        for _ in range(20):
            x = torch.tanh(x)
        return model(x)
net = Net()
net.model = model
for epoch in range(50):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
"""
    _, evidence = looked_at(tmp_path, HEAD + script)
    assert evidence.every > 1
    inside = [line for line in evidence.lines if line.function == "Net.forward"]
    assert sum(line.looks for line in inside) > 10
    assert {line.phase for line in inside} == {"forward"}


FREEZING = """
backbone, head = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 3)
by_hand = nn.Linear(3, 3)
model = nn.Sequential(backbone, head, by_hand)
backbone.eval()
{freeze}
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        for p in by_hand.parameters():
            p -= 0.1 * p.grad
"""


@pytest.mark.parametrize(
    ("freeze", "strays"),
    [
        ("", ("0.0", "0.2")),
        # slow: a doctor's run each; the others show the same place of the code
        pytest.param("backbone.requires_grad_(False)", (), marks=pytest.mark.slow),
        ("backbone[0].requires_grad_(False)", ("0.2",)),
        pytest.param("model = torch.compile(model, backend='eager')", ("0.0", "0.2"), marks=pytest.mark.slow),
    ],
)
def test_layers_whose_gradients_nobody_uses(tmp_path: Path, freeze: str, strays: tuple[str, ...]) -> None:
    """Those that are moved by hand are used."""
    _, evidence = observed(tmp_path, HEAD + FREEZING.format(freeze=freeze))
    assert evidence.strays == strays
