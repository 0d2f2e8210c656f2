"""A script that fails under hasten fails with the traceback that Python would have shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.taps.forks import command, forked, listened_in_fork
from tests.taps.scripts import OURS, Done, listened, plain, quick, write

CASES = """
import sys, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Broken(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        if i == 5:
            raise KeyError("sample 5")
        return torch.zeros(3)

class Refuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    def forward(self, x):
        x = self.layer(x)
        raise RuntimeError("no forward today")

class Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("no backward today")

def in_forward(): Refuses()(torch.zeros(2, 3))
def wrong_shape(): nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))(torch.zeros(2, 4))
def wrong_arguments(): nn.Linear(3, 3)(1, 2, 3)
def in_dataset():
    for _ in DataLoader(Broken(), 4): pass
def in_collate():
    for _ in DataLoader(Broken(), 4, collate_fn=lambda batch: 1 / 0): pass
def in_iter():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1
            raise OSError("the stream broke")
    for _ in DataLoader(Stream()): pass
def in_backward(): Gradient.apply(nn.Linear(3, 3)(torch.zeros(3))).sum().backward()
def not_scalar(): nn.Linear(3, 3)(torch.zeros(3)).backward()
def in_step():
    model = nn.Linear(3, 3)
    def closure(): raise LookupError("no closure today")
    torch.optim.LBFGS(model.parameters()).step(closure)
def bad_optimizer(): torch.optim.SGD([], lr=1)
def bad_argument(): torch.optim.Adam(nn.Linear(1, 1).parameters(), learning_rate=1)
def bad_loader(): DataLoader(Broken(), batch_sze=4)
def bad_workers(): DataLoader(Broken(), num_workers=-1)
def bad_save(): torch.save({}, "/nowhere/at/all.pt")
def bad_loss(): nn.CrossEntropyLoss()(torch.zeros(2, 3), torch.zeros(5, dtype=torch.long))
def caused():
    try:
        Refuses()(torch.zeros(2, 3))
    except RuntimeError as error:
        raise ValueError("training failed") from error
def while_handling():
    try:
        Refuses()(torch.zeros(2, 3))
    except RuntimeError as error:
        in_dataset()
def grouped():
    errors = []
    for case in (in_forward, in_dataset):
        try:
            case()
        except Exception as error:
            errors.append(error)
    raise ExceptionGroup("both", errors)

for name, case in list(globals().items()):
    if callable(case) and getattr(case, "__module__", "") == "__main__" and not isinstance(case, type):
        print("==", name, file=sys.stderr)
        try:
            case()
        except BaseException:
            sys.excepthook(*sys.exc_info())
print("== in a thread", file=sys.stderr)
thread = threading.Thread(target=in_forward, name="T")
thread.start()
thread.join()
print("== at last, uncaught", file=sys.stderr)
Refuses()(torch.zeros(2, 3))
"""


def _parts(said: str) -> dict[str, str]:
    return dict(part.split("\n", 1) for part in said.split("== ") if part)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder with the script, and what it says under Python."""
    folder = tmp_path_factory.mktemp("cases")
    write(folder, "train.py", CASES)
    return folder, plain(folder, "train.py", env=quick())


def test_tracebacks_show_the_script_and_torch_but_not_hasten(cases: tuple[Path, Done]) -> None:
    folder, expected = cases
    done, evidence = listened(folder, "train.py")
    assert done.code == expected.code == 1
    assert _parts(done.err) == _parts(expected.err)
    assert len(_parts(done.err)) == 20
    assert evidence.ended == "failed"
    assert "no forward today" in evidence.error
    assert "train.py:" in evidence.error


def test_tracebacks_under_a_plan_that_wraps_everything(cases: tuple[Path, Done]) -> None:
    """The same frames, also where techniques stand between the script and torch."""
    folder, plainly = cases
    write(
        folder,
        "hasten.toml",
        """
        [techniques]
        no_grad_validation = true
        fused_optimizer = true
        channels_last = true
        precision = "bf16-mixed"
        """,
    )
    done = command(folder, "run", "--quiet", "train.py")
    expected = _parts(plainly.err)
    assert {name: text for name, text in _parts(done.err).items() if OURS in text} == {}
    assert _parts(done.err).keys() == expected.keys()
    assert _parts(done.err)["in_forward"] == expected["in_forward"]


def test_a_worker_process_that_fails_says_what_it_said(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Broken(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                raise KeyError("sample")

        for _ in DataLoader(Broken(), 4, num_workers=1):
            pass
        """,
    )
    done, _ = listened_in_fork(tmp_path, "train.py")
    assert done == forked(tmp_path, "train.py")
    assert "KeyError" in done.err
