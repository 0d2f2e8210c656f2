"""Where a loader's time goes: seen where the samples are made, and nothing else changed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from hasten.doctor.observe import OBSERVERS
from hasten.evidence import Evidence, Stages, read_evidence
from hasten.taps.config import DoctorOptions, RunConfig
from tests.taps.forks import forked
from tests.taps.scripts import OURS, Done, write

HEAD = """
import builtins, hashlib, io, json, os, random, sys, time
import numpy as np, torch
from PIL import Image
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, Subset
from torch.utils.data import default_collate
torch.manual_seed(3); random.seed(3); np.random.seed(3)
model = nn.Linear(4, 2)
def train(loader, passes=1):
    sha = hashlib.sha256()
    for _ in range(passes):
        for x, y in loader:
            sha.update(x.numpy().tobytes()); sha.update(y.numpy().tobytes())
            model(x.float().flatten(1)[:, :4]).sum().backward()
    return sha.hexdigest()
class Base(Dataset):
    def __init__(self, number=64, transform=None):
        self.number, self.transform = number, transform
    def __len__(self): return self.number
    def __getitem__(self, i):
        return torch.full((8,), float(i)), i % 2
"""

ILLNESSES = """
def files():
    os.makedirs("data", exist_ok=True)
    for i in range(8):
        if not os.path.exists(f"data/{i}.png"):
            noise = np.random.RandomState(i).randint(0, 255, (500, 500, 3), dtype=np.uint8)
            Image.fromarray(noise).save(f"data/{i}.png")
    with open("data/0.bin", "wb") as file:
        file.write(bytes(8_000_000))
class Reads(Base):
    place = bytearray(8_000_000)
    def __getitem__(self, i):
        with open("data/0.bin", "rb") as file:
            file.readinto(self.place)
        return super().__getitem__(i)
class Decodes(Base):
    def __getitem__(self, i):
        image = Image.open(f"data/{i % 8}.png").convert("RGB")
        return torch.tensor(image.getpixel((0, 0))).repeat(2).float(), i % 2
class Transforms(Base):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return self.transform(x), y
class Slow:
    def __call__(self, x):
        time.sleep(0.002)
        return x
def slow(x):
    time.sleep(0.002)
    return x
class Own(Base):
    def __getitem__(self, i):
        time.sleep(0.002)
        return super().__getitem__(i)
class Python(Base):
    def __getitem__(self, i):
        total = 0
        for k in range(20_000):  # 10 ms a batch: where another process takes the core, it is mostly here
            total += k * i % 7  # the line
        return torch.full((8,), float(total)), i % 2
class Numpy(Base):
    table = np.ones((400, 400))
    def __getitem__(self, i):
        x = self.table @ self.table
        return torch.from_numpy(x[0, :8] * i), i % 2
def slow_collate(samples):
    time.sleep(0.01)
    return default_collate(samples)
"""


def listen(folder: Path, *arguments: str) -> tuple[Done, Evidence]:
    """A script with the doctor's observers, and what they heard."""
    config = RunConfig(
        evidence=str(folder / "e.json"), quiet=True, doctor=DoctorOptions(0, 0.0, sample=False, observers=OBSERVERS)
    )
    # With a short path, as workers' sockets lie below it: that of a test under pytest-xdist is too long for them.
    with tempfile.TemporaryDirectory(prefix="hs") as temporary:
        there = f"import os, tempfile; os.environ['TMPDIR'] = {temporary!r}; tempfile.tempdir = None"
        done = forked(folder, *arguments, config=config, before=there)
        assert os.listdir(temporary) == []  # nothing is left behind
    assert (folder / "e.json").is_file(), done.err
    return done, read_evidence(folder / "e.json")


def heard(folder: Path, text: str) -> tuple[Done, Evidence]:
    """A training script, and what was heard of it."""
    write(folder, "train.py", HEAD + text)
    done, evidence = listen(folder, "train.py")
    assert not [line for line in evidence.skipped if "stage" in line.lower()]
    return done, evidence


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stages]:
    """One loader for each illness, in one script; by what it is called."""
    done, evidence = heard(
        tmp_path_factory.mktemp("ill"),
        ILLNESSES
        + """
files()
loaders = {
    "reads": DataLoader(Reads(), 8),
    "decodes": DataLoader(Decodes(), 8),
    "transform object": DataLoader(Transforms(transform=Slow()), 8),
    "transform function": DataLoader(Subset(Transforms(transform=slow), range(48)), 8),
    "collate": DataLoader(Base(), 8, collate_fn=slow_collate),
    "own": DataLoader(Own(), 8),
    "python": DataLoader(Python(), 8),
    "numpy": DataLoader(Numpy(), 8),
    "in workers": DataLoader(Transforms(transform=Slow()), 4, num_workers=2),
}
for name, loader in loaders.items():
    train(loader)
print(json.dumps(list(loaders)))
""",
    )
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert len(evidence.stages) == len(said)
    return dict(zip(said, evidence.stages))


@pytest.mark.parametrize(
    ("illness", "stage"),
    [
        ("reads", "read"),
        ("decodes", "decode"),
        ("transform object", "transform"),
        ("transform function", "transform"),
        ("collate", "collate"),
        ("own", "other"),
        ("python", "other"),
        ("in workers", "transform"),
    ],
)
def test_the_stage_that_takes_the_time(ill: dict[str, Stages], illness: str, stage: str) -> None:
    stages = ill[illness]
    assert getattr(stages, stage) > 0.5 * stages.seconds, stages
    assert stages.batches == (4 if illness == "in workers" else 2)


def test_who_decodes_and_where_python_is_busy(ill: dict[str, Stages]) -> None:
    assert ill["decodes"].decoder == "PIL"
    assert ill["decodes"].read > 0
    assert ill["own"].decoder == ""
    python = ill["python"]
    # Nearly all of it; what samples is a thread, which misses most where others have the cores.
    assert python.python > 0.15
    file, _, line = python.hottest.rpartition(":")
    assert "# the line" in Path(file).read_text().splitlines()[int(line) - 1]
    for healthy in ("numpy", "own", "transform object"):
        assert ill[healthy].python < min(0.2, python.python), ill[healthy]


def test_only_workers_pass_batches_on(ill: dict[str, Stages]) -> None:
    assert ill["in workers"].copies > 0
    assert ill["own"].copies == 0


@pytest.mark.slow  # a process for each kind of loader, with and without us
def test_every_kind_of_loader_gives_what_it_gives_without_us(tmp_path: Path) -> None:
    """Same batches, same random numbers, same types of files; and after the samples nothing hangs any more."""
    done, evidence = heard(
        tmp_path,
        """
from torchdata.stateful_dataloader import StatefulDataLoader
class Random(Base):
    def __getitem__(self, i):
        jitter = random.random() + np.random.rand() + torch.rand(()).item()
        return self.transform(torch.full((8,), float(i) + jitter)), i % 2
class AtOnce(Base):
    def __getitems__(self, indices):
        return [self[i] for i in indices]
class Stream(IterableDataset):
    def __iter__(self):
        for i in range(40):
            yield torch.full((8,), i + random.random()), i % 2
class Whole(Base):
    def __getitem__(self, indices):
        return torch.ones(len(indices), 8) * torch.rand(()), torch.tensor(indices)
open("numbers.bin", "wb").write(bytes(range(256)) * 40)
kinds = set()
class Files(Base):
    def __getitem__(self, i):
        with open("numbers.bin", "rb") as file, open("train.py") as text:
            kinds.add((type(file), file.name, file.mode, type(text), isinstance(file, io.BufferedIOBase)))
            file.seek(i)
            assert file.read(3) == bytes([i, i + 1, i + 2]) and file.tell() == i + 3
            assert np.fromfile(file, dtype=np.uint8, count=2).tolist() == [i + 3, i + 4]
        try:
            open("nowhere")
        except FileNotFoundError as error:
            kinds.add(str(error))
        return super().__getitem__(i)
def double(x): return x * 2
before = builtins.open, io.open, Image.open, Image.Image.convert
eights = BatchSampler(SequentialSampler(range(64)), 8, False)
digests = [
    train(DataLoader(Random(transform=double), 8, shuffle=True), 2),
    train(DataLoader(Random(transform=double), 8, shuffle=True, num_workers=1), 2),
    train(DataLoader(Random(transform=lambda x: x), 8, num_workers=2, persistent_workers=True), 2),
    train(DataLoader(AtOnce(), 8)),
    train(DataLoader(Stream(), 4)),
    train(DataLoader(Stream(), 4, num_workers=1)),
    train(DataLoader(Whole(), sampler=eights, batch_size=None)),
    train(DataLoader(Base(), batch_sampler=eights, collate_fn=default_collate)),
    train(StatefulDataLoader(Base(), 8)),
    train(StatefulDataLoader(Base(), 4, num_workers=2)),
    train(DataLoader(Files(), 8)),
    train(DataLoader(Base(number=10), 8, num_workers=2)),
]
assert before == (builtins.open, io.open, Image.open, Image.Image.convert)
loader = DataLoader(Random(transform=double), 8)
iterator = iter(loader)
for _ in range(6): next(iterator)
print(json.dumps({
    "digests": digests,
    "random": [random.random(), float(np.random.rand()), torch.rand(()).item()],
    "kinds": sorted(map(str, kinds)),
    "left": [name for name in vars(iterator._dataset_fetcher) if name == "fetch"],
    "transform": loader.dataset.transform is double,
    "environment": [name for name in os.environ if name == "HASTEN_LOADER"],
}))
""",
    )
    assert done == forked(tmp_path, "train.py")
    said = json.loads(done.out)
    assert said["left"] == []
    assert said["transform"]
    assert said["environment"] == []
    # All twelve and the last were looked into.
    assert [stages.loader for stages in evidence.stages] == list(range(13))
    assert all(stages.batches and stages.seconds > 0 for stages in evidence.stages)
    assert set(evidence.disturbed) >= {2, 3, 4}


def test_an_error_in_a_sampled_batch_is_the_datasets_own(tmp_path: Path) -> None:
    done, evidence = heard(
        tmp_path,
        """
class Bad(Base):
    def __getitem__(self, i):
        if i == 20:
            raise KeyError("no sample 20")
        return super().__getitem__(i)
train(DataLoader(Bad(), 8))
""",
    )
    assert done.code == 1
    assert done.err.endswith("KeyError: 'no sample 20'\n")
    assert OURS not in done.err
    assert evidence.stages == ()
    assert "no sample 20" in evidence.error


@pytest.mark.slow  # spawned workers import torch once more
def test_workers_that_are_not_forked(tmp_path: Path) -> None:
    done, evidence = heard(
        tmp_path,
        """
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        train(DataLoader(Base(), 8, num_workers=1, multiprocessing_context=method))
""",
    )
    assert done.code == 0, done.err
    assert [stages.batches for stages in evidence.stages] == [2, 2]
