"""`hasten fix`: what is changed and what is not; what a fixed script computes."""

# ruff: noqa: E501 -- rows of a table
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.doctor.findings import IN_CODE
from hasten.doctor.lint.fix import apply_fixes
from hasten.doctor.source.read import Text
from tests.doctor.lint.scripts import HEAD, fixed, script, training
from tests.doctor.lint.test_rules import PLANTED, SILENT

# Rule, before, after: a line each, as it stands in the code.
LINES = [
    ("retained_graph", training("losses.append(loss)  # kept", before="losses = []"), "losses.append(loss)", "losses.append(loss.detach())"),
    ("retained_graph", training("total += loss", before="total = 0"), "total += loss", "total += loss.detach()"),
    ("retained_graph", training("total += loss * 2", before="total = 0"), "total += loss * 2", "total += (loss * 2).detach()"),
    ("moved_from_cpu", training("z = torch.zeros(3).to(device)"), "torch.zeros(3).to(device)", "torch.zeros(3, device=device)"),
    ("moved_from_cpu", training("z = torch.ones( 3 ).cuda()"), "torch.ones( 3 ).cuda()", 'torch.ones( 3, device="cuda" )'),
    ("moved_from_cpu", training("z = torch.eye(3,).to(device)"), "torch.eye(3,).to(device)", "torch.eye(3,device=device,)"),
    ("tensor_copy", training("z = torch.tensor(x)"), "torch.tensor(x)", "x.detach().clone()"),
    ("tensor_copy", training("z = torch.tensor(np.stack([a, b]))"), "torch.tensor(np", "torch.as_tensor(np"),
    ("zeroed_gradients", training("optimizer.zero_grad(set_to_none=False)"), "(set_to_none=False)", "()"),
    ("bias_before_norm", script("n = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))"), "Linear(3, 4)", "Linear(3, 4, bias=False)"),
    (
        "bias_before_norm",
        script("n = nn.Sequential(nn.Linear(3, 4, bias=True), nn.BatchNorm1d(4))"),
        "bias=True",
        "bias=False",
    ),
    (
        "workers_recreated",
        script("train_loader = DataLoader(Files(), num_workers=4)") + training("", loader="train_loader"),
        "num_workers=4)",
        "num_workers=4, persistent_workers=True)",
    ),
    (
        "validation_graphs",
        script("def validate(model, loader):\n    for x, y in loader:\n        model(x)\n"),
        "def validate",
        "@torch.no_grad()\ndef validate",
    ),
    (
        "validation_graphs",
        training("", after="# look\nmodel.eval()\n\n# each\nfor x in val_loader:\n    model(x)  # here"),
        "    # each\n    for x in val_loader:\n        model(x)  # here",
        "    # each\n    with torch.no_grad():\n        for x in val_loader:\n            model(x)  # here",
    ),
    (
        "blocking_copy",
        script("train_loader = DataLoader(Files(), pin_memory=True)\nfor a, b in train_loader:\n    a = a.to(device)\n    b = b.cuda()"),
        "a.to(device)\n    b = b.cuda()",
        "a.to(device, non_blocking=True)\n    b = b.cuda(non_blocking=True)",
    ),
    (
        "host_sync",
        training("s += loss.item()", before="n, s = 0, 0.0", after="a, b = s, n"),
        "s += loss.item()\n    a, b = s, n",
        "s += loss.detach()\n    a, b = float(s), n",
    ),
    (
        "host_sync",
        training("running += loss.item() * x.size(0)", before="running = 0.0", after="print(f'{running / 2:.3f}')"),
        "running += loss.item() * x.size(0)\n    print(f'{running / 2:.3f}')",
        "running += loss.detach() * x.size(0)\n    print(f'{float(running) / 2:.3f}')",
    ),
]  # fmt: skip

# Rule, code that must stay as it is, a word of the reason.
ALONE = [
    ("host_sync", training("values.append(loss.item())"), "right there"),
    ("host_sync", training("running += loss.item()\nbar(running)", before="running = 0.0"), "every step"),
    ("host_sync", training("self.total += loss.item()"), "elsewhere"),
    ("host_sync", training("s += loss.item()\ns += 3", before="s = 0.0"), "one loss"),
    ("host_sync", training("s += (out.argmax(1) == y).sum().item()", before="s = 0"), "one loss"),
    ("host_sync", training("s += loss.item()", before="s = start()"), "other values"),
    ("host_sync", script("def f():\n    return s") + training("s += loss.item()", before="s = 0.0"), "global"),
    ("host_sync", script("model.half()") + training("s += loss.item()", before="s = 0.0"), "precisions"),
    ("retained_graph", training("losses.append((i, loss))", before="losses = []"), "larger"),
    ("moved_from_cpu", training("z = torch.randn(3).to(device)"), "random"),
    ("moved_from_cpu", training("z = torch.linspace(0, 1, 3).to(device)"), "round"),
    ("validation_graphs", script("def predict(x):\n    for part in x:\n        model(part)\n"), "another file"),
    ("tensor_copy", training("z = torch.tensor(self.data.numpy())\nz = torch.tensor(np.asarray(a))"), "somebody"),
    ("bias_before_norm", script("n = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))\nn[0].bias.zero_()"), "biases"),
    (
        "bias_before_norm",
        script("n = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))\nn.load_state_dict(torch.load('a'))"),
        "checkpoints",
    ),
    (
        "blocking_copy",
        script("train_loader = DataLoader(Files(), pin_memory=True)\nfor batch in train_loader:\n    b = batch.to(device)"),
        "one object",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "old", "new"), LINES, ids=[f"{row[0]}-{i}" for i, row in enumerate(LINES)])
def test_only_the_line_in_question_changes(name: str, code: str, old: str, new: str, tmp_path: Path) -> None:
    assert code.count(old) == 1
    result = fixed(tmp_path, code, name)
    assert result.after == code.replace(old, new)
    assert {rule for _, rule in result.applied} == {name}


@pytest.mark.parametrize(("name", "code", "reason"), ALONE, ids=[f"{row[0]}-{i}" for i, row in enumerate(ALONE)])
def test_what_is_not_surely_safe_is_left_alone_and_said(name: str, code: str, reason: str, tmp_path: Path) -> None:
    result = fixed(tmp_path, code, name)
    assert result.after == code
    assert any(rule == name and reason in why for _, rule, why in result.skipped), result.skipped


@pytest.mark.parametrize(
    "comment", ["# hasten: ignore", "# hasten: ignore[retained_graph]", "# x  # hasten: ignore[a, retained_graph]"]
)
def test_code_under_an_ignore_comment_is_never_touched(comment: str, tmp_path: Path) -> None:
    for line in (f"total += loss  {comment}", f"total += foo(  {comment}\n    loss)".replace("foo", "")):
        assert fixed(tmp_path, training(line, before="total = 0"), "retained_graph").applied == []


def test_an_ignored_reading_place_keeps_the_whole_change_away(tmp_path: Path) -> None:
    code = training("s += loss.item()", before="s = 0.0", after="print(s)  # hasten: ignore[host_sync]")
    result = fixed(tmp_path, code, "host_sync")
    assert result.after == code
    assert "ignore comment" in result.skipped[0][2]


ROWS = st.lists(
    st.sampled_from([code[len(HEAD) :] for _, code in (*PLANTED, *SILENT) if code.startswith(HEAD)]),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25)
@given(ROWS, st.sampled_from(["\n", "\r\n"]), st.sampled_from(["    ", "\t", "  "]), st.booleans())
def test_fixed_code_parses_and_needs_no_second_fix(rows: list[str], newline: str, indent: str, end: bool) -> None:
    code = HEAD + "\n".join(rows).replace("# HERE", "# é")
    code = code.replace("    ", indent).rstrip("\n") + ("\n" if end else "")
    text = Text(Path("train.py"), code.replace("\n", newline), "utf-8")
    result = apply_fixes(text)
    compile(result.after, "train.py", "exec")
    assert apply_fixes(Text(text.path, result.after, "utf-8")).after == result.after
    if newline == "\r\n":
        assert result.after.count("\n") == result.after.count("\r\n")
    touched = {line for line in result.diff("t").splitlines() if line.startswith("-") and not line.startswith("---")}
    untouched = [line for line in text.text.splitlines() if f"-{line}" not in touched]
    fixed_lines = iter(result.after.splitlines())
    assert all(line in fixed_lines for line in untouched)  # all there, in order


TRAINED = """
import sys
import torch
from torch import nn
import torch.nn.functional as F

device = torch.device("cpu")  # as with "cuda"
torch.manual_seed(0)
data = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(20)]


def validate(model, loader):
    model.eval()
    total = 0.0
    for x, y in loader:
        total += F.cross_entropy(model(x.to(device)), y).item()
    model.train()
    return total / len(loader)


def train(model, optimizer, loader):
    history, mean = [], 0
    losses = []
    for epoch in range(3):
        running = 0.0
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(x), y) + torch.zeros(1).to(device).sum()
            loss.backward()
            optimizer.step()
            running += loss.item() * x.size(0)
            mean += loss
            losses.append(loss)
            if i % 10 == 9:
                print(f"{epoch} {i} {running / (i + 1):.4f}")
        history.append(running / len(loader))
    return [*history, float(mean), float(sum(losses))]


model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(*(f"{value:.4f}" for value in train(model, optimizer, data)))
print(f"{validate(model, data):.5f}")
"""


def test_a_fixed_script_computes_the_same(tmp_path: Path) -> None:
    result = fixed(tmp_path, TRAINED)
    rules = {rule for _, rule in result.applied}
    assert rules == {"host_sync", "retained_graph", "zeroed_gradients", "moved_from_cpu", "validation_graphs"}
    (tmp_path / "fixed.py").write_text(result.after)
    runs = [
        subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        for name in ("train.py", "fixed.py")
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[1].returncode == 0, runs[1].stderr
    assert len(runs[0].stdout.splitlines()) == 8
    assert runs[1].stdout == runs[0].stdout


def test_every_rule_may_be_fixed_by_itself(tmp_path: Path) -> None:
    code = TRAINED
    for name in IN_CODE:
        assert {rule for _, rule in fixed(tmp_path, code, name).applied} <= {name}
