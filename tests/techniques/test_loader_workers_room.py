"""Workers within what cores, memory and /dev/shm have room for: fewer as a pass begins, none where it runs short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.data import worker_room
from hasten.data.worker_room import WorkerRoom
from tests.evidence.test_cgroup import group
from tests.techniques.conftest import Train

TWO = {"num_workers": 2, "prefetch_factor": 2}
PLAN = "[techniques]\nloader_workers = {num_workers = 2, prefetch_factor = 2}\n"

LARGE = """
import json, os
import torch
from torch.utils.data import DataLoader, Dataset

class Large(Dataset):
    def __len__(self): return 24
    def __getitem__(self, index): return torch.full((1 << 18,), float(index)), os.getpid()

def collate(samples):  # torch's own moves batches to shared memory by itself
    return torch.stack([x for x, _ in samples]), torch.tensor([pid for _, pid in samples])

torch.manual_seed(0)
seen, own = [], []
for options in ({}, {"collate_fn": collate}):
    loader = DataLoader(Large(), 4, shuffle=True, **options)
    for epoch in range(2):
        batches = list(loader)  # 24 MB of /dev/shm, where workers make them
        seen.append([x[:, 0].tolist() for x, _ in batches])
        own.append([int(pid[0]) == os.getpid() for _, pid in batches])
        del batches
print(json.dumps({"seen": seen, "own": own}))
"""


def told(command: list[Any], folder: Path) -> tuple[dict[str, Any], str]:
    """What a script's last line says, and what stands on stderr."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder)
    if "mount" in done.stderr and "permission" in done.stderr.lower():
        pytest.skip("this user may not have a /dev/shm of their own")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_small_shared_memory_ends_no_training(tmp_path: Path) -> None:
    """20 MB, batches of 4 MB: what does not fit is made by the training, where torch would wait forever."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not have a /dev/shm of their own")
    (tmp_path / "train.py").write_text(LARGE)
    (tmp_path / "plan.toml").write_text(PLAN)
    plain, _ = told([sys.executable, "train.py"], tmp_path)
    inside = 'mount -t tmpfs -o size=20m tmpfs /dev/shm && exec "$0" -m hasten run --plan plan.toml train.py'
    changed, said = told(["unshare", "-m", "sh", "-c", inside, sys.executable], tmp_path)
    assert changed["seen"] == plain["seen"]
    assert [one[0] for one in changed["own"]] == [False] * 4, said  # each pass begins with workers
    assert [one[-1] for one in changed["own"]] == [True] * 4
    none = "the training makes the rest of this pass itself: /dev/shm has no room for a batch"
    assert said.count(none) == 2, said  # once for each loader; its size is said where a batch was whole before
    assert "2 of 2 workers, each 1 batch ahead, from this pass on: /dev/shm has 20 MB free" in said


def test_no_room_for_a_single_batch_is_said_once(tmp_path: Path) -> None:
    """3 MB: torch's collate fails in the first batch of the first pass, and later passes start no workers."""
    (tmp_path / "train.py").write_text(LARGE)
    (tmp_path / "plan.toml").write_text(PLAN)
    inside = 'mount -t tmpfs -o size=3m tmpfs /dev/shm && exec "$0" -m hasten run --plan plan.toml train.py'
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not have a /dev/shm of their own")
    changed, said = told(["unshare", "-m", "sh", "-c", inside, sys.executable], tmp_path)
    assert changed["own"] == [[True] * 6] * 4
    assert all(sorted(index for batch in one for index in batch) == list(range(24)) for one in changed["seen"])
    assert said.count("the training makes the rest of this pass itself") == 2, said
    none = "no worker, the training makes this pass itself: /dev/shm has 3.0 MB free, and a batch takes 4.0 MB of it"
    assert said.count(none) == 2, said


HUNGRY = """
    import json, os, random, time
    import psutil, torch
    from torch.utils.data import DataLoader, Dataset

    GROUP, LIMITED = "FOLDER", SQUEEZES
    def used():
        lines = open(os.path.join(GROUP, "memory.stat")).read().splitlines()
        taken = int(open(os.path.join(GROUP, "memory.usage_in_bytes")).read())
        stat = {name: int(size) for name, size in map(str.split, lines)}
        read = max(0, stat["total_active_file"] - stat["total_mapped_file"])
        return taken - stat["total_inactive_file"] - read
    def limit(size):
        if LIMITED: open(os.path.join(GROUP, "memory.limit_in_bytes"), "w").write(str(int(size)))
    open(os.path.join(GROUP, "cgroup.procs"), "w").write(str(os.getpid()))

    class Words(Dataset):
        def __init__(self): self.words = [f"some words that take memory, number {n}" for n in range(200_000)]
        def __len__(self): return 24
        def __getitem__(self, index):
            return sum(map(len, self.words)) + index, random.random(), torch.rand(()), os.getpid()

    ballast = b"1" * (256 << 20)  # a training has some memory of its own; what is kept free is a part of the limit
    torch.manual_seed(0), random.seed(0)
    loader, order, draws, makers, private = DataLoader(Words(), 2, shuffle=True), [], [], [], 0
    def read(at=-1, then=None):
        global private
        pids = []
        for number, (x, *drawn, pid) in enumerate(loader):
            order.append(x.tolist())
            draws.append([one.tolist() for one in drawn])
            pids.append(int(pid[0]) if int(pid[0]) != os.getpid() else 0)
            if number == at: then()
            if number == 8:
                private = max([private, *(one.memory_full_info().uss for one in psutil.Process().children())])
        makers.append(pids)

    def squeeze():
        time.sleep(1.1)  # it is looked at once a second
        limit(used() + (3 << 20))

    read()
    limit((used() + 1.5 * private) * 32 / 31)
    read()
    limit(1 << 40)
    read()
    read(2, squeeze)
    limit(1 << 40)
    read()
    order.append([random.random(), torch.rand(1).item()] * (len(set(map(str, draws))) == 60))
    torch.save({"order": order, "draws": draws, "makers": [len(set(one)) for one in makers],
                "own": [one.count(0) for one in makers]}, "left.pt")
"""


def test_memory_of_a_real_group_bounds_the_workers(train: Train) -> None:
    """Room for one and a half workers: one. Hardly any room in the middle of a pass: none for the rest of it.

    Samples, what they draw, and the training's own random numbers are those of a run that has room.
    """
    with group("memory") as folder:
        script = HUNGRY.replace("FOLDER", str(folder))
        roomy = train(script.replace("SQUEEZES", "False"), loader_workers=TWO)
        short = train(script.replace("SQUEEZES", "True"), loader_workers=TWO)
    assert roomy.code == short.code == 0, roomy.err + short.err
    assert roomy.left["makers"] == [2] * 5
    assert roomy.left["own"] == [0] * 5
    assert short.left["makers"] == [2, 1, 2, 3, 2], short.err
    assert short.left["own"][:3] == [0, 0, 0]
    assert 6 <= short.left["own"][3] <= 9  # of 12 batches
    assert short.left["own"][4] == 0
    assert short.left["order"] == roomy.left["order"]
    assert len(short.left["order"][-1]) == 2
    assert short.left["draws"] == roomy.left["draws"]
    assert "1 of 2 workers, each 2 batches ahead, from this pass on: " in short.err
    assert "of memory are free, and a worker takes" in short.err
    assert "the training makes the rest of this pass itself" in short.err


DRAWS = """
    import random
    import numpy as np, torch
    from torch.utils.data import DataLoader, Dataset
    class Draws(Dataset):
        def __len__(self): return 12
        def __getitem__(self, index): return index, random.random(), np.random.rand(), torch.rand(())
    torch.manual_seed(1); random.seed(1); np.random.seed(1)
    loader = DataLoader(Draws(), 2, shuffle=True)
    torch.save({"seen": [[part.tolist() for part in batch] for _ in range(2) for batch in loader]}, "left.pt")
"""


def test_any_number_of_workers_draws_the_same(train: Train) -> None:
    one, two, three = (train(DRAWS, loader_workers=number).left["seen"] for number in (1, 2, 3))
    assert one == two == three
    assert len({draw for batch in one for draw in batch[1]}) == 24


SIZES = st.integers(0, 1 << 40)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 64), SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(1, 8))
def test_what_is_counted_fits(workers, prefetch, cores, shm, free, total, batch, private, ranks):  # type: ignore[no-untyped-def]
    """Whatever the machine: never more than planned, and batches and workers of all its ranks fit into what is free."""
    with pytest.MonkeyPatch.context() as patch:  # machines that are not here
        patch.setattr(worker_room, "usable_cores", lambda: cores)
        patch.setattr(worker_room, "shm_free", lambda: shm)
        patch.setattr(worker_room, "memory_free", lambda: free)
        patch.setattr(worker_room, "memory_limit", lambda: total)
        patch.setattr(worker_room, "_unique", lambda pid: private)
        patch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        room = WorkerRoom(workers, prefetch)
        room.holds(batch)
        room.measure([os.getpid()])
        count, ahead, why = room.counts()
    assert 0 <= count <= min(workers, 2 * cores)
    assert 1 <= ahead <= prefetch
    assert (why == "") == ((count, ahead) == (workers, prefetch))
    if count:
        assert not batch or ranks * (count * ahead + 2) * batch <= shm
        assert ranks * count * (private + ahead * batch) <= free - min(total // 32, 1 << 30)
    assert f"for {ranks} ranks" in why or ranks == 1 or "free" not in why


SEVERAL = """
    import os, random
    import torch
    from torch.utils.data import DataLoader, Dataset
    class Draws(Dataset):
        def __init__(self, name): self.name = name
        def __len__(self): return 12
        def __getitem__(self, index): return self.name, index, random.random(), os.getpid()
    torch.manual_seed(1); random.seed(1)
    first, second = DataLoader(Draws("a"), 2, shuffle=True), DataLoader(Draws("b"), 3, shuffle=True)
    seen, elsewhere = [], []
    def note(batch):
        seen.append([batch[0], batch[1].tolist(), batch[2].tolist()])
        elsewhere.append(int(batch[3][0]) != os.getpid())
    for both in zip(first, second):  # two passes at a time
        for batch in both: note(batch)
    for batch in first:
        note(batch)
        first.num_workers, first.prefetch_factor = 1, 2  # the script's own, from its next pass on
    for batch in first: note(batch)
    first.num_workers, first.prefetch_factor = 0, None
    for outer in first:
        note(outer)
        for inner in second: note(inner)
        break
    torch.save({"seen": seen, "elsewhere": elsewhere, "last": random.random()}, "left.pt")
"""


def test_several_loaders_and_one_whose_workers_the_script_changes(train: Train) -> None:
    """Each pass is what one worker makes of it, whoever else is under way; torch's own workers stay torch's."""
    one, three = (train(SEVERAL, loader_workers=number) for number in (1, 3))
    assert one.code == three.code == 0, one.err + three.err
    assert all(three.left["elsewhere"])
    assert one.left == three.left
