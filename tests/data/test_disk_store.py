"""Samples on disk: whole or not there, whoever is killed, whatever is damaged, however full the disk is."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten.data.disk_folder as room_of_folders
from hasten.data.disk_folder import SampleFolder, room_on_disk
from hasten.data.disk_store import DiskStore
from hasten.data.sample_store import SampleStore
from hasten.errors import HastenError
from tests.own_mounts import in_own_mounts
from tests.taps.scripts import write

FORK = multiprocessing.get_context("fork")
MISSING = SampleStore.MISSING
LIMIT = 64 << 20
NAME = "a" * 40


def sample(key: int) -> bytes:
    return random.Random(key).randbytes(1 + 37 * key % 5000)


def opened(folder: Path, samples: int = 200, limit: int = LIMIT, name: str = NAME) -> DiskStore:
    store = DiskStore(samples, SampleFolder(folder, limit))
    store.open(name)
    return store


@given(writes=st.lists(st.tuples(st.integers(0, 30) | st.text(max_size=3), st.binary(max_size=200)), max_size=30))
@settings(max_examples=50)
def test_it_is_a_dictionary_that_the_next_process_finds_again(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[Any, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    store, model = opened(folder), dict[Any, bytes]()
    for key, value in writes:
        assert store.put(key, value)
        model[key] = value  # what is newer takes the place of what is older
        assert store.get(key) == value
    del store
    again = opened(folder)
    assert {key: again.get(key) for key in model} == model
    assert again.get("never put") is MISSING


@pytest.mark.skipif(os.geteuid() != 0, reason="a file can be given to another user by root alone")
@pytest.mark.parametrize("name", ["samples", "making"])
def test_a_file_of_another_user_is_not_read(tmp_path: Path, name: str) -> None:
    assert opened(tmp_path).put(1, "theirs")
    (path,) = tmp_path.glob("*.samples")
    if name == "making":
        path = path.rename(tmp_path / ".hasten-samples-making")
    os.chown(path, 12345, 12345)
    store = opened(tmp_path)
    assert store.get(1) is MISSING
    assert store.put(1, "own")
    assert [found.stat().st_uid for found in tmp_path.glob("*.samples")] == [0]


def test_a_name_of_its_own_is_a_file_of_its_own(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(1, "one state")
    store.open("b" * 40)
    assert store.get(1) is MISSING
    store.open(NAME)
    assert store.get(1) == "one state"


def test_a_flipped_byte_is_a_missing_sample_never_a_wrong_one(tmp_path: Path) -> None:
    draw = random.Random(0)
    for damage in range(60):
        folder = tmp_path / str(damage)
        store = opened(folder, samples=4)
        truth = {key: {"key": key, "x": random.Random(key).randbytes(50)} for key in range(4)}
        for key, value in truth.items():
            assert store.put(key, value)
        (file,) = folder.glob("*.samples")
        raw = bytearray(file.read_bytes())
        raw[draw.randrange(len(raw))] ^= draw.randrange(1, 256)
        file.write_bytes(raw)
        for known in (store, opened(folder, samples=4)):  # who has it open, and who opens it now
            for key, value in truth.items():
                assert known.get(key) in (MISSING, value)
        healed = opened(folder, samples=4)
        for key, value in truth.items():
            assert healed.put(key, value)
            assert healed.get(key) == value


@pytest.mark.parametrize("cut", [0, 10, 40, 64, 1000])
def test_a_file_cut_short_is_made_again(tmp_path: Path, cut: int) -> None:
    opened(tmp_path).put(1, "kept")
    (file,) = tmp_path.glob("*.samples")
    os.truncate(file, cut)
    store = opened(tmp_path)
    assert store.get(1) is MISSING
    assert store.put(1, "kept")
    assert store.get(1) == "kept"


def _forked(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def test_who_is_killed_leaves_samples_whole_or_not_there(tmp_path: Path) -> None:
    """SIGKILL at 40 moments, by real processes, two at a time: also in the middle of making the file."""

    def write_on() -> None:
        store = opened(tmp_path, samples=4000)
        for key in range(10_000):
            store.put(key, sample(key))

    draw = random.Random(1)
    for round_ in range(20):
        writers = [_forked(write_on) for _ in range(2)]
        time.sleep(draw.uniform(0.0, 0.03))
        for pid in writers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        store = opened(tmp_path, samples=4000)
        assert all(store.get(key) in (MISSING, sample(key)) for key in range(round_ * 100 + 200))
    assert store.put("after all that", 1)  # nobody's lock is left
    assert store.get("after all that") == 1
    assert not list(tmp_path.glob(".hasten-samples-making"))


def test_processes_write_at_once(tmp_path: Path) -> None:
    """Four that were forked, and one that was not."""

    def write(number: int) -> None:
        store = opened(tmp_path)
        order = list(range(200))
        random.Random(number).shuffle(order)
        for key in order:
            assert store.put(key, sample(key))
            other = random.Random(key + number).randrange(200)
            assert store.get(other) in (MISSING, sample(other))

    program = f"""
        import random
        from pathlib import Path
        from hasten.data.disk_folder import SampleFolder
        from hasten.data.disk_store import DiskStore
        store = DiskStore(200, SampleFolder({str(tmp_path)!r}, {LIMIT}))
        store.open({NAME!r})
        for key in range(200):
            assert store.put(key, random.Random(key).randbytes(1 + 37 * key % 5000))
    """
    other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    children = [_forked(lambda number=number: write(number)) for number in range(4)]  # type: ignore[misc]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert other.wait(60) == 0
    store = opened(tmp_path)
    assert [store.get(key) for key in range(200)] == [sample(key) for key in range(200)]
    (file,) = tmp_path.glob("*.samples")
    once = sum(len(pickle.dumps(sample(key), protocol=5)) for key in range(200))
    assert file.stat().st_size < store._data + 1.2 * once  # each was written once, whoever came first


def test_all_files_together_stay_below_the_limit(tmp_path: Path) -> None:
    limit = 40 << 20
    block = random.Random(0).randbytes(1 << 20)
    for number in range(5):
        store = opened(tmp_path, limit=limit, name=f"{number:040x}")
        kept = sum(store.put(key, block + bytes([key])) for key in range(60))
        assert 20 < kept < 40  # the former file, which nobody uses now, made room
        taken = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
        assert taken <= limit
        assert store.get(0) == block + b"\0"
        del store


def test_a_file_that_a_process_uses_is_not_removed(tmp_path: Path) -> None:
    limit, block = 40 << 20, random.Random(0).randbytes(1 << 20)
    used = opened(tmp_path, limit=limit)
    assert all(used.put(key, block) for key in range(20))
    ready, done = FORK.Event(), FORK.Event()

    def hold() -> None:
        ready.set()
        done.wait(60)

    child = FORK.Process(target=hold)
    child.start()
    ready.wait(60)
    del used  # the forked one still has it open
    other = opened(tmp_path, limit=limit, name="b" * 40)
    kept = sum(other.put(key, block) for key in range(40))
    done.set()
    child.join(60)
    assert kept < 20
    assert opened(tmp_path, limit=limit).get(19) == block


def test_a_write_that_fails_in_its_middle_keeps_what_was_there(tmp_path: Path, capfd: Any) -> None:
    """The kernel refuses the rest of a file that has reached its size, as a full disk does."""
    store = opened(tmp_path)
    assert store.put(1, "before")
    size = next(tmp_path.glob("*.samples")).stat().st_size

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        assert store.put(2, bytes(5000)) is False
        assert store.put(3, "too") is False  # not tried again for a while
        assert store.get(1) == "before"
        assert store.get(2) is MISSING

    assert os.waitpid(_forked(fill), 0)[1] == 0
    assert capfd.readouterr().err.count("no more samples can be kept in") == 1
    assert store.put(2, bytes(5000))
    assert (store.get(1), store.get(2)) == ("before", bytes(5000))


FULL = """
    import os, random
    import hasten.data.disk_folder as folders
    from hasten.data.disk_store import DiskStore, SampleStore
    folders._MARGIN, folders._CHUNK = -(1 << 40), 1 << 12  # else it stops long before the disk is full
    store = DiskStore(100, folders.SampleFolder("disk", 1 << 30))
    store.open("a" * 40)
    truth = {key: random.Random(key).randbytes(100_000) for key in range(100)}
    kept = [key for key, value in truth.items() if store.put(key, value)]
    assert 10 < len(kept) < 45, kept
    assert all(store.get(key) == truth[key] for key in kept)
    assert all(store.get(key) is SampleStore.MISSING for key in truth if key not in kept)
    print("full", os.statvfs("disk").f_bavail)
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A real one of 4 MB, in a mount of its own."""
    (tmp_path / "disk").mkdir()
    done = in_own_mounts(write(tmp_path, "full.py", FULL), "mount -t tmpfs -o size=4m none disk; chmod 700 disk")
    assert done.code == 0, done.err
    assert "full 0" in done.out
    assert done.err.count("No space left on device") == 1


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    store.put(1, "before")
    monkeypatch.setattr(room_of_folders, "_MARGIN", 1 << 60)
    assert store.put(2, bytes(20 << 20)) is False
    assert store.get(1) == "before"


def test_a_file_that_was_found_wrong_is_used_by_nobody(tmp_path: Path) -> None:
    store, other = opened(tmp_path), opened(tmp_path)
    store.put(1, "wrong")
    store.spoilt = True
    assert other.spoilt
    assert not list(tmp_path.glob("*.samples"))
    later = opened(tmp_path)
    assert (later.spoilt, later.get(1)) == (False, MISSING)


def test_a_pause_is_of_this_training_and_its_forks_only(tmp_path: Path) -> None:
    store, another = opened(tmp_path), opened(tmp_path)
    store.paused = True

    def look() -> None:
        assert store.paused

    assert os.waitpid(_forked(look), 0)[1] == 0
    assert not another.paused


def test_a_copy_in_another_process_opens_the_same_files(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(1, "kept")
    copy = pickle.loads(pickle.dumps(store))
    copy.open(NAME)
    assert copy.get(1) == "kept"


def test_a_lock_that_a_thread_holds_is_not_inherited(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path, LIMIT)
    with folder.locked():
        child = FORK.Process(target=time.sleep, args=(20,))
        child.start()
    before = time.monotonic()
    with folder.locked():
        pass
    assert time.monotonic() - before < 10
    child.kill()
    child.join()


def test_folders_of_others_and_such_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "file").write_text("")
    for folder, why in ((shared, "others may write to it"), (tmp_path / "file" / "below", "Not a directory")):
        with pytest.raises(HastenError, match="samples cannot be kept in") as raised:
            SampleFolder(folder)
        assert why in str(raised.value)
        assert "name another cache_dir" in str(raised.value)


def test_a_folder_is_the_same_wherever_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "apart").mkdir()
    folders = SampleFolder("here"), SampleFolder("~/there")
    monkeypatch.chdir(tmp_path / "apart")
    assert [folder.path for folder in folders] == [tmp_path / "here", tmp_path / "there"]
    assert [folder.granted_bytes() for folder in folders] == [0, 0]


def test_what_others_left_in_the_folder_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.samples"
    theirs.write_bytes(bytes(100))
    block = bytes(1 << 20)
    for number in range(4):
        store = opened(tmp_path, limit=24 << 20, name=f"{number:040x}")
        assert sum(store.put(key, block) for key in range(30)) > 5
        del store
    assert theirs.read_bytes() == bytes(100)


def test_the_folder_is_this_users_on_a_disk_not_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TMPDIR", "SLURM_TMPDIR"):
        monkeypatch.setenv(name, "/dev/shm")
    kinds = {"/dev/shm": ("tmpfs", None)}
    turning = {"/var/tmp": ("ext4", True), str(tmp_path): ("ext4", False)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def kind_of(path: Path) -> tuple[str, bool | None]:
        return {**kinds, **turning}.get(str(path), ("nfs4", None))

    monkeypatch.setattr(room_of_folders, "filesystem", kind_of)
    assert room_of_folders._own_folder() == tmp_path / f"hasten-samples-{os.geteuid()}"
    turning[str(tmp_path)] = ("nfs", None)
    assert room_of_folders._own_folder() == Path(f"/var/tmp/hasten-samples-{os.geteuid()}")
    monkeypatch.setattr(room_of_folders, "filesystem", lambda path: ("tmpfs", None))
    assert room_on_disk() == 0
    with pytest.raises(HastenError, match="no local disk has room"):
        SampleFolder()
