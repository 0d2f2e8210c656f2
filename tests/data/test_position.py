"""A training that stops anywhere and goes on sees what an uninterrupted plain loop sees, bit by bit."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import signal
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from hasten.data.position import Position
from tests.data import position_trainings as trainings
from tests.data.position_trainings import Plain, Training, build, packed, plain, unpacked
from tests.taps.forks import forked


@contextlib.contextmanager
def doubts():
    """The warnings of `resume`."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.extend(str(w.message) for w in caught if str(w.message).startswith("resume:"))


def stopped(case, epochs, stop, limit=None):
    training = Training(case, epochs, limit)
    seen = training.run(stop)
    return list(seen), unpacked(packed(training.checkpoint()))


def check(case, epochs=3, stops=(4, 9), limit=None, doubted=False, exact=True):
    """Stop (for a second time, if there are more), go on, and compare with a plain loop.

    If not `exact`, a warning is as good as the same batches.
    """
    wanted = plain(case, epochs, limit)
    assert Training(case, epochs, limit).run() == wanted, "draws differ even without a stop"
    seen, checkpoint = stopped(case, epochs, stops[0], limit)
    warned = False
    for stop in [*(b - a for a, b in itertools.pairwise(stops)), None]:
        with doubts() as found:
            training = Training(case, epochs, limit, checkpoint)
        seen += training.run(stop)
        checkpoint = unpacked(packed(training.checkpoint()))
        warned |= bool(found)
        assert doubted or not (exact and found), found
    assert seen == wanted or (warned and not exact)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    dataset=st.sampled_from(["plain", "drawing", "own", "stateful_map", "tensors"]),
    sampler=st.sampled_from(sorted(trainings.SAMPLERS)),
    stateful=st.booleans(),
    stop=st.integers(0, 20),
    again=st.integers(0, 10),
    limit=st.sampled_from([None, 2]),
)
def test_without_workers(dataset, sampler, stateful, stop, again, limit):
    check({"dataset": dataset, "sampler": sampler, "stateful": stateful}, 3, (stop, stop + again), limit)


# Each pair of these; two workers are those of the streams, and of passes that are left early.
@pytest.mark.parametrize(
    ("dataset", "sampler", "stops", "workers", "persistent"),
    [
        ("drawing", "shuffle", (4, 10), 1, False),
        ("drawing", "shuffle", (4, 10), 3, True),
        ("own", "random_own", (9, 11), 1, True),
        ("own", "random_own", (9, 11), 3, False),
        ("sometimes", "weighted", (3, 9), 1, False),
        ("sometimes", "weighted", (3, 9), 3, True),
    ],
)
def test_workers_that_draw(dataset, sampler, stops, workers, persistent):
    init = trainings.init if dataset == "drawing" else None
    case = {"dataset": dataset, "sampler": sampler, "num_workers": workers, "persistent_workers": persistent}
    check({**case, "worker_init_fn": init}, 2, stops)


@pytest.mark.parametrize("stops", [(2, 3), (3, 5), (4, 6)])
def test_passes_that_the_training_leaves_early(stops):
    check({"dataset": "drawing", "sampler": "shuffle", "num_workers": 2, "persistent_workers": True}, 3, stops, limit=2)
    check({"dataset": "sharded", "num_workers": 2, "persistent_workers": True}, 3, stops, limit=2)


@pytest.mark.parametrize("dataset", ["stateful_stream", "batches", "stateful_batches", "sharded", "buffer"])
@pytest.mark.parametrize("stops", [(0, 1), (3, 4), (9, 13)])
def test_streams_without_workers(dataset, stops):
    if dataset == "buffer":  # remembers draws made between the training's: said, not exact
        _, checkpoint = stopped({"dataset": "buffer"}, 1, 4)
        with doubts() as found:
            Training({"dataset": "buffer"}, 1, checkpoint=checkpoint)
        assert "process-wide random generators" in found[0]
        return
    check({"dataset": dataset}, 3, stops, doubted=dataset == "sharded")


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("dataset", "stateful"),
    [("sharded", False), ("buffer", False), ("sharded", True), ("stateful_stream", True), ("stateful_map", True)],
)
def test_streams_with_workers(dataset, stateful, persistent):
    case = {"dataset": dataset, "num_workers": 2, "persistent_workers": persistent, "stateful": stateful}
    check(case, 2, (4,) if persistent else (3, 9))


def test_a_stateful_loader_that_takes_snapshots_seldom():
    case = {"dataset": "stateful_stream", "num_workers": 2, "stateful": True, "snapshot_every_n_steps": 3}
    check(case, 1, (2, 5))


@pytest.mark.slow  # many examples, each with worker processes
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_everything_with_workers(data):
    dataset = data.draw(st.sampled_from(sorted(set(trainings.DATASETS) - {"stateful_map"})))
    streams = dataset in ("sharded", "stateful_stream", "buffer")
    case = {
        "dataset": dataset,
        "sampler": None if streams else data.draw(st.sampled_from(sorted(trainings.SAMPLERS))),
        "num_workers": data.draw(st.integers(1, 3)),
        "persistent_workers": data.draw(st.booleans()),
        "stateful": data.draw(st.booleans()),
        "prefetch_factor": data.draw(st.integers(1, 3)),
    }
    stop = data.draw(st.integers(0, 20))
    stops, limit = (stop, stop + data.draw(st.integers(0, 9))), data.draw(st.sampled_from([None, 3]))
    # torchdata does not know where workers that stay begin, see below.
    exact = not (case["stateful"] and streams and case["persistent_workers"] and case["num_workers"] > 1)
    check(case, 3, stops, limit, exact=exact)


def test_a_state_that_torchdata_cannot_take_is_a_warning():
    """In a later pass of workers that stay, before each has given a batch."""
    case = {"dataset": "stateful_stream", "num_workers": 3, "persistent_workers": True, "stateful": True}
    for stop, warned in ((9, True), (10, True), (11, False)):  # batches 1 to 3 of the third pass
        _, checkpoint = stopped(case, 3, stop, limit=3)
        with doubts() as found:
            Training(case, 3, 3, checkpoint).run()
        assert [("before each worker had given a batch" in text) for text in found] == [True] * warned


def test_a_pass_that_is_cut_after_a_worker_has_ended():
    """A worker without samples answers once, and never again in this pass: nobody waits for it."""
    case = {"dataset": "sharded", "num_workers": 3, "persistent_workers": True, "prefetch_factor": 3}
    for stateful in (False, True):
        training = Training({**case, "stateful": stateful}, 4, limit=3)
        assert training.run() == plain({**case, "stateful": stateful}, 4, limit=3)


@pytest.mark.parametrize(
    ("case", "stop"),
    [
        ({"dataset": "drawing", "sampler": "shuffle"}, 13),
        ({"dataset": "drawing", "sampler": "shuffle", "num_workers": 2, "persistent_workers": True}, 13),
    ],
)
def test_in_a_new_process_after_a_kill(case, stop, tmp_path):
    def run(what):
        done = forked(tmp_path, trainings.__file__, json.dumps(case), "3", what, str(tmp_path))
        return done.code, json.loads((tmp_path / "seen.json").read_text())

    code, seen = run(str(stop))
    assert code == -signal.SIGKILL
    code, rest = run("resume")
    assert code == 0
    assert seen + rest == json.loads(json.dumps(plain(case, 3)))


@pytest.mark.slow  # spawned workers import torch once more
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(method):
    case = {"dataset": "own_numpy", "sampler": "shuffle", "num_workers": 2, "multiprocessing_context": method}
    check({**case, "worker_init_fn": trainings.init}, 1, (3,))


def test_nothing_stands_between_the_loop_and_torchs_iterator():
    loader = build("plain", "shuffle")
    assert type(Position(loader).begin()) is _SingleProcessDataLoaderIter
    _, checkpoint = stopped({"sampler": "shuffle"}, 1, 2)
    assert type(Training({"sampler": "shuffle"}, 1, checkpoint=checkpoint).iterator) is _SingleProcessDataLoaderIter


def test_the_loader_is_left_as_it_was():
    loader = build("drawing", "shuffle", num_workers=1, worker_init_fn=trainings.init)
    before = dict(vars(loader))
    list(Position(loader).begin())
    assert vars(loader) == before


def test_workers_that_draw_nothing_send_nothing():
    training = Training({"sampler": "shuffle", "num_workers": 2}, 1)
    training.run(4)
    assert training.checkpoint()["position"]["workers"]["states"] == {}


def test_rows_of_tensors_keep_their_collate_function():
    iterator = Position(build("tensors", "shuffle", num_workers=1)).begin()
    assert iterator._collate_fn is default_collate


def test_workers_end_with_their_iterator():
    position = Position(build("drawing", "shuffle", num_workers=1))
    iterator = position.begin()
    next(iterator)
    [worker] = iterator._workers
    gc.disable()
    try:
        del iterator
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_a_state_is_small():
    position = Position(DataLoader(range(1_000_000), batch_size=10, shuffle=True))
    iterator = position.begin()
    next(iterator)
    assert len(packed(position.state_dict(1))) < 50_000


def test_a_loop_that_reads_ahead():
    """A prefetcher holds batches that the training has not seen."""
    case = {"dataset": "drawing", "sampler": "shuffle", "num_workers": 2}
    wanted = [batch for _, batch, _ in plain(case, 1)][:-1]
    for ahead in (1, 3):
        trainings.seed(1)
        position = Position(build(**case))
        iterator = position.begin()
        for _ in range(2 + ahead):
            next(iterator)
        state = position.state_dict(2)
        again = Position(build(**case)).resume(state)
        assert [batch.tolist() for batch in again] == wanted[2:]


class Broken(Plain):
    def __getitem__(self, index):
        if index == 4:
            raise KeyError("sample 4 is broken")
        return index


def test_errors_of_workers_come_through():
    iterator = Position(DataLoader(Broken(), batch_size=2, num_workers=1)).begin()
    assert next(iterator).tolist() == [0, 1]
    next(iterator)
    with pytest.raises(KeyError, match="sample 4 is broken"):
        next(iterator)


@pytest.mark.parametrize(("then", "now"), [(2, 0), (0, 2), (2, 3)])
def test_another_number_of_workers_is_exact_if_none_drew(then, now):
    before, after = ({"sampler": "shuffle", "num_workers": number} for number in (then, now))
    seen, checkpoint = stopped(before, 2, 4)
    with doubts() as found:
        training = Training(after, 2, checkpoint=checkpoint)
    assert seen + training.run() == plain(before, 2)
    assert bool(found) == (then == 0)  # whether the dataset draws in the main process is not known


def test_another_number_of_workers_that_drew_is_said():
    case = {"dataset": "drawing", "sampler": "shuffle"}
    seen, checkpoint = stopped({**case, "num_workers": 2}, 1, 4)
    with doubts() as found:
        rest = Training({**case, "num_workers": 1}, 1, checkpoint=checkpoint).run()
    assert "num_workers was 2 and is 1" in found[0]
    wanted = plain({**case, "num_workers": 2}, 1)
    indices = [[[row[0] for row in batch] for _, batch, _ in part if batch != "end"] for part in (seen + rest, wanted)]
    assert indices[0] == indices[1]  # the samples are the right ones all the same


def test_another_batch_size_or_dataset_is_said():
    _, checkpoint = stopped({"sampler": "shuffle"}, 1, 4)
    with doubts() as found:
        rest = Training({"sampler": "shuffle", "batch_size": 10}, 1, checkpoint=checkpoint).run()
    assert [batch for _, batch, _ in rest] == ["end"]
    assert "batch_size was 3 and is 10" in found[0]
    assert "fewer than the 4 batches" in found[1]
    position = Position(DataLoader(range(30), batch_size=3, shuffle=True))
    with doubts() as found:
        position.resume(checkpoint["position"])
    assert "samples was 23 and is 30" in found[0]


def test_workers_that_were_running_before_are_said():
    def loader():
        return build("drawing", "shuffle", num_workers=1, persistent_workers=True)

    used = loader()
    list(used)
    position = Position(used)
    next(position.begin())
    with doubts() as found:
        Position(loader()).resume(position.state_dict(1))
    assert "started before hasten saw the loader" in " ".join(found)


@pytest.mark.parametrize(("stop", "stateful"), [(4, False), (9, True)])
def test_what_a_dataset_keeps_in_its_workers_is_said_to_be_lost(stop, stateful):
    case = {"dataset": "stateful_map", "num_workers": 1, "persistent_workers": True, "stateful": stateful}
    _, checkpoint = stopped(case, 2, stop)
    with doubts() as found:
        Training(case, 2, checkpoint=checkpoint)
    assert "starts afresh" in found[0]


def test_a_state_between_passes_is_kept_until_the_next_pass():
    case = {"dataset": "drawing", "sampler": "shuffle", "num_workers": 2, "persistent_workers": True}
    seen, checkpoint = stopped(case, 2, 9)
    assert not checkpoint["position"]["open"]
    again = Training(case, 2, checkpoint=checkpoint).checkpoint()
    assert seen + Training(case, 2, checkpoint=again).run() == plain(case, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_pass_the_pin_memory_thread():
    check({"dataset": "drawing", "sampler": "shuffle", "num_workers": 2, "pin_memory": True}, 2, (4, 10))
