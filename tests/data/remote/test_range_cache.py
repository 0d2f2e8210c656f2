"""The cache of fetched bytes: bounded, whole or not there, shared by processes; a failing disk is no error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data.remote import cache as module
from hasten.data.remote.cache import RangeCache

HEAD = 20


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith((".part", ".tmp")))


@settings(max_examples=50)
@given(puts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 400)), max_size=30), limit=st.integers(0, 1500))
def test_what_is_got_was_put_and_the_limit_holds(tmp_path_factory, puts, limit):
    folder = tmp_path_factory.mktemp("cache")
    cache = RangeCache(folder, limit)
    for key, size in puts:
        kept = cache.put(f"{key} {size}", bytes([key]) * size)
        assert kept == (size + HEAD <= limit)
        assert size_of(folder) <= limit
        found = cache.get(f"{key} {size}")
        assert found is None if not kept else bytes(found) == bytes([key]) * size
    for key, size in puts:
        found = cache.get(f"{key} {size}")
        assert found is None or bytes(found) == bytes([key]) * size


def test_what_was_used_longest_ago_goes_first(tmp_path):
    cache = RangeCache(tmp_path, 10 * (100 + HEAD))
    for key in "abcdefghij":
        cache.put(key, key.encode() * 100)
        time.sleep(0.002)
    cache.get("a")
    cache.put("k", b"k" * 100)
    there = {key for key in "abcdefghijk" if cache.get(key) is not None}
    assert {"a", "k", "j"} <= there
    assert "b" not in there


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:10], lambda b: b"", lambda b: b[:-1] + b"x"])
def test_an_entry_that_is_damaged_is_not_there(tmp_path, damage):
    cache = RangeCache(tmp_path, 1000)
    cache.put("key", b"value")
    (path,) = tmp_path.glob("*.part")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("key") is None
    assert not path.exists()
    assert cache.put("key", b"value")
    assert bytes(cache.get("key")) == b"value"


def test_a_folder_that_is_removed_meanwhile_and_a_count_that_is_nonsense(tmp_path):
    cache = RangeCache(tmp_path / "cache", 500)
    cache.put("a", b"1" * 100)
    (tmp_path / "cache" / ".total").write_text("nonsense")
    for number in range(20):
        assert cache.put(str(number), b"2" * 100)
    assert size_of(tmp_path / "cache") <= 500
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    (tmp_path / "cache").rmdir()
    assert cache.get("a") is None
    assert cache.put("a", b"3")


WRITER = """
import sys, random
from pathlib import Path
from hasten.data.remote.cache import RangeCache
cache = RangeCache(Path(sys.argv[1]), 200_000)
draw = random.Random(int(sys.argv[2]))
print("begins", flush=True)
while True:
    key = draw.randrange(40)
    data = bytes([key]) * (1000 * (1 + key % 10))
    cache.put(str(key), data)
    found = cache.get(str(draw.randrange(40)))
    assert found is None or len(set(found)) == 1 and len(found) == 1000 * (1 + found[0] % 10)
"""


def test_processes_that_are_killed_leave_it_whole_and_bounded(tmp_path):
    for turn in range(3):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(3 * turn + number)], stdout=subprocess.PIPE)
            for number in range(3)
        ]
        for writer in writers:
            assert writer.stdout.readline() == b"begins\n"
        for _ in range(40):
            assert size_of_moving(tmp_path) <= 200_000
            time.sleep(0.005)
        assert [writer.poll() for writer in writers] == [None] * 3
        for writer in writers:
            writer.kill()
            assert writer.wait() == -signal.SIGKILL
            writer.stdout.close()
    cache = RangeCache(tmp_path, 200_000)
    left = list(tmp_path.glob("*.tmp"))
    for key in range(40):
        found = cache.get(str(key))
        assert found is None or bytes(found) == bytes([key]) * (1000 * (1 + key % 10))
    for number in range(30):
        assert cache.put(f"more {number}", b"m" * 10_000)
    assert size_of(tmp_path) <= 200_000
    assert not [path for path in left if path.exists()], "what the killed had begun to write"


def size_of_moving(folder):
    total = 0
    for path in list(folder.iterdir()):
        try:
            total += path.stat().st_size if path.name.endswith((".part", ".tmp")) else 0
        except FileNotFoundError:  # gone, or renamed, in which case it is counted under one name at most
            continue
    return total


LIMITED = """
import resource, sys, warnings
from pathlib import Path
from hasten.data.remote.cache import RangeCache
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # the disk takes no more of a file than this
cache = RangeCache(Path(sys.argv[1]), 1_000_000)
warnings.simplefilter("error")
assert cache.put("small", b"s" * 1000)
try:
    cache.put("large", b"l" * 10_000)
except UserWarning as warning:
    print(warning)
assert not cache.put("small again", b"s")  # it rests for a minute
assert bytes(cache.get("small")) == b"s" * 1000
"""


def test_a_disk_that_takes_no_more_is_said_once_and_leaves_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "fetched bytes are not kept" in done.stdout
    assert "File too large" in done.stdout
    assert not list(tmp_path.glob("*.tmp"))


FULL = """
import sys, warnings
from pathlib import Path
from hasten.data.remote import cache as module
module._MARGIN = 0
warnings.simplefilter("always")
cache = module.RangeCache(Path(sys.argv[1]), 1 << 30)
kept = [cache.put(str(number), bytes(300_000)) for number in range(5)]
print(kept, [cache.get(str(number)) is not None for number in range(5)])
"""


def test_a_disk_that_is_full_is_no_error(tmp_path):
    command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$2" && exec "$0" -c "$1" "$2"']
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this user may not mount a disk of their own")
    done = subprocess.run(
        [*command, sys.executable, FULL, tmp_path], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.stdout.startswith("[True, True, True, False, False] [True, True, True, False, False]"), done.stderr
    assert done.stderr.count("No space left on device") == 1


def test_one_fetches_while_the_other_waits(tmp_path, monkeypatch):
    cache = RangeCache(tmp_path, 1000)
    with cache.alone("key", 1.0):
        began = time.monotonic()
        with RangeCache(tmp_path, 1000).alone("key", 0.2):  # and goes on by itself after a while
            assert time.monotonic() - began >= 0.2
    monkeypatch.setattr(module, "_POLL", 60)
    with cache.alone("key", 60):
        pass


def test_without_room_nothing_is_written(tmp_path):
    cache = RangeCache(tmp_path / "none", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.put("key", b"")
        with cache.alone("key", 1):
            assert cache.get("key") is None
    assert not (tmp_path / "none").exists()


def test_files_of_others_in_its_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("results.tmp", "movie.iso.part"):
        (tmp_path / name).write_bytes(b"theirs" * 1000)
    cache = RangeCache(tmp_path, 4000)
    for number in range(100):
        cache.put(f"key {number}", b"x" * 100)
    assert (tmp_path / "results.tmp").read_bytes() == b"theirs" * 1000
    assert (tmp_path / "movie.iso.part").is_file()
    assert 0 < len(list(tmp_path.glob("*.part"))) - 1 < 100
