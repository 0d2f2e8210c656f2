"""What lines of a script do during training: each at its own line, as often as it was, and nothing else changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.evidence import Evidence
from tests.doctor.observe.listening import HEAD, at, event, kinds, observed
from tests.taps.forks import forked
from tests.taps.scripts import Done

BUSY = (
    HEAD
    + """
import csv, gc, io, json, os, pickle, sys, warnings
torch.save(model.state_dict(), "warned.pt")
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
for _ in range(2):
    torch.load("warned.pt")
del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
nn.functional.mse_loss(torch.zeros(2, 1), torch.zeros(2))
warnings.simplefilter("ignore")
import numpy as np
from safetensors.torch import save_file
from torch.utils.tensorboard import SummaryWriter
import helper
writer = SummaryWriter("tb")
log = csv.DictWriter(open("log.csv", "w"), ["loss"])
rows = csv.writer(open("rows.csv", "w"))
torch.save(model.state_dict(), "first.pt")
torch.load("first.pt", weights_only=False)  # load
torch.load("first.pt")
array = np.ones((16, 3), dtype=np.float32)
numbers = [float(n) for n in range(2000)]
step = 0
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clip
        optimizer.step()
        value = loss.item()  # item
        if loss > 100:  # if
            break
        float(loss.detach()), int(loss.detach())  # numbers
        out.tolist()  # tolist
        out.detach().numpy()  # numpy
        out.cpu()  # cpu
        f"{loss:.3f} {out}"  # text
        helper.of_a_library(loss)  # library
        torch.tensor(array)  # array
        torch.as_tensor(numbers)  # numbers made
        torch.tensor(out.detach())  # tensor
        torch.tensor([1, 2]), torch.tensor(2.0), torch.as_tensor(array)
        out[out > 0]  # mask
        out[0], out[:, 1], out[y]
        out.detach().clone()[out > 0] = 0.0
        (out > 0).nonzero()  # nonzero
        torch.where(out > 0)  # where
        torch.where(out > 0, out, -out)
        torch.unique(y)  # unique
        y.unique()  # unique of it
        torch.masked_select(out, out > 0)  # select
        np.nonzero(array), np.where(array > 0)
        print(step, flush=True)  # print
        rows.writerow([value])  # row
        if step % 10 == 0:
            gc.collect()  # collect
            torch.cuda.empty_cache()  # empty
            writer.add_scalar("loss", value, step)  # scalar
            json.dump([value], open("log.json", "w"))  # json
            log.writerow({"loss": value})  # csv
            save_file(model.state_dict(), "inside.st")  # inside
        with torch.autograd.set_detect_anomaly(step == 3):  # anomaly
            pass
        step += 1
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            criterion(model(x), y).item()  # validation
    model.train()
    gc.collect()
    torch.save(model.state_dict(), "epoch.pt")  # save
torch.save(model.state_dict(), "last.pt")
print(sum(float(p.detach().double().abs().sum()) for p in model.parameters()), loss)
print(pickle.loads(pickle.dumps(torch.tensor)) is torch.tensor, pickle.loads(pickle.dumps(torch.save)) is torch.save)
"""
)

LIBRARY = """
def of_a_library(loss):
    return loss.item()
"""


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done, Done, Evidence]:
    folder = tmp_path_factory.mktemp("busy")
    # what lies in site-packages is a library
    library = folder / "venv"
    script = f"import sys, sysconfig\nsys.path.insert(0, {str(library)!r})\n" + BUSY
    (library).mkdir()
    (library / "helper.py").write_text(
        "import sysconfig, types\n"
        "code = compile(" + repr(LIBRARY) + ", sysconfig.get_path('purelib') + '/helper.py', 'exec')\n"
        "exec(code, globals())\n"
    )
    done, evidence = observed(folder, script)
    expected = forked(folder, "train.py")
    return folder, done, expected, evidence


def test_nothing_else_changed(busy: tuple[Path, Done, Done, Evidence]) -> None:
    """Nor where a warning is said to come from."""
    folder, done, expected, _ = busy
    assert done == expected
    assert done.code == 0, done.err
    warned = [line.split(": ")[:2] for line in done.err.splitlines() if "Warning: " in line]
    place = str(folder / "train.py")
    assert [(where.rpartition(":")[0], kind) for where, kind in warned] == [(place, "UserWarning")] * 2, done.err
    assert done.out.endswith("True True\n")


def test_reads_are_counted_at_their_lines(busy: tuple[Path, Done, Done, Evidence]) -> None:
    folder, _, _, evidence = busy
    assert evidence.steps == 80
    for kind, mark, count in (
        ("item", "item", 80),
        ("item", "if", 80),
        ("item", "numbers", 160),
        ("item", "library", 80),
        ("tolist", "tolist", 80),
        ("numpy", "numpy", 80),
        ("cpu", "cpu", 80),
        ("print", "text", 160),
    ):
        seen = event(evidence, kind, at(folder, mark))
        assert (seen.count, seen.steps, seen.device) == (count, 80, "cpu"), mark
        assert seen.seconds > 0
    assert kinds(evidence)["item"] == 4  # neither in validation, nor after the last step, nor torch's own


def test_copies_of_what_is_large(busy: tuple[Path, Done, Done, Evidence]) -> None:
    folder, _, _, evidence = busy
    for mark, of in (("array", "array"), ("numbers made", "list"), ("tensor", "tensor")):
        seen = event(evidence, "torch_tensor", at(folder, mark))
        assert (seen.count, seen.detail) == (80, of)
    assert kinds(evidence)["torch_tensor"] == 3


def test_close_looks_count_for_all_steps(busy: tuple[Path, Done, Done, Evidence]) -> None:
    folder, _, _, evidence = busy
    for kind, mark in (
        ("mask", "mask"),
        ("nonzero", "nonzero"),
        ("nonzero", "where"),
        ("nonzero", "unique"),
        ("nonzero", "unique of it"),
        ("nonzero", "select"),
    ):
        seen = event(evidence, kind, at(folder, mark))
        assert (seen.count, seen.steps, seen.device) == (80, 80, "cpu"), mark
    assert kinds(evidence)["mask"] == 1
    assert kinds(evidence)["nonzero"] == 5
    assert {4, 5, 6, 12, 24, 48} <= set(evidence.disturbed)


def test_rare_calls(busy: tuple[Path, Done, Done, Evidence]) -> None:
    folder, _, _, evidence = busy
    for kind, mark, count in (
        ("clip", "clip", 80),
        ("gc_collect", "collect", 8),
        ("empty_cache", "empty", 8),
        ("anomaly", "anomaly", 1),
        ("torch_load", "load", 1),
        ("save", "inside", 8),
        ("save", "save", 1),  # after the second epoch no training follows
    ):
        assert event(evidence, kind, at(folder, mark)).count == count, mark
    assert event(evidence, "torch_load", at(folder, "load")).detail == "first.pt"
    assert event(evidence, "save", at(folder, "save")).seconds > 0
    assert kinds(evidence)["save"] == 2
    assert kinds(evidence)["torch_load"] == kinds(evidence)["gc_collect"] == 1


def test_logs(busy: tuple[Path, Done, Done, Evidence]) -> None:
    folder, _, _, evidence = busy
    for mark, count, detail in (
        ("scalar", 8, "SummaryWriter.add_scalar"),
        ("csv", 8, "csv"),
        ("print", 80, "print"),
        ("row", 80, "writerow"),
    ):
        seen = [each for each in evidence.events if each.kind == "log" and each.where == at(folder, mark)]
        assert (count, detail) in [(each.count, each.detail) for each in seen], mark
    assert event(evidence, "log", at(folder, "json")).detail == "json.dump"


def test_what_is_in_workers_and_threads_is_not_the_steps(tmp_path: Path) -> None:
    _, evidence = observed(
        tmp_path,
        HEAD
        + """
import numpy as np
class Own(torch.utils.data.Dataset):
    def __len__(self):
        return 320
    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is None or __import__("sys").getprofile() is None
        x = torch.tensor(np.ones(6, dtype=np.float32)) * index
        return x, int(x.sum().item()) % 3
for workers in (0, 2):
    for epoch in range(2):
        for x, y in DataLoader(Own(), batch_size=16, num_workers=workers):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
""",
    )
    assert evidence.steps == 80
    assert evidence.events == ()


def test_a_profiler_left_on(tmp_path: Path) -> None:
    _, evidence = observed(
        tmp_path,
        HEAD
        + """
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU]):  # on
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
torch.autograd.set_detect_anomaly(True)  # anomaly
for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
""",
    )
    assert event(evidence, "profiler", at(tmp_path, "on")).steps == 40
    assert event(evidence, "anomaly", at(tmp_path, "anomaly")).steps == 40
    assert kinds(evidence) == {"profiler": 1, "anomaly": 1}


def test_a_profiler_that_is_told_not_to_profile(tmp_path: Path) -> None:
    _, evidence = observed(
        tmp_path,
        HEAD
        + """
with torch.autograd.profiler.profile(False), torch.autograd.profiler.emit_nvtx(enabled=False):
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
""",
    )
    assert evidence.steps == 80
    assert evidence.events == ()
