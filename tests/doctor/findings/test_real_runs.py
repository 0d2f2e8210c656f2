"""Findings of real runs: scripts with planted illnesses and a healthy one, through `hasten doctor --json`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.taps.forks import command

SCRIPTS = Path(__file__).with_name("scripts")
RUN = {
    "data_bound",
    "workers_zero",
    "too_many_workers",
    "workers_recreated",
    "epoch_start_stall",
    "pageable_memory",
    "blocking_copy",
    "device_prefetch",
    "slow_disk",
    "slow_decode",
    "python_getitem",
    "sample_by_sample",
    "samples_recomputed",
    "remote_read_ahead",
    "small_shm",
    "host_sync",
    "moved_from_cpu",
    "tensor_copy",
    "cache_emptied",
    "garbage_collected",
    "synchronize_in_loop",
    "retained_graph",
    "memory_creep",
    "memory_underused",
    "memory_nearly_full",
    "validation_graphs",
    "zeroed_gradients",
    "threads_oversubscribed",
    "data_parallel",
    "unbalanced_gpus",
    "accumulation_syncs",
    "unused_parameters",
    "blocking_checkpoint",
    "blocking_log",
}


def examine(name: str) -> dict[str, dict[str, Any]]:
    """The findings of a script by name, of those that this room tests and that rest on a run."""
    with TemporaryDirectory() as folder:
        script = Path(folder, name)
        script.write_text((SCRIPTS / name).read_text())
        out = Path(folder, "out.json")
        done = command(Path(folder), "doctor", "--no-sample", "--steps", "60", "--json", out, script)
        assert out.is_file(), done.err
        found = json.loads(out.read_text())["findings"]
    return {one["name"]: one for one in found if one["name"] in RUN and one["how_known"] != "read"}


examined = cache(examine)  # a script is run once for several tests


def marked(name: str, finding: str) -> int:
    """The line that a script marks as a finding's."""
    for number, line in enumerate((SCRIPTS / name).read_text().splitlines(), 1):
        if re.search(rf"# line: {finding}$", line):
            return number
    raise AssertionError(f"{name} has no line marked {finding}")


def test_what_is_planted_is_found_at_its_line() -> None:
    """Each slow line of one script; in one test, so that no two processes of pytest run it."""
    found = examined("stone_age.py")
    planted = (
        "workers_zero",
        "python_getitem",
        "tensor_copy",
        "retained_graph",
        "garbage_collected",
        "blocking_checkpoint",
        "blocking_log",
    )
    lines = {name: found[name]["line"] if name in found else None for name in planted}
    assert lines == {name: marked("stone_age.py", name) for name in planted}
    assert found["validation_graphs"]["worth"] is None  # it is not known


def test_a_healthy_training_has_no_findings() -> None:
    """The same training with none of them.

    What other processes take of the machine may look like an illness of it: one that comes back each time is its own.
    """
    found = set(examine("healthy.py"))
    for _ in range(2):
        if not found:
            break
        found &= set(examine("healthy.py"))
    assert not found


@pytest.mark.slow  # a doctor's run, whole
def test_tensors_in_memory_get_no_workers() -> None:
    """They are fetched one by one: that is their illness."""
    found = examined("in_memory.py")
    assert found["sample_by_sample"]["line"] == marked("in_memory.py", "sample_by_sample")
    assert "workers_zero" not in found


@pytest.mark.slow  # a doctor's run, whole
def test_workers_of_short_epochs_should_stay() -> None:
    """From the second epoch on, the time in iter() is theirs."""
    found = examined("short_epochs.py")
    assert found["workers_recreated"]["line"] == marked("short_epochs.py", "workers_recreated")
    assert found["workers_recreated"]["worth"] > 0.05


@pytest.mark.slow  # a doctor's run of two ranks
@pytest.mark.parametrize("finding", ["accumulation_syncs", "unused_parameters"])
def test_replicas_that_exchange_too_much_are_found(finding: str) -> None:
    """Three of four exchanges are for nothing, and every parameter is used."""
    found = examined("replicas.py")
    assert finding in found, sorted(found)
    assert found[finding]["line"] == marked("replicas.py", finding)
