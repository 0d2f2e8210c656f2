"""Copies to a device, with torch's "meta" device in the place of a GPU; files read over a network."""

from __future__ import annotations

from pathlib import Path

from tests.doctor.observe.listening import HEAD, at, event, kinds, observed

COPIES = """
from hasten.doctor.observe import copies
from hasten.doctor.observe.event_log import event_log
from hasten.taps.session import ProcessSession
if ProcessSession.current is not None:
    copies.tap_copies(ProcessSession.current, event_log(ProcessSession.current), anyway=True)
class Batch:
    def __init__(self, x):
        self.x = x
def batches():
    for x, y in loader:
        yield {"x": x, "y": y}
for batch in batches():
    batch["x"].to("meta")  # given
    batch["y"].view(4, 4).to("meta", non_blocking=True)  # a view
    batch["x"].to(device="meta", dtype=torch.float64)  # another type
    batch["x"].to(torch.float64), batch["x"].to("cpu")
    torch.zeros(3, 4).to("meta")  # made here
    x, y = batch["x"], batch["y"]
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
model.to("meta")
"""


def test_copies_to_a_device(tmp_path: Path) -> None:
    _, evidence = observed(tmp_path, HEAD + COPIES)
    for mark in ("given", "a view", "another type"):
        copied = event(evidence, "blocking_copy", at(tmp_path, mark))
        assert (copied.count, copied.steps, copied.device, copied.detail) == (40, 40, "meta", "pageable")
        assert copied.seconds > 0
    moved = event(evidence, "moved", at(tmp_path, "made here"))
    assert (moved.count, moved.device, moved.detail) == (40, "meta", "(3, 4)")
    assert kinds(evidence) == {"blocking_copy": 3, "moved": 1}


def test_batches_in_which_no_tensor_is_found(tmp_path: Path) -> None:
    """Whose a tensor is cannot be said then, so nothing is."""
    _, evidence = observed(
        tmp_path,
        HEAD
        + COPIES.split("def batches")[0]
        + """
class Closed:
    __slots__ = ("rows",)
    def __init__(self, rows):
        self.rows = rows
for hidden in DataLoader(data, batch_size=16, collate_fn=Closed):
    x, y = (torch.stack(column) for column in zip(*hidden.rows))
    x.to("meta")
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
""",
    )
    assert evidence.steps == 40
    assert kinds(evidence) == {}


def test_files_read_in_blocks(tmp_path: Path) -> None:
    """A file system of fsspec's kind that fetches from the disk: a little is used of a lot, in workers and without."""
    _, evidence = observed(
        tmp_path,
        HEAD
        + """
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
class File(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)
class Far(AbstractFileSystem):
    protocol = "far"
    def info(self, path, **more):
        return {"name": path, "size": __import__("os").path.getsize(path), "type": "file"}
    def _open(self, path, mode="rb", block_size=None, **more):
        return File(self, path, mode, block_size or 100_000, **more)
open("samples.bin", "wb").write(bytes(1_000_000))
class Remote(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        with Far().open("samples.bin") as file:
            file.seek(index * 1000)
            file.read(100)  # read
        return torch.randn(6), index % 3
for workers in (0, 2):
    for x, y in DataLoader(Remote(), batch_size=16, num_workers=workers):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    )
    opened = event(evidence, "remote_open", at(tmp_path, "read"))
    assert opened.count == 128
    assert opened.detail == f"far: blocks of 100000 bytes, {128 * 100} of {128 * 100_100} used"
