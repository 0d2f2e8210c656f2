"""Datasets and loops for tests of hasten.data.DataLoader; importable by processes that are spawned."""

# ruff: noqa: NPY002 - datasets of people draw from the global generators
from __future__ import annotations

import mmap
import os
import random
import signal
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import Dataset

from hasten.data import DataLoader, sample_rng


class Numbers(Dataset):
    """Sample i is i, and what it draws from each kind of generator, its own among them."""

    def __init__(self, length, draws=True):
        self.length = length
        self.draws = draws
        self.rng = np.random.default_rng(0)
        self.gen = torch.Generator().manual_seed(0)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not self.draws:
            return torch.tensor([float(index)], dtype=torch.float64)
        own = self.rng.random() + torch.rand(1, generator=self.gen, dtype=torch.float64).item()
        drawn = [random.random(), np.random.random(), torch.rand(1).item(), own]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Keyed(Numbers):
    """Draws by `sample_rng`, as thread workers need it."""

    def __init__(self, length):
        super().__init__(length)
        del self.rng, self.gen

    def __getitem__(self, index):
        rng = sample_rng()
        drawn = [rng.python.random(), rng.numpy.random(), torch.rand(1, generator=rng.torch).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Faulty(Numbers):
    """Some samples raise, kill their worker, or hang."""

    def __init__(self, length, bad=(), what="raise"):
        super().__init__(length, draws=False)
        self.bad = set(bad)
        self.what = what

    def __getitem__(self, index):
        if index in self.bad:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "hang":
                stuck_here()
            if self.what == "bus":
                cut_short()
            raise OSError(f"sample {index} is damaged")
        return super().__getitem__(index)


def stuck_here():
    time.sleep(3600)


def cut_short():
    """Read a mapped file that is shorter by now: what a full /dev/shm does to a worker, too."""
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        with mmap.mmap(file.fileno(), 1 << 16) as mapped:
            file.truncate(0)
            return mapped[5]


class Large(Numbers):
    """A sample of 1 MB."""

    def __getitem__(self, index):
        return torch.zeros(1 << 18)


def ranks_loaders(dataset, ranks, **options):
    return [DataLoader(dataset, rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def take(loaders, batches=None):
    """Rows of a pass of all ranks, in the order of the global sequence: position p is rank p modulo ranks'."""
    rows = []
    first = loaders[0].state_dict()["samples"] % len(loaders)
    passes = [iter(loader) for loader in [*loaders[first:], *loaders[:first]]]
    number = 0
    while batches is None or number < batches:
        shares = [next(one, None) for one in passes]
        assert len({None if share is None else len(share) for share in shares}) == 1, "ranks differ"
        if shares[0] is None:
            break
        rows += torch.stack(shares, 1).flatten(0, 1).tolist()
        number += 1
    return rows
