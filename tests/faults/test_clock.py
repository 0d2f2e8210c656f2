"""The clock is set back by a day while a training runs: it saves by time as before, and goes on exactly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hasten.trainer.checkpoint import latest_good, read
from tests.trainer.resume.processes import assert_same

ROOT = Path(__file__).resolve().parents[2]
# The machine's own clock is everybody's: this is put between a process and its C library.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    const char *file = getenv("CLOCK_SET_BACK");
    return file && !access(file, F_OK) ? -86400 : 0;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int (*plain)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = plain(id, at);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += shift();
    return result;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    out->tv_sec = at.tv_sec;
    out->tv_usec = at.tv_nsec / 1000;
    return 0;
}
"""
RUN = "import json, sys, time; from tests.trainer.resume.trainings import run; run(json.loads(sys.argv[1]))"


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here, so no clock can be put before a process (package gcc)")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=folder, check=True)
    return folder / "clock.so"


def train(spec, clock, set_back):
    env = {**os.environ, "LD_PRELOAD": str(clock), "CLOCK_SET_BACK": str(set_back), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, json.dumps(spec)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_the_clock_is_that_of_yesterday(clock, tmp_path):
    script = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"
    said = []
    for file in (tmp_path / "none", tmp_path):
        env = {**os.environ, "LD_PRELOAD": str(clock), "CLOCK_SET_BACK": str(file)}
        done = subprocess.run([sys.executable, "-S", "-c", script], env=env, capture_output=True, text=True, check=True)
        said.append([float(word) for word in done.stdout.split()])
    now, before = said
    assert now[0] - before[0] == pytest.approx(86400, abs=60)
    assert now[1] - before[1] == pytest.approx(86400, abs=60)
    assert before[2] >= now[2]


@pytest.mark.slow  # two Pythons that import torch
def test_a_run_begun_again_after_it_was_set_back_comes_after_the_one_before(clock, tmp_path):
    root, set_back = tmp_path / "run", tmp_path / "set-back"
    spec = {"root": str(root), "checkpoints": [{"every_n_train_steps": 4}]}
    for steps in (40, 10):
        done = train({**spec, "acts": [{"what": "kill", "hook": "on_train_batch_end", "nth": steps}]}, clock, set_back)
        assert done.returncode == -9, done.stderr
        set_back.touch()
    newest, _ = latest_good(root)
    assert read(newest)["global_step"] == 8


@pytest.mark.slow  # four Pythons that import torch
def test_set_back_while_it_trains(nursery, clock, tmp_path):
    data = {"data": {"size": 400}, "flags": {"max_epochs": 2}}
    whole = nursery.outcome({**data, "root": str(tmp_path / "whole")})
    root, set_back = tmp_path / "run", tmp_path / "set-back"
    spec = {**data, "root": str(root), "checkpoints": [{"seconds": 0.05}], "ckpt_path": "last"}
    rest = {"what": "say", "hook": "on_train_batch_end", "file": str(tmp_path / "rested"), "wait": 0.2}
    goes_back = {**rest, "nth": 10, "file": str(set_back)}  # the clock, as soon as this file is there
    killed = {"what": "kill", "hook": "on_train_batch_end", "nth": 40}
    done = train({**spec, "acts": [goes_back, {**rest, "nth": 30}, killed]}, clock, set_back)
    assert done.returncode == -9, done.stderr
    assert set_back.exists()
    newest, _ = latest_good(root)
    assert read(newest)["global_step"] > 20  # saved by time, though it is yesterday since step 10
    again = train({**spec, "acts": [{**rest, "nth": 5}, {**killed, "nth": 20}]}, clock, set_back)
    assert again.returncode == -9, again.stderr
    later, _ = latest_good(root)
    assert read(later)["global_step"] > read(newest)["global_step"]  # and not one from before, dated later
    done = train({**spec, "out": str(tmp_path / "out.pt")}, clock, set_back)
    assert done.returncode == 0, done.stderr
    assert_same(whole, torch.load(tmp_path / "out.pt", weights_only=False))
