"""Memory that runs out: torch's allocator refuses it, or the kernel kills for it. Going on is exact in both cases."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.trainer.resume.processes import assert_same

SAVES = {"checkpoints": [{"every_n_train_steps": 4}], "ckpt_path": "last"}


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    return nursery.outcome({"root": str(tmp_path_factory.mktemp("whole") / "run")})


def test_the_allocator_refuses_a_step(nursery, tmp_path, whole):
    spec = {**SAVES, "root": str(tmp_path / "run")}
    said = nursery.run({**spec, "module": {"huge_at": [18]}}, 1).said()
    assert "hasten: memory ran out in batch 3 of epoch 1 (optimizer step 18)" in said
    assert 'microbatch="auto"' in said
    assert_same(whole, nursery.outcome(spec))


class Limited:
    """A group of processes with little memory, in cgroup v1 or v2."""

    def __init__(self, folder, limit, kills):
        self.folder, self._limit, self._kills = folder, limit, kills

    def take(self, pid, size):
        (self.folder / self._limit).write_text(str(size))
        (self.folder / "cgroup.procs").write_text(str(pid))

    def killed(self):
        """How many processes of it the kernel has killed for memory."""
        lines = dict(line.split() for line in (self.folder / self._kills).read_text().splitlines())
        return int(lines["oom_kill"])


@pytest.fixture
def limited():
    groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    name = f"hasten-{os.getpid()}-{time.monotonic_ns()}"
    if "memory" in groups:
        folder, files = (
            Path(f"/sys/fs/cgroup/memory{groups['memory']}"),
            ("memory.limit_in_bytes", "memory.oom_control"),
        )
        folder = folder if folder.is_dir() else Path("/sys/fs/cgroup/memory")  # a container sees its own as the root
    else:
        folder, files = Path(f"/sys/fs/cgroup{groups.get('', '/')}"), ("memory.max", "memory.events")
    group = folder / name
    try:
        group.mkdir()
        (group / files[0]).write_text(str(1 << 40))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"this user may not limit the memory of a group of processes here: {error}")
    yield Limited(group, *files)
    end = time.monotonic() + 20
    while group.is_dir() and time.monotonic() < end:
        with contextlib.suppress(OSError):  # the kernel still takes apart what it killed
            group.rmdir()
        time.sleep(0.05)


def test_the_kernel_kills_the_training(nursery, tmp_path, whole, limited):
    spec = {**SAVES, "root": str(tmp_path / "run")}
    file = tmp_path / "begun"
    acts = [
        {"what": "say", "hook": "on_train_start", "nth": 1, "file": str(file), "wait": 1.0},
        {"what": "grow", "hook": "on_train_batch_end", "nth": 18},
    ]
    process = nursery.start({**spec, "acts": acts})
    while not file.exists():
        assert not process.ended(), process.said()
        time.sleep(0.01)
    limited.take(process.pid, 128 << 20)
    assert process.wait() == -9, process.said()
    assert limited.killed() == 1
    assert_same(whole, nursery.outcome(spec))
