"""A tap that fails leaves the script as it was, and is named in the evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.taps.forks import forked, listened_in_fork
from tests.taps.scripts import LISTEN, execute, hastened, write

TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=3):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""

# What another release of torch might lack or have otherwise, and the tap that does not fit it then.
OTHER_TORCHES = {
    "tap optimizers": "import torch.optim.optimizer as room; del room.register_optimizer_step_pre_hook",
    "tap data": "import torch.utils.data.dataloader as room; room._BaseDataLoaderIter = None",
    "tap results": "import torch.amp; del torch.amp.GradScaler",
}
if "_is_tracing" not in torch.nn.Module._call_impl.__code__.co_names:
    OTHER_TORCHES["tap modules"] = "import torch; del torch._C._is_tracing"  # torch 2.15's own modules call it


@pytest.mark.parametrize("tap", OTHER_TORCHES)
def test_a_tap_that_cannot_be_set(tmp_path: Path, tap: str) -> None:
    write(tmp_path, "train.py", TRAIN)
    done, evidence = listened_in_fork(tmp_path, "train.py", before=OTHER_TORCHES[tap])
    assert len(done.out.splitlines()) == 4
    assert (done.code, done.err) == (0, "")
    assert [line.partition(":")[0] for line in evidence.skipped] == [tap]


def test_things_a_tap_does_not_expect(tmp_path: Path) -> None:
    """Odd datasets, batches, inputs, outputs and losses pass the taps unharmed."""
    write(
        tmp_path,
        "train.py",
        """
        import torch, warnings
        from torch import nn
        from torch.utils.data import DataLoader, Dataset
        warnings.simplefilter("ignore")
        torch.manual_seed(0)

        class NoLength(Dataset):
            def __len__(self):
                raise RuntimeError("ask the sampler")
            def __getitem__(self, i):
                return torch.full((3,), float(i))

        class Odd:  # as a batch and as an input
            shape = property(lambda self: 1 / 0)
            nbytes = property(lambda self: 1 / 0)
            def __eq__(self, other):
                raise TypeError("cannot be compared")
            __hash__ = None

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 1)
                self.lazy = nn.LazyLinear(2)
            def forward(self, x, *more, **named):
                return {"out": self.layer(x), "odd": Odd(), "none": None}

        class Picky(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))
            def parameters(self, which):
                raise ValueError("no such parameters: " + which)
            def forward(self, x):
                return x * self.weight

        def collate(samples):
            x = torch.stack(samples)
            nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
            return {"x": x, "sparse": x.to_sparse(), "nested": nested, "odd": Odd(), "set": {1}, "text": "t"}

        model, picky = Model(), Picky()
        optimizer = torch.optim.SGD([*model.layer.parameters(), picky.weight], lr=0.1)
        loader = DataLoader(NoLength(), batch_sampler=[[0, 1], [2, 3], [4, 5]], collate_fn=collate)
        for epoch in range(2):
            for batch in loader:
                out = model(batch["x"], batch["nested"], Odd(), named=Odd())["out"]
                loss = picky(out.expand(2, 3)).square().mean()
                edge = torch.autograd.graph.get_gradient_edge(loss)
                torch.autograd.backward(edge, (torch.ones(()),))
                optimizer.step()
                loss = model(batch["x"])["out"].square()
                torch.autograd.backward(loss.unbind(0), retain_graph=True)
                torch.autograd.backward([loss.sum(), loss.mean()], inputs=[model.layer.weight], retain_graph=True)
                torch.autograd.backward(tensors=loss.mean())
                model.eval()
                out = model(batch["x"])["out"].sum()
                print(loss.sum().item(), torch.autograd.grad(out, model.layer.weight)[0].sum())
                model.train()
        """,
    )
    expected = forked(tmp_path, "train.py")
    assert expected.code == 0, expected.err
    done, evidence = listened_in_fork(tmp_path, "train.py")
    assert done == expected
    assert evidence.ended == "finished"


def test_a_script_that_puts_its_own_functions_in_place(tmp_path: Path) -> None:
    """What the script replaces is the script's; what it saved before and puts back works too."""
    write(
        tmp_path,
        "train.py",
        """
        import torch
        calls, kept = [], torch.nn.Module.__call__
        def mine(self, *args, **kwargs):
            calls.append(type(self).__name__)
            return kept(self, *args, **kwargs)
        torch.nn.Module.__call__ = mine
        plain_backward = torch.Tensor.backward
        torch.Tensor.backward = lambda self, *a, **k: (calls.append("backward"), plain_backward(self, *a, **k))[1]
        torch.autograd.backward = torch.autograd.backward
        """
        + TRAIN.replace("\n", "\n        ")
        + """
        print(calls)
        """,
    )
    expected = forked(tmp_path, "train.py")
    assert expected.code == 0
    done, evidence = listened_in_fork(tmp_path, "train.py")
    assert done == expected
    assert len(evidence.step_start) == 4


def test_another_release_of_torchdata(tmp_path: Path) -> None:
    """Taps that come with a later import fail alone, and are named too."""
    write(tmp_path, "torchdata/__init__.py", "")
    write(tmp_path, "torchdata/stateful_dataloader/__init__.py", "")
    write(tmp_path, "torchdata/stateful_dataloader/stateful_dataloader.py", "OTHER = 1")
    text = TRAIN + "import torchdata.stateful_dataloader.stateful_dataloader as room; print(room.OTHER)"
    write(tmp_path, "train.py", text)
    done, evidence = listened_in_fork(tmp_path, "train.py")
    assert done == forked(tmp_path, "train.py")
    assert len(evidence.step_start) == 4
    assert any("StatefulDataLoader" in line for line in evidence.skipped)


def test_a_hasten_that_cannot_start(tmp_path: Path) -> None:
    """Its own variable is broken: the script runs, and one line says so."""
    write(
        tmp_path,
        "train.py",
        """
        import os, subprocess, sys
        env = {**os.environ, "HASTEN_RUN": "{"}
        print(subprocess.check_output([sys.executable, "-c", "print(1)"], env=env))
        """,
    )
    done = execute(*LISTEN, "train.py", cwd=tmp_path)
    assert (done.code, done.out) == (0, "b'1\\n'\n")
    assert "hasten: could not start in this process" in done.err


def test_evidence_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path, "out/train.py", TRAIN + "import shutil; shutil.rmtree('out')")
    done = hastened(tmp_path, "--evidence", "out/e.json", "out/train.py")
    assert done.code == 0
    assert len(done.out.splitlines()) == 4
    assert f"hasten: cannot write the evidence {tmp_path}/out/e.json: No such file or directory" in done.err
    assert "HastenError" not in done.err
    assert "Traceback" not in done.err
