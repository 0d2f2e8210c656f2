"""Graphs that are kept, and those that only look so; memory over time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.observe.listening import HEAD, at, event, kinds, observed
from tests.taps.forks import forked

KEEPING = {
    "appended": ("kept = []", "kept.append(loss)", ""),
    "summed": ("total = 0", "total += loss", ""),
    "summed_before": ("total = 0", "", "total = total + loss"),
    "in_a_function": ("kept = []", "kept.append({'loss': loss})", ""),
    "every_sixteenth": ("kept = []", "kept.append(loss) if step % 16 == 0 else None", ""),
}
LETTING_GO = {
    "numbers": ("kept = []", "kept.append(loss.item())", ""),
    "detached": ("kept, total = [], 0", "kept.append(loss.detach()); total += loss.detach()", ""),
    "the_last": ("last = None", "last = loss", ""),
    "the_best": ("best = None", "best = loss if best is None or loss < best else best", ""),
    "per_epoch": ("kept = []", "kept.append(loss) if step == 39 else None", ""),
    "cycles": ("class Box: pass", "box = Box(); box.me, box.loss = box, loss", ""),
}
LOOP = """
def {name}():
    {before}
    step = 0
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            {between}
            loss.backward()  # {name}
            optimizer.step()
            {after}
            step += 1
{name}()
"""
TELL = "\nprint([p.double().sum().item() for p in model.parameters()])\n"


def loops(cases: dict[str, tuple[str, str, str]]) -> str:
    """A script that trains in several ways, one after the other."""
    several = (
        LOOP.format(name=name, before=before, after=after, between=between or "pass")
        for name, (before, after, between) in cases.items()
    )
    return HEAD + "".join(several) + TELL


def test_kept_graphs_are_counted_at_their_backward(tmp_path: Path) -> None:
    done, evidence = observed(tmp_path, loops(KEEPING))
    for name in KEEPING:
        kept = event(evidence, "retained_graph", at(tmp_path, name))
        alive, of = map(int, kept.detail.split(" of "))
        assert kept.count == alive >= 3, name
        assert alive == of if name != "every_sixteenth" else alive < of, name
    assert done == forked(tmp_path, "train.py")


def test_graphs_that_are_let_go_of(tmp_path: Path) -> None:
    _, evidence = observed(tmp_path, loops(LETTING_GO))
    assert evidence.steps == 80 * len(LETTING_GO)
    assert kinds(evidence)["retained_graph"] == 0


def test_accumulation_penalties_and_a_compiled_model(tmp_path: Path) -> None:
    """What keeps a graph for a while within a step; memory; retain_graph."""
    _, evidence = observed(
        tmp_path,
        HEAD
        + """
model = torch.compile(model, backend="aot_eager")
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / 4
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
kept, model = [], model._orig_mod
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward(retain_graph=True)  # retained
    loss.backward()  # again
    optimizer.step()
    kept.append(loss)
""",
    )
    assert kinds(evidence)["retained_graph"] == 1  # counted where the graph was gone through last
    assert event(evidence, "retained_graph", at(tmp_path, "again")).count >= 3
    assert kinds(evidence)["retain_graph"] == 1
    assert 20 <= event(evidence, "retain_graph", at(tmp_path, "retained")).count <= 60
    assert evidence.memory[0].rss > 1e7
    assert [point.step for point in evidence.memory] == sorted(point.step for point in evidence.memory)
    assert evidence.memory[-1].step == 80


def test_a_leak_that_begins_late_in_a_long_run(tmp_path: Path) -> None:
    """Where the clock rests in most steps, and few are watched."""
    steps = 2600
    _, evidence = observed(
        tmp_path,
        HEAD
        + f"""
x, y = data[:4]
leaked = []
for step in range({steps}):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward(retain_graph=True)  # kept
    optimizer.step()
    if step >= 1800:
        leaked.append(loss)
""",
    )
    assert evidence.every > 1
    kept = event(evidence, "retained_graph", at(tmp_path, "kept"))
    alive, of = map(int, kept.detail.split(" of "))
    assert 3 <= alive == kept.count < of
    assert event(evidence, "retain_graph", at(tmp_path, "kept")).count == pytest.approx(steps, rel=0.1)
