"""What may go wrong around a training: damaged files, full disks, two runs at once, NaN, workers that die."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import time

import pytest
import torch

import hasten
from hasten.trainer.checkpoint import latest_good, verify
from tests.own_mounts import in_own_mounts
from tests.taps.scripts import write
from tests.trainer.resume.processes import assert_same
from tests.trainer.resume.trainings import Net, loaders

STEPS = {"every_n_train_steps": 3}


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    return nursery.outcome({"root": str(tmp_path_factory.mktemp("whole") / "run")})


def flip(path):
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def cut(path):
    os.truncate(path, random.randrange(path.stat().st_size))


@pytest.mark.parametrize("by", ["last", "path"])
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(nursery, tmp_path, whole, damage, by):
    spec = {"root": str(tmp_path / "run"), "checkpoints": [STEPS]}
    nursery.run({**spec, "acts": [{"what": "kill", "hook": "on_train_batch_end", "nth": 20}]}, -9)
    newest, _ = latest_good(tmp_path / "run")
    damage(newest)
    good, _ = latest_good(tmp_path / "run")
    assert good not in (None, newest)
    out = tmp_path / "out.pt"
    path = "last" if by == "last" else str(newest)
    process = nursery.run({**spec, "ckpt_path": path, "out": str(out)})
    said = process.said()
    assert str(newest) in said
    assert str(good) in said
    assert_same(whole, torch.load(out, weights_only=False))


def test_only_damaged_ones(nursery, tmp_path):
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{"every_n_train_steps": 20}]}
    nursery.run({**spec, "acts": [{"what": "kill", "hook": "on_train_batch_end", "nth": 22}]}, -9)
    (only,) = (tmp_path / "run").glob("*.ckpt")
    flip(only)
    process = nursery.run({**spec, "ckpt_path": str(only)}, 1)
    assert re.search(rf"CheckpointError: .*{re.escape(only.name)}", process.said())


def trainer(tmp_path, **flags):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return hasten.Trainer(default_root_dir=tmp_path, **{"max_epochs": 1, **quiet, **flags})


def test_weights_only_is_refused_for_training(tmp_path):
    one = trainer(tmp_path)
    one.fit(Net(), *loaders({}))
    one.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(KeyError, match="weights only") as caught:
        trainer(tmp_path, max_epochs=2).fit(Net(), *loaders({}), ckpt_path=tmp_path / "weights.ckpt")
    assert "load_from_checkpoint" in str(caught.value)
    trainer(tmp_path).validate(Net(), loaders({})[1], ckpt_path=tmp_path / "weights.ckpt", verbose=False)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt") as caught:
        trainer(tmp_path).fit(Net(), *loaders({}), ckpt_path=tmp_path / "nowhere.ckpt")
    assert isinstance(caught.value, hasten.HastenError)


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["zip", "pickle", "inside"])
def test_loading_runs_no_code(tmp_path, kind):
    mark, path = tmp_path / "ran", tmp_path / "evil.ckpt"
    state = {"state_dict": Net().state_dict(), "hyper_parameters": Evil(mark), "epoch": 0, "global_step": 0}
    if kind == "zip":
        torch.save(state, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        one = trainer(tmp_path)
        one.fit(Net(), *loaders({}))
        state = one.checkpointing.collected()
        state["evil"] = Evil(mark)
        from hasten.trainer.checkpoint import write

        assert write(path, state)  # says that it left something out
    for load in (
        lambda: trainer(tmp_path, max_epochs=2).fit(Net(), *loaders({}), ckpt_path=path),
        lambda: trainer(tmp_path, max_epochs=2).fit(Net(), *loaders({}), ckpt_path=path, weights_only=False),
        lambda: trainer(tmp_path).validate(Net(), loaders({})[1], ckpt_path=path, verbose=False),
        lambda: Net.load_from_checkpoint(path),
    ):
        if kind == "inside":
            load()
        else:
            with pytest.raises(hasten.HastenError, match=r"evil\.ckpt"):
                load()
        assert not mark.exists()


# -- disks and folders ---------------------------------------------------------------------------------


TRAIN = """
    import json, sys
    from pathlib import Path
    from hasten.trainer.checkpoint import verify
    from tests.trainer.resume.trainings import run

    spec = json.loads(sys.argv[1])
    try:
        run(spec)
    finally:
        for path in Path(spec["root"]).glob("*.ckpt"):
            verify(path)
            print(path)
"""


def trained_in_own_mounts(folder, mount, spec):
    return in_own_mounts(write(folder, "train.py", TRAIN), mount, json.dumps(spec))


def test_a_full_disk_is_named_and_the_old_checkpoint_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    spec = {"root": str(disk), "checkpoints": [{"every_n_train_steps": 2}]}
    found = trained_in_own_mounts(tmp_path, f"mount -t tmpfs -o size=400k none {disk}", spec)
    assert found.code == 1, found.err
    assert "the disk is full" in found.err.splitlines()[-2] + found.err.splitlines()[-1]
    assert ".ckpt" in found.out


def test_a_read_only_folder_is_refused_before_the_first_step(tmp_path):
    marker = tmp_path / "stepped"
    folder = tmp_path / "run"
    folder.mkdir()
    act = {"what": "say", "hook": "on_train_batch_start", "nth": 1, "file": str(marker)}
    spec = {"root": str(folder), "checkpoints": [{}], "acts": [act]}
    found = trained_in_own_mounts(tmp_path, f"mount -t tmpfs -o ro none {folder}", spec)
    assert found.code == 1
    assert "read-only" in found.err
    assert str(folder) in found.err
    assert not marker.exists()


def test_two_runs_in_one_folder(nursery, tmp_path):
    spec = {"root": str(tmp_path / "run"), "checkpoints": [STEPS]}
    begun = tmp_path / "begun"
    act = {"what": "say", "hook": "on_train_batch_end", "nth": 4, "file": str(begun), "wait": 60}
    first = nursery.start({**spec, "acts": [act]})
    while not begun.exists() and not first.ended():
        time.sleep(0.01)
    second = nursery.run(spec, 1)
    assert "Another run is using" in second.said()
    assert f"process {first.pid}" in second.said()
    first.kill(9)
    assert first.wait() == -9
    nursery.run({**spec, "ckpt_path": "last"})  # what a killed run held is free


# -- trainings that go wrong ---------------------------------------------------------------------------


def spoilt(path):
    from hasten.trainer.checkpoint import read

    return any(not t.isfinite().all() for t in read(path)["state_dict"].values())


@pytest.mark.parametrize("watch", ["stop", "skip", None])
def test_nan_never_replaces_a_good_checkpoint(nursery, tmp_path, watch):
    spec = {
        "root": str(tmp_path / "run"),
        "checkpoints": [{"every_n_train_steps": 1, "save_top_k": 1, "save_last": True}],
        "module": {"nan_at": [10]},
        "callbacks": [watch] if watch else [],
    }
    out = tmp_path / "out.pt"
    said = nursery.run({**spec, "out": str(out)}).said()
    steps = torch.load(out, weights_only=False)["steps"][0]
    kept = sorted((tmp_path / "run").glob("*.ckpt"))
    assert len(kept) == 2
    for path in kept:
        verify(path)
        assert not spoilt(path)
    assert {"stop": steps == 11, "skip": steps == 45, None: steps == 45}[watch]
    assert ("NaNWatch: step 10" if watch else "the weights are not finite") in said


@pytest.mark.parametrize(("breaks", "expected"), [("raise", "sample 77 is broken"), ("kill", "worker")])
def test_a_worker_that_fails(nursery, tmp_path, breaks, expected):
    heard = tmp_path / "heard"
    spec = {
        "root": str(tmp_path / "run"),
        "checkpoints": [{"every_n_train_steps": 1}],
        "data": {"workers": 2, "breaks": breaks, "at": 77, "size": 400},
        "flags": {"max_epochs": 1},
        "heard": str(heard),
    }
    process = nursery.run(spec, 1)
    assert expected in process.said()
    assert expected in heard.read_text()
    saved, notes = latest_good(tmp_path / "run")
    assert saved is not None
    assert not notes
    assert not (tmp_path / "run" / ".hasten.lock").exists()
    # When the data is mended, the training goes on from there, as if nothing had been.
    mended = {**spec, "data": {"workers": 2, "size": 400}}
    whole = nursery.outcome({**mended, "root": str(tmp_path / "whole"), "checkpoints": []})
    assert_same(whole, nursery.outcome({**mended, "ckpt_path": "last"}))


def test_an_error_in_the_training_keeps_what_was_saved(nursery, tmp_path, whole):
    heard = tmp_path / "heard"
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{**STEPS, "save_on_exception": True}]}
    act = {"what": "raise", "hook": "on_train_batch_start", "nth": 18}
    nursery.run({**spec, "acts": [act], "heard": str(heard), "data": {"workers": 0}}, 1)
    assert heard.read_text() == "RuntimeError: the training itself failed"
    saved = sorted((tmp_path / "run").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert "step=17" in saved[-1].name  # what it was worth when it failed
    assert_same(whole, nursery.outcome({**spec, "ckpt_path": str(saved[-2])}))
