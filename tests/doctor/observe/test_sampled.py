"""Steps that are looked into: layers, operators, attention by hand, a trace; the script does what it always does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.evidence import Evidence
from tests.doctor.observe.sampling import layer, sampled
from tests.taps.forks import forked
from tests.taps.scripts import Done

IMAGES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.group = nn.Conv2d(8, 8, 1, bias=False), nn.GroupNorm(2, 8)
        self.unused = nn.Linear(2, 2)
    def forward(self, x):
        return x + torch.relu(self.group(self.second(self.norm(self.conv(x)))))  # block
layers = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), Block(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 5)
model = nn.Sequential(*layers)
loader = DataLoader(TensorDataset(torch.randn(160, 3, 8, 8), torch.randint(0, 5, (160,))), 16, shuffle=True)
val = DataLoader(TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(0, 5, (32,))), 16)
optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()
for epoch in range(4):
    for x, y in loader:
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    model.eval()
    with torch.no_grad():
        print([criterion(model(x), y).item().hex() for x, y in val])
    model.train()
torch.save(model, "whole.pt")
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Done, Evidence, Path]:
    """A CNN as a person runs it, and while it is looked into."""
    folder = tmp_path_factory.mktemp("images")
    done, evidence = sampled(folder, IMAGES, trace=str(folder / "trace.json"))
    return forked(folder, "train.py"), done, evidence, folder


def test_nothing_else_changes(images: tuple[Done, Done, Evidence, Path]) -> None:
    """Losses to the last bit with dropout and shuffling, and not a word more is printed."""
    expected, done, evidence, _ = images
    assert expected.code == 0, expected.err
    assert done == expected
    assert evidence.flags.profiler == ""
    assert not [event for event in evidence.events if event.kind == "profiler"]


def test_layers_are_seen(images: tuple[Done, Done, Evidence, Path]) -> None:
    """In order of their calls, with sizes, shapes, and what takes a bias away again."""
    _, _, evidence, folder = images
    order = ["0", "1", "2.conv", "2.norm", "2.second", "2.group", "3", "4", "5"]
    assert [one.path for one in evidence.layers] == order
    conv = layer(evidence, "2.conv")
    assert (conv.kind, conv.bias, conv.shape, conv.dtype) == ("Conv2d", True, (16, 8, 6, 6), "float32")
    assert conv.sizes.items() >= {"in_channels": 8, "out_channels": 8, "groups": 1, "padding": 1}.items()
    assert conv.normed_by == "2.norm (BatchNorm2d)"
    assert conv.where.startswith(f"{folder / 'train.py'}:")
    assert (conv.calls, conv.seconds > 0) == (1, True)
    assert layer(evidence, "0").normed_by == "1 (InstanceNorm2d)"
    assert layer(evidence, "2.second").normed_by == ""
    assert layer(evidence, "5").sizes == {"in_features": 288, "out_features": 5}


def test_steps_looked_into_do_not_count(images: tuple[Done, Done, Evidence, Path]) -> None:
    """They are named, and so is the one into which the end of a look falls."""
    _, _, evidence, _ = images
    assert evidence.sampled is not None
    assert evidence.sampled.skipped == ""
    assert set(evidence.sampled.steps) <= set(evidence.disturbed)
    assert 3 <= len([step for step in evidence.sampled.steps if step >= 10]) <= 6
    assert max(evidence.sampled.steps) + 1 in evidence.disturbed
    assert not set(evidence.disturbed) & set(evidence.steady())


def test_operators_are_counted(images: tuple[Done, Done, Evidence, Path]) -> None:
    """Per step and in training steps alone: the validation between two epochs is none."""
    _, _, evidence, _ = images
    assert evidence.sampled is not None
    operators = {one.name: one for one in evidence.sampled.operators}
    backward = operators["aten::convolution_backward"]
    assert backward.calls == pytest.approx(3)
    assert "aten::stack" not in operators  # the loader's
    assert "[16, 8, 6, 6]" in backward.shapes
    assert backward.seconds > 0
    assert all(a.seconds >= b.seconds for a, b in zip(evidence.sampled.operators, evidence.sampled.operators[1:]))
    # relu, the sum behind it, dropout (mask and product); backward: relu's and dropout's and of the sum nothing
    assert 4 <= evidence.sampled.pointwise_calls <= 9
    assert evidence.sampled.pointwise_seconds > 0
    assert 20 < evidence.sampled.calls < 200
    assert (evidence.sampled.launches, evidence.sampled.device_busy) == (None, None)


def test_the_trace_shows_steps_and_their_parts(images: tuple[Done, Done, Evidence, Path]) -> None:
    """A whole Chrome trace, with operators inside the parts of steps."""
    _, _, evidence, folder = images
    assert evidence.sampled is not None
    assert evidence.sampled.trace == str(folder / "trace.json")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    ours = [event for event in events if event.get("cat") == "hasten"]
    assert {"data", "forward", "backward", "optimizer"} <= {event["name"] for event in ours}
    assert f"step {evidence.sampled.steps[-1]}" in {event["name"] for event in ours}
    forward = next(event for event in ours if event["name"] == "forward")
    inside = [
        event["name"]
        for event in events
        if event.get("cat") == "cpu_op" and forward["ts"] <= event["ts"] < forward["ts"] + forward["dur"]
    ]
    assert inside.count("aten::conv2d") == 3
    assert not list(folder.glob(".trace*"))


GPT = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(1)
class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
    def forward(self, x):
        q, k, v = (part.view(4, 16, 2, 16).transpose(1, 2) for part in self.qkv(x).split(32, 2))
        weights = F.softmax(q @ k.transpose(-2, -1) / 4, dim=-1)  # here
        return self.out((F.dropout(weights, 0.1) @ v).transpose(1, 2).reshape(4, 16, 32))
model = nn.Sequential(nn.Embedding(50, 32), Attend(), nn.LayerNorm(32), Attend(), nn.Linear(32, 50))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(25):
    x = torch.randint(0, 50, (4, 16))
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


def test_attention_by_hand(tmp_path: Path) -> None:
    """Softmax between two matrix products, in a training without a DataLoader."""
    done, evidence = sampled(tmp_path, GPT)
    assert done == forked(tmp_path, "train.py")
    assert evidence.step_of == "optimizer"
    (attention,) = (event for event in evidence.events if event.kind == "attention")
    line = next(n for n, text in enumerate((tmp_path / "train.py").read_text().splitlines(), 1) if "# here" in text)
    assert attention.where == f"{tmp_path / 'train.py'}:{line}"
    assert attention.detail == "4 x 2 x 16 x 16 in 1"
    assert attention.count == 2 * attention.steps > 0
    assert attention.seconds > 0
    assert not evidence.flags.attention
    assert layer(evidence, "0").sizes == {"num_embeddings": 50, "embedding_dim": 32}
    assert layer(evidence, "0").dtype == "int64"
    assert evidence.sampled is not None
    assert len(evidence.sampled.steps) >= 6
    assert evidence.inputs is not None
    assert evidence.inputs.shapes == (((4, 16), 4),)  # of what the model was called with in the steps looked into
    assert (evidence.inputs.dtype, evidence.inputs.padding) == ("int64", pytest.approx(0, abs=0.02))


def test_attention_by_torch_and_an_lstm(tmp_path: Path) -> None:
    """scaled_dot_product_attention is what one should use, though it computes the same; passes are short here."""
    _, evidence = sampled(
        tmp_path,
        """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 16, 2, batch_first=True), nn.Linear(16, 3)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
    def forward(self, x):
        y = self.lstm(x)[0]
        return self.out(self.attend(query=y, key=y, value=y, need_weights=False)[0].mean(1))
model = Model()
loader = DataLoader(TensorDataset(torch.randn(32, 9, 6)), 8, num_workers=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if __name__ == "__main__":
    for epoch in range(5):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
""",
    )
    assert evidence.flags.attention
    assert not [event for event in evidence.events if event.kind == "attention"]
    assert layer(evidence, "lstm").sizes == {"input_size": 6, "hidden_size": 16, "num_layers": 2}
    attend = layer(evidence, "attend")
    assert (attend.sizes, attend.bias, attend.shape) == ({"num_heads": 2, "embed_dim": 16}, True, (8, 9, 16))
    assert evidence.sampled is not None
    assert evidence.sampled.skipped == ""
    assert evidence.sampled.operators
    assert evidence.steps == 20


COMPILED = """
import torch
from torch import nn
torch.manual_seed(1)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)
    def forward(self, x):
        h = self.body(x)
        if h.sum() > -1e9:  # break
            h = h * 2
        return self.head(h)
model = torch.compile(Model(), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    loss = model(torch.randn(4 + 2 * (step == 1), 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
from torch._dynamo.utils import counters, get_compilation_metrics
print({name: sorted(counters[name].values()) for name in ("frames", "stats", "graph_break", "unimplemented")})
print(sorted((m.co_name, str(m.recompile_reason)) for m in get_compilation_metrics() if m.co_name))
"""


@pytest.mark.slow  # compiles C++
def test_a_compiled_model(tmp_path: Path) -> None:
    """It is not compiled once more, nor in other pieces; what torch.compile says of itself is kept."""
    done, evidence = sampled(tmp_path, COMPILED)
    expected = forked(tmp_path, "train.py")
    assert expected.code == 0, expected.err
    assert done == expected
    assert evidence.sampled is not None
    assert evidence.sampled.skipped == ""
    lines = (tmp_path / "train.py").read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if "# break" in text)
    assert any(
        f"train.py:{number - 1}" in reason or f"train.py:{number}" in reason for reason in evidence.sampled.graph_breaks
    ), evidence.sampled.graph_breaks
    assert any("size mismatch" in reason for reason in evidence.sampled.recompilations)
    assert all("train.py:" in reason for reason in evidence.sampled.recompilations)
    first = next(one for one in evidence.layers if one.path.endswith("body.0"))
    assert first.normed_by.endswith("body.1 (BatchNorm1d)")
    assert first.sizes == {"in_features": 6, "out_features": 16}
    assert first.calls == 0


@pytest.mark.slow  # compiles C++
def test_a_model_that_is_compiled_while_it_is_looked_into(tmp_path: Path) -> None:
    """The hooks are gone before torch.compile looks at it; what is compiled first, and how, is as without hasten."""
    text = COMPILED.replace('torch.compile(Model(), backend="eager")', "Model()").replace(
        "    loss =", '    if step == 14:\n        model = torch.compile(model, backend="eager")\n    loss ='
    )
    assert "step == 14" in text
    done, evidence = sampled(tmp_path, text)
    assert done == forked(tmp_path, "train.py")
    assert layer(evidence, "body.0").normed_by == "body.1 (BatchNorm1d)"
    assert layer(evidence, "body.0").calls > 0


SHORT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    {then}
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_ends_soon(tmp_path: Path) -> None:
    """Five steps: there is something of everything."""
    done, evidence = sampled(tmp_path, SHORT.format(steps=5, then="pass"), trace=str(tmp_path / "none" / "trace.json"))
    assert done == Done(0, "", "")
    assert evidence.sampled is not None
    assert "the trace could not be written" in evidence.sampled.skipped
    assert len(evidence.layers) == 3
    assert "aten::addmm" in {one.name for one in evidence.sampled.operators}
    assert set(evidence.sampled.steps) <= set(evidence.disturbed)
    assert 4 not in evidence.sampled.steps


def test_a_script_that_fails_while_it_is_looked_into(tmp_path: Path) -> None:
    """In step 17, which is profiled: it fails as it would, and what was seen so far is kept."""
    done, evidence = sampled(tmp_path, SHORT.format(steps=40, then="assert step < 17"), forks=False)
    assert done.code == 1
    assert done.err.splitlines()[-1] == "AssertionError"
    assert done.err.count("File ") == 1  # the script's own, none of hasten's
    assert evidence.ended == "failed"
    assert evidence.sampled is not None
    assert len(evidence.layers) == 3
    assert "aten::addmm" in {one.name for one in evidence.sampled.operators}


def test_a_script_that_profiles_itself(tmp_path: Path) -> None:
    """Its profiler starts in the middle of a step that hasten profiles, and sees what it would."""
    text = SHORT.format(
        steps=40,
        then="""
    if step == 17:
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.start()
    if step == 19:
        profiler.stop()
        print(*(f"{one.count} of {one.key}" for one in profiler.key_averages() if one.key == "aten::addmm"))
    """,
    )
    done, evidence = sampled(tmp_path, text)
    assert done.code == 0, done.err
    assert done.out == "4 of aten::addmm\n"
    assert evidence.sampled is not None
    assert evidence.sampled.skipped == "the script profiles itself"
    assert evidence.sampled.operators
    assert len(evidence.layers) == 3
