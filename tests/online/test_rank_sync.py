"""Two real ranks of one training under --auto: both switch at the same steps, or neither does."""

from __future__ import annotations

import itertools
import json
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hasten.online import rank_sync
from hasten.online.rank_sync import FollowingRank, LeadingBoard, LeadingRank, Slots
from hasten.taps.config import RunConfig, environment
from hasten.techniques import Effect, Liveness, Resource, Technique
from tests.online.test_auto import PLANTED, options
from tests.taps.forks import launched
from tests.taps.scripts import PYTHON, Done

TRAIN = """
import json
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
class Model(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.02 + sum(changes.values()))
        return super().forward(x)
model = WRAPPED(Model(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
loader = DataLoader(TensorDataset(torch.randn(200, 4)), batch_size=4)
until, left, seen = time.monotonic() + 60, 20, []
while left:
    for (x,) in loader:
        both = [None, None]
        dist.all_gather_object(both, (sorted(changes), time.monotonic() > until, os.path.exists("hasten-auto.toml")))
        seen.append([one[0] for one in both])
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if both[0][1] or both[0][2] or len(seen) >= MOST:
            left -= 1
            if not left:
                break
if rank == 0:
    json.dump(seen, open("seen.json", "w"))
dist.barrier()
dist.destroy_process_group()
"""


def tuned(folder: Path, *planted: str, wrapped: str = "DistributedDataParallel", most: int = 10_000) -> Done:
    """Train in two ranks, as `hasten run --auto torchrun` has them started."""
    train = TRAIN.replace("WRAPPED", wrapped).replace("MOST", str(most))
    (folder / "plants.py").write_text("\n".join([PLANTED, *planted]))
    (folder / "sitecustomize.py").write_text("import plants")
    (folder / "train.py").write_text("\n".join(["from plants import changes, os, time", train]))
    config = RunConfig(command=("train.py",), auto=options(folder))
    launch = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    return launched(folder, *launch, **environment(config, {"PYTHONPATH": str(folder), "GLOO_SOCKET_IFNAME": "lo"}))


def seen(folder: Path) -> list[list[list[str]]]:
    """What each of the two ranks had on, step by step."""
    return list(json.loads((folder / "seen.json").read_text()))


def test_ranks_hold_the_same_plan_in_every_step(tmp_path: Path) -> None:
    fails_in_one = """planted('fails', 0.0)
if os.environ.get('RANK') == '1':
    CATALOGUE['fails'].on = lambda self: 1 / 0"""
    stumbles_in_one = """planted('stumbles', -0.001, Liveness.PASS)
if os.environ.get('RANK') == '1':
    CATALOGUE['stumbles'].fetcher = lambda self, fetcher: 1 / 0"""
    done = tuned(tmp_path, "planted('helps', -0.015)", "planted('harms', 0.03)", fails_in_one, stumbles_in_one)
    assert done.code == 0, done.err
    steps = seen(tmp_path)
    assert all(set(first) - {"stumbles"} == set(second) - {"stumbles"} for first, second in steps)
    assert any(first != second for first, second in steps), "inside a step rank 1 alone was without it"
    assert {"helps", "harms"} in [set(first) for first, _ in steps]
    assert steps[-1] == [["helps"], ["helps"]]
    assert not any("fails" in first for first, _ in steps), "it does not work in one of them"
    assert re.search(r"auto: settled after \d+ steps: helps = true", done.err)
    assert done.err.count("auto: settled") == 1, "one of them says so"


def test_ranks_that_may_differ_are_left_alone(tmp_path: Path) -> None:
    done = tuned(tmp_path, "planted('helps', -0.015)", wrapped="", most=40)
    assert done.code == 0, done.err
    assert "auto: the run is left alone: its processes train without DistributedDataParallel" in done.err
    assert {str(both) for both in seen(tmp_path)} == {"[[], []]"}


class Planted(Technique):
    """Does nothing."""

    name = "planted"
    effect, relieves, liveness = Effect.ROUNDING, Resource.COMPUTE, Liveness.STEP


class Counting:
    may_rest = True


class Deciding:
    """Stands for rank 0's search, which has nothing to say yet."""

    why = ""

    def on_step(self, steps: int) -> int | None:
        return None

    def abandon(self, why: str) -> None:
        self.why = why


@pytest.fixture
def ranks() -> tuple[LeadingBoard, LeadingBoard, FollowingRank]:
    """Rank 0's board and rank 1's, which share a store and wait for each other for a second."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    leads, follows = LeadingBoard([Planted(True)]), LeadingBoard([Planted(True)])
    leads.lead(Slots(store, 1.0), 2)
    recorder: Any = Counting()
    following = FollowingRank(follows, recorder, 1, lambda: None)
    following._slots = Slots(store, 1.0)
    return leads, follows, following


def test_a_rank_that_waits_in_vain_ends_the_switching_for_all(ranks: Any) -> None:
    leads, follows, following = ranks
    assert following.on_step(1) > 10_000, "rank 0 did not come"
    leads.switch({"planted": True})
    assert (leads.on, follows.on) == ({}, {})
    assert "waited too long" in leads.lost_reason


def test_a_rank_that_does_not_answer_finds_all_off_when_it_comes(ranks: Any) -> None:
    leads, follows, following = ranks
    leads.switch({"planted": True})
    assert "did not answer in time" in leads.lost_reason
    following.on_step(1)
    assert (leads.on, follows.on) == ({}, {})


def obeyed(leads: LeadingBoard, following: FollowingRank, step: int) -> None:
    """Both ranks come to the end of a step."""
    other = threading.Thread(target=following.on_step, args=(step,))
    other.start()
    leads.go_on(step + 1)
    other.join()


def switched(leads: LeadingBoard, following: FollowingRank) -> None:
    """Both ranks have the technique on, and train on."""
    other = threading.Thread(target=following.on_step, args=(1,))
    other.start()
    leads.switch({"planted": True})
    leads.go_on(2)
    other.join()


def test_what_fails_inside_a_step_of_another_rank_is_off_in_all(ranks: Any) -> None:
    leads, follows, following = ranks
    switched(leads, following)
    follows.failed(follows.techniques[0], OSError("no more processes"))
    assert (leads.on, follows.on) == ({"planted": True}, {}), "rank 0 cannot know yet"
    obeyed(leads, following, 2)  # it may have let the others train on before it could hear of it
    obeyed(leads, following, 3)
    assert (leads.on, follows.on, leads.lost_reason) == ({}, {}, "")
    assert "another rank" in leads.broken["planted"]
    obeyed(leads, following, 4)
    assert leads.lost_reason == "", "nobody is out of step with the other's commands"


def test_what_fails_inside_a_step_of_rank_0_is_off_in_all(ranks: Any) -> None:
    leads, follows, following = ranks
    switched(leads, following)
    leads.failed(leads.techniques[0], OSError("no more processes"))
    obeyed(leads, following, 2)
    assert (leads.on, follows.on, leads.lost_reason) == ({}, {}, "")
    assert "another rank" in follows.broken["planted"]


def test_what_fails_inside_a_step_comes_on_no_more(ranks: Any) -> None:
    leads, follows, following = ranks
    switched(leads, following)
    follows.failed(follows.techniques[0], OSError("no more processes"))
    other = threading.Thread(target=following.on_step, args=(2,))
    other.start()
    leads.switch({})
    leads.switch({"planted": True})
    leads.go_on(3)
    other.join()
    assert (leads.on, follows.on, leads.lost_reason) == ({}, {}, "")


def test_a_switch_is_made_in_all_ranks(ranks: Any) -> None:
    leads, follows, following = ranks
    other = threading.Thread(target=following.on_step, args=(1,))
    other.start()
    leads.switch({"planted": True})
    leads.go_on(7)
    other.join()
    assert (leads.on, follows.on, leads.lost_reason) == ({"planted": True}, {"planted": True}, "")
    assert following.on_step(3) == 7, "it need not ask before"


def test_ranks_that_were_started_again_take_no_commands_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun hands them the same store: rank 1 would switch as the killed rank 0 said, and rank 0 would not."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - a backend without anybody on the other side

    store = dist.HashStore()
    for generation in ("first", "second"):
        for rank in (0, 1):
            monkeypatch.setattr(rank_sync, "_SEARCHES", itertools.count())
            dist.init_process_group("fake", store=store, rank=rank, world_size=2)
            try:
                board, auto = LeadingBoard([Planted(True)]), Deciding()
                if rank == 0:
                    LeadingRank(auto, board).on_step(1)  # type: ignore[arg-type]
                    assert (board.slots is None, bool(auto.why)) == ((generation == "second",) * 2)
                else:
                    assert (rank_sync.slots() is None) == (generation == "second")
            finally:
                dist.destroy_process_group()
