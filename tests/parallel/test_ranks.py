"""What ranks say to each other, and training with them: real processes on gloo, forked from this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from hasten import HastenError
from hasten.parallel import (
    World,
    agree_on_batches,
    before_backward,
    distributed_loader,
    explained,
    manual_forward,
    set_epoch,
    spawn,
    sync_batchnorm,
    wrap,
)
from hasten.parallel.rendezvous import serve_store


def ranks(size: int, function: Callable[[World], Any]) -> Any:
    """What the function returned on every rank, by rank."""

    def run() -> Any:
        world = World.from_environment("gloo", timeout=60)
        result = function(world)
        return [world.broadcast(result, rank) for rank in range(size)]

    return spawn(run, size, strategy="ddp_fork")


def test_what_ranks_say_to_each_other() -> None:
    def talk(world: World) -> dict[str, Any]:
        own = torch.tensor([1.0, 10.0]) * (world.rank + 1)
        learns = torch.tensor([float(world.rank)], requires_grad=True)
        (world.gather(learns, sync_grads=True).square().sum()).backward()
        world.barrier()
        return {
            "own": own.tolist(),
            "objects": world.broadcast({"from": world.rank}, src=1),
            "any": (world.any(world.rank == 2), world.any(False)),
            "all": (world.all(True), world.all(world.rank == 2)),
            "mean": world.mean(own).tolist(),
            "counts": world.mean(torch.tensor(world.rank)).item(),
            "large_counts": world.mean(torch.tensor([2**24 + 1, -(2**24), 2][world.rank])),
            "bytes": world.mean(torch.tensor(200, dtype=torch.uint8)).item(),
            "sum": world.sum(own).tolist(),
            "max": world.reduce(own, "max").tolist(),
            "min": world.reduce(own, "min").tolist(),
            "bool": world.reduce(torch.tensor([True, world.rank > 5]), "sum").tolist(),
            "half": world.mean(torch.ones(2, dtype=torch.bfloat16)).dtype,
            "untouched": own.tolist(),
            "gather": world.gather(own).tolist(),
            "scalars": world.gather(torch.tensor(world.rank)).tolist(),
            "grad": learns.grad.tolist(),
            "batches": agree_on_batches(world, [7, float("inf"), 5][world.rank]),
            "endless": agree_on_batches(world, float("inf")),
        }

    said = ranks(3, talk)
    for rank, one in enumerate(said):
        assert one["own"] == one["untouched"] == [rank + 1.0, 10.0 * (rank + 1)]
        assert one["objects"] == {"from": 1}
        assert one["any"] == (True, False)
        assert one["all"] == (True, False)
        assert one["mean"] == [2.0, 20.0]
        assert one["counts"] == 1.0
        # float32 would round 2**24 + 1, and a sum of the bytes in uint8 would overflow.
        assert (one["large_counts"].item(), one["large_counts"].dtype) == (1.0, torch.float32)
        assert one["bytes"] == 200.0
        assert one["sum"] == [6.0, 60.0]
        assert one["max"] == [3.0, 30.0]
        assert one["min"] == [1.0, 10.0]
        assert one["bool"] == [True, False]
        assert one["half"] is torch.bfloat16
        assert one["gather"] == [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]
        assert one["scalars"] == [0, 1, 2]
        assert one["grad"] == [2.0 * rank * 3]
        assert one["batches"] == 5
        assert isinstance(one["batches"], int)
        assert one["endless"] == float("inf")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.spare = nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.spare(self.layers(batch)) - batch.sum(1, keepdim=True)).square().mean()

    def forgetful_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()


def test_accumulating_on_two_ranks_equals_twice_the_batch_on_one() -> None:
    data = torch.randn(
        6, 2, 2, 4, 6, generator=torch.Generator().manual_seed(0)
    )  # step, micro-batch, rank, row, column

    def train(world: World) -> list[torch.Tensor]:
        torch.manual_seed(world.rank)  # rank 0's weights must win
        net = Net()
        ddp = wrap(net, net.training_step, world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in data:
            optimizer.zero_grad()
            for number, micro in enumerate(step):
                ddp.require_backward_grad_sync = number == 1
                (ddp(micro[world.rank]) / 2).backward()
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    torch.manual_seed(0)
    alone = Net()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in data:
        optimizer.zero_grad()
        for micro in step:
            (alone.training_step(micro.reshape(8, 6)) / 2).backward()
        optimizer.step()

    results = ranks(2, train)
    for parameter, first, second in zip(alone.parameters(), *results, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, parameter.detach(), rtol=0, atol=2e-6)


def test_step_that_calls_backward_itself() -> None:
    """Two networks, each with a backward of its own inside of the step, as a GAN's."""

    def train(world: World) -> list[list[float]]:
        torch.manual_seed(0)
        net = nn.ModuleDict({"g": nn.Linear(2, 1), "d": nn.Linear(2, 1)})
        x = torch.full((1, 2), world.rank + 1.0)

        def step() -> None:
            for name in ("g", "d"):
                loss = net[name](x).sum()
                before_backward(ddp, loss)
                loss.backward()

        ddp = wrap(net, step, world, find_unused_parameters=True)
        for _ in range(2):
            net.zero_grad()
            manual_forward(ddp)
        return [net[name].weight.grad.flatten().tolist() for name in ("g", "d")]

    assert ranks(2, train) == [[[1.5, 1.5], [1.5, 1.5]]] * 2


def test_unused_parameters_are_named() -> None:
    def train(world: World) -> str:
        net = Net()
        ddp = wrap(net, net.forgetful_step, world)
        assert explained(ddp, RuntimeError("something else")) is None
        try:
            for _ in range(2):
                ddp(torch.ones(2, 6)).backward()
        except RuntimeError as error:
            return str(explained(ddp, error))
        return ""

    for said in ranks(2, train):
        assert "spare.weight, spare.bias." in said
        assert "ddp_find_unused_parameters_true" in said

    def train_all(world: World) -> int:
        net = Net()
        ddp = wrap(net, net.forgetful_step, world, find_unused_parameters=True)
        for _ in range(3):
            ddp(torch.ones(2, 6)).backward()
        return 3

    assert ranks(2, train_all) == [3, 3]


def test_frozen_model_and_batchnorm_on_cpu_are_refused() -> None:
    world = World(size=2)
    with pytest.raises(HastenError, match="requires a gradient"):
        wrap(Net().requires_grad_(False), len, world)
    with pytest.raises(HastenError, match="GPUs only"):
        sync_batchnorm(nn.BatchNorm1d(2), world)
    model = nn.BatchNorm1d(2)
    assert sync_batchnorm(model, World()) is model


class OwnLoader(DataLoader[Any]):
    """Takes other arguments than DataLoader does."""

    def __init__(self, name: str) -> None:
        super().__init__(TensorDataset(torch.arange(11)), batch_size=2, shuffle=True)
        self.name = name


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def read(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in (batch[0] if isinstance(batch, list) else batch)]


def shares(loader: Any, size: int = 2, epoch: int = 0, **options: Any) -> list[list[int]]:
    got = []
    for rank in range(size):
        own, message = distributed_loader(loader, World(rank=rank, size=size), **options)
        assert message is None
        set_epoch(own, epoch)
        got.append(read(own))
    return got


def test_shares_of_a_loader() -> None:
    numbers: Dataset[Any] = TensorDataset(torch.arange(11))
    ordered = DataLoader(numbers, batch_size=2)
    assert shares(ordered, train=True) == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0]]
    assert shares(ordered, train=False, repeat=False) == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9]]
    assert shares(DataLoader(numbers, batch_size=2, shuffle=True), train=False)[0] == [0, 2, 4, 6, 8, 10]

    first = shares(OwnLoader("mine"), train=True, seed=3)
    assert set(first[0]) | set(first[1]) == set(range(11))
    assert [len(part) for part in first] == [6, 6]
    assert first != shares(OwnLoader("mine"), train=True, seed=3, epoch=1)
    assert first == shares(OwnLoader("mine"), train=True, seed=3)

    loader = OwnLoader("mine")
    own, _ = distributed_loader(loader, World(rank=0, size=2), train=True)
    assert (own.name, len(own), len(loader)) == ("mine", 3, 6)
    assert sorted(read(loader)) == list(range(11))  # the loader given is as it was
    assert distributed_loader(own, World(rank=0, size=2), train=True) == (own, None)
    assert distributed_loader(loader, World(), train=True) == (loader, None)


def test_share_of_a_sampler_of_the_users_own() -> None:
    sampler = WeightedRandomSampler([0.0] * 5 + [1.0] * 6, 6, replacement=False)
    loader = DataLoader(TensorDataset(torch.arange(11)), batch_size=2, sampler=sampler)
    one, two = shares(loader, train=True)
    assert sorted(one + two) == [5, 6, 7, 8, 9, 10]  # the ranks draw the same, though the global state moves between
    assert [one, two] != shares(loader, train=True, epoch=1)


def test_loaders_that_cannot_be_shared_are_left_alone_and_said() -> None:
    world = World(rank=0, size=2)
    stream = DataLoader(Stream())
    own = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=[[0, 1], [2, 3]])
    for loader, word in ((stream, "IterableDataset"), (own, "batch sampler"), ([1, 2], "list")):
        same, message = distributed_loader(loader, world, train=True)
        assert same is loader
        assert word in message


def test_spawned_rank_that_ends_is_named() -> None:
    def end(how: str) -> None:
        world = World.from_environment("gloo", timeout=60)
        if world.rank == 1:
            if how == "raise":
                raise ValueError("the loss is gone")
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    with pytest.raises(HastenError, match=r"(?s)Rank 1 of 3 ended with exit code 1.*ValueError: the loss is gone"):
        spawn(end, 3, ["raise"], strategy="ddp_fork")
    with pytest.raises(HastenError, match=r"Rank 1 of 3 was ended by signal 9"):
        spawn(end, 3, ["kill"], strategy="ddp_fork")
    with pytest.raises(HastenError, match="starts no function"):
        spawn(end, 3, strategy="ddp")


def test_fork_of_a_process_that_has_used_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weights = torch.randn(400, 400, requires_grad=True)
        (weights @ weights).relu().sum().backward()

        def work(world: World) -> int:
            other = torch.randn(400, 400, requires_grad=True)
            (other @ other).relu().sum().backward()
            return torch.get_num_threads()

        assert ranks(2, work) == [1, 1]
    finally:
        torch.set_num_threads(before)


def rank_and_size() -> tuple[int, int, torch.Tensor]:
    world = World.from_environment("gloo")
    return world.rank, world.size, world.gather(torch.tensor(world.rank))


@pytest.mark.slow  # spawned ranks import torch once more
def test_spawn_in_fresh_pythons() -> None:
    rank, size, gathered = spawn(rank_and_size, 2, strategy="ddp_spawn")
    assert (rank, size, gathered.tolist()) == (0, 2, [0, 1])


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no Linux")
def test_the_store_of_a_machine_listens_to_that_machine_alone() -> None:
    """And by IPv4: for the mapped address of an IPv6 listener, torch asks the DNS for a name of each rank."""
    store = serve_store(2)
    listening = {
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{store.port:04X}") and line.split()[3] == "0A"
    }
    assert listening == {f"0100007F:{store.port:04X}"}
    store.set("said", "something")
    assert TCPStore("127.0.0.1", store.port, 2, is_master=False).get("said") == b"something"


def test_a_process_group_of_somebody_else_is_used_with_its_store(tmp_path: Path) -> None:
    """Ray Train opens one, a script may: SIGTERM to one rank must reach the others there, too."""

    def run() -> tuple[Any, ...]:
        rank = int(os.environ["RANK"])
        torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=rank, world_size=2)
        world = World.from_environment("gloo")
        assert world.store is not None
        world.store.set(f"said/{rank}", str(rank))
        said = [world.store.get(f"said/{one}") for one in range(2)]
        world.close()  # not ours: it stays open
        return said, torch.distributed.is_initialized(), world.sum(torch.tensor(1)).item()

    assert spawn(run, 2, strategy="ddp_fork") == ([b"0", b"1"], True, 2)


def test_groups_of_neighbors() -> None:
    groups = [World(rank=rank, size=6).in_groups(3) for rank in range(6)]
    assert [(group.rank, group.size) for group in groups] == [(0, 2)] * 3 + [(1, 2)] * 3
