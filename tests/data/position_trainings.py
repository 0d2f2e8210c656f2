"""Loaders and a small training for test_position; also run as a process that is killed and resumed."""

# ruff: noqa: NPY002 - the global generator is what is saved
from __future__ import annotations

import io
import json
import os
import random
import signal
import sys

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from hasten.data import rng
from hasten.data.position import Position

N = 23


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Plain(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return torch.tensor([index], dtype=torch.float64)


class Drawing(Plain):
    """Draws from all three generators, and names its worker."""

    def __getitem__(self, index):
        info = get_worker_info()
        where = (-1, 0) if info is None else (info.id, info.seed % 1000)
        return torch.tensor([index, *draws(), *where], dtype=torch.float64)


class DrawingSometimes(Plain):
    def __getitem__(self, index):
        return torch.tensor([index, random.random() if index % 5 == 0 else 0.0], dtype=torch.float64)


class OwnGenerators(Plain):
    def __init__(self):
        self.numpy = np.random.default_rng(5)
        self.inner = {"python": random.Random(6), "torch": torch.Generator().manual_seed(7)}
        self.legacy = [np.random.RandomState(8)]

    def __getitem__(self, index):
        own = self.inner["python"].random(), float(torch.rand((), generator=self.inner["torch"]))
        return torch.tensor([index, self.numpy.random(), self.legacy[0].rand(), *own], dtype=torch.float64)


class OwnNumpy(Plain):
    """What spawn can send: a torch.Generator in a dataset does not go through it, in a plain loop neither."""

    def __init__(self):
        self.numpy = np.random.default_rng(5)

    def __getitem__(self, index):
        return torch.tensor([index, self.numpy.random(), *draws()], dtype=torch.float64)


class StatefulMap(Plain):
    """Counts what it gave."""

    given = 0

    def __getitem__(self, index):
        self.given += 1
        return torch.tensor([index, self.given], dtype=torch.float64)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Sharded(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        number, of = (info.id, info.num_workers) if info else (0, 1)
        for index in range(number, N, of):
            yield torch.tensor([index, number, *draws()], dtype=torch.float64)


class StatefulStream(IterableDataset):
    """As torchdata has it: `load_state_dict` says where the next pass begins."""

    def __init__(self):
        self.at = self.begin = 0

    def __iter__(self):
        info = get_worker_info()
        number, of = (info.id, info.num_workers) if info else (0, 1)
        begin, self.begin = self.begin, 0
        for self.at in range(begin, N // of):
            drawn = draws()
            self.at += 1
            yield torch.tensor([self.at, number, *drawn], dtype=torch.float64)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = self.at = state["at"]


class ShuffleBuffer(IterableDataset):
    """Remembers what it drew."""

    def __iter__(self):
        buffer = []
        for index in range(N):
            buffer.append(index)
            if len(buffer) == 6:
                yield torch.tensor(buffer.pop(random.randrange(6)))
        yield from map(torch.tensor, buffer)


class Batches:
    """No DataLoader at all."""

    def __init__(self):
        self.random = random.Random(3)

    def __iter__(self):
        order = list(range(N))
        self.random.shuffle(order)
        for start in range(0, N, 3):
            yield torch.tensor(order[start : start + 3], dtype=torch.float64)


class StatefulBatches:
    """No DataLoader, but one that keeps its own place."""

    def __init__(self):
        self.epoch, self.at = 0, 0

    def __iter__(self):
        while self.at < 8:
            self.at += 1
            yield torch.tensor([self.epoch, self.at], dtype=torch.float64)
        self.at = 0
        self.epoch += 1

    def state_dict(self):
        return {"count": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["count"], state["at"]


class CountingSampler:
    """Orders by the number of passes it has made itself."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self):
        return N


def init(worker):
    """A user's own worker_init_fn, that draws and seeds."""
    np.random.seed(worker + int(1e6 * random.random()))


def generator():
    return torch.Generator().manual_seed(17)


SAMPLERS = {
    "sequential": lambda: {"shuffle": False},
    "shuffle": lambda: {"shuffle": True},
    "shuffle_own": lambda: {"shuffle": True, "generator": generator()},
    "random_own": lambda: {"sampler": RandomSampler(range(N), generator=generator())},
    "replacement": lambda: {
        "sampler": RandomSampler(range(N), replacement=True, num_samples=40, generator=generator())
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0 + i for i in range(N)], N)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(3, N))},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(N)), 4, True)},
    "batch_list": lambda: {"batch_sampler": [[1, 2, 3], [4, 5], [6, 7], [8], [9, 10]]},
    "counting": lambda: {"sampler": CountingSampler()},
    "single": lambda: {"batch_size": None, "sampler": SequentialSampler(range(9))},
}
DATASETS = {
    "plain": Plain,
    "drawing": Drawing,
    "sometimes": DrawingSometimes,
    "own": OwnGenerators,
    "own_numpy": OwnNumpy,
    "stateful_map": StatefulMap,
    "tensors": lambda: TensorDataset(torch.arange(N), torch.arange(N) * 2.0),
    "sharded": Sharded,
    "stateful_stream": StatefulStream,
    "buffer": ShuffleBuffer,
}


def build(dataset="plain", sampler=None, stateful=False, **options):
    """A fresh loader, as a new process would make it."""
    if dataset == "batches":
        return Batches()
    if dataset == "stateful_batches":
        return StatefulBatches()
    kind = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    chosen = SAMPLERS[sampler]() if sampler else {}
    if "batch_sampler" not in chosen and "batch_size" not in chosen:
        chosen.setdefault("batch_size", options.pop("batch_size", 3))
    return kind(DATASETS[dataset](), **chosen, **options)


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def values(batch):
    return [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()


def plain(case, epochs, limit=None):
    """What an uninterrupted loop sees: batches, and its own draws after each."""
    seed(1)
    loader = build(**case)
    seen = []
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            seen.append((epoch, values(batch), draws()))
            if number + 1 == limit:
                break
        seen.append((epoch, "end", draws()))
    return seen


class Training:
    """The same loop, under a Position; `steps` counts what `plain` notes."""

    def __init__(self, case, epochs, limit=None, checkpoint=None):
        seed(1 if checkpoint is None else 999)
        self.position = Position(build(**case))
        self.epochs, self.limit = epochs, limit
        self.epoch = self.batch = 0
        self.iterator = None
        self.seen = []
        if checkpoint is not None:
            self.epoch, self.batch = checkpoint["epoch"], checkpoint["batch"]
            self.iterator = self.position.resume(checkpoint["position"])
            rng.restore(checkpoint["rng"])

    def checkpoint(self):
        position = self.position.state_dict(self.batch)
        return {"epoch": self.epoch, "batch": self.batch, "position": position, "rng": rng.state()}

    def step(self):
        """One entry of `plain`; False when the training is over."""
        if self.epoch == self.epochs:
            return False
        if self.iterator is None:
            self.iterator, self.batch = self.position.begin(), 0
        batch = next(self.iterator, None) if self.batch != self.limit else None
        if batch is None:
            self.position.end()
            self.seen.append((self.epoch, "end", draws()))
            self.iterator, self.batch = None, 0
            self.epoch += 1
        else:
            self.batch += 1
            self.seen.append((self.epoch, values(batch), draws()))
        return True

    def run(self, steps=None):
        while steps != 0 and self.step():
            steps = None if steps is None else steps - 1
        return self.seen


def packed(checkpoint):
    """Through the file format: JSON but for tensors, read back without pickle's freedom."""
    json.dumps(checkpoint, default=lambda thing: thing.tolist() if isinstance(thing, torch.Tensor) else 1 / 0)
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def main():
    """`case epochs stop folder`: train until `stop` entries, save, be killed; with stop "resume": go on."""
    case, epochs, stop, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    kept, seen = os.path.join(folder, "kept.pt"), os.path.join(folder, "seen.json")
    if stop == "resume":
        with open(kept, "rb") as file:
            training = Training(case, epochs, checkpoint=unpacked(file.read()))
        result = training.run()
    else:
        training = Training(case, epochs)
        result = training.run(int(stop))
        with open(kept, "wb") as file:
            file.write(packed(training.checkpoint()))
    with open(seen, "w") as file:
        json.dump(result, file)
    if stop != "resume":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
