"""ParquetDataset over http and other stores: the samples of the local files, few bytes more, faults that are said."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import signal
import subprocess
import sys
import time

import pytest

from hasten.data import DataLoader, ParquetDataset, Remote, RemoteError
from hasten.data.remote import web
from hasten.errors import HastenError
from tests.data.loader_trainings import ranks_loaders
from tests.data.remote.range_server import Server
from tests.data.remote.tables import ROWS, afar, near, rows_of, used_bytes, write

pytest.importorskip("pyarrow")
pytest.importorskip("aiohttp")
fsspec = pytest.importorskip("fsspec")

WORKERS = {"none": {}, "threads": {"num_workers": 2}, "processes": {"num_workers": 1, "workers": "process"}}


@pytest.mark.filterwarnings("ignore:.*trying again")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", WORKERS)
def test_samples_are_those_of_the_local_files_while_answers_fail(folder, server, remote, ranks, workers):
    server.failing, server.stall = 0.05, 1.5
    data = afar(server, remote)
    wanted = ranks_loaders(near(folder), ranks, batch_size=64, shuffle=True, seed=3)
    loaders = ranks_loaders(data, ranks, batch_size=64, shuffle=True, seed=3, **WORKERS[workers])
    for _ in range(2):
        for ours, local in zip(loaders, wanted, strict=True):
            assert rows_of(ours) == rows_of(local)


@pytest.mark.filterwarnings("ignore:.*trying again")
def test_every_kind_of_failure_is_got_over(folder, server, remote):
    server.failing, server.stall = 0.3, 1.0
    with_failures = rows_of(DataLoader(afar(server, remote), batch_size=100, num_workers=2))
    assert server.failures > 3
    assert with_failures == rows_of(DataLoader(near(folder), batch_size=100))


def test_an_answer_that_is_late_is_asked_for_once_more(server, monkeypatch):
    monkeypatch.setattr(web, "_TWICE", 0.2)  # so that one that is late because the machine is busy does no harm
    data = afar(server, Remote(cache_size=0, timeout=60, retries=0), ("id", "x"))
    wanted = rows_of(DataLoader(data, batch_size=500))
    server.failing, server.kinds, server.stall = 0.02, ("stall",), 600
    server.draw.seed(52)  # the 16th and the 42nd request from here on are never answered
    for _ in range(3):
        assert rows_of(DataLoader(data, batch_size=500)) == wanted
    assert server.failures == 2


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_few_bytes_are_fetched_that_are_not_used(folder, tmp_path, shuffle, ranks):
    for name, start in (("a.parquet", 0), ("b.parquet", 40_000)):  # as large as files are that are worth fetching
        write(folder, name, start, rows=40_000, group=4000)
    server = Server(folder)
    columns = ("id", "vector")
    remote = Remote(cache_size=0) if shuffle and ranks == 1 else Remote(cache_dir=tmp_path / "cache")
    data = afar(server, remote, columns)
    loaders = ranks_loaders(data, ranks, batch_size=256, shuffle=shuffle, num_workers=2)
    rows = sum(len(batch["id"]) for loader in loaders for batch in loader)
    server.close()
    assert rows == 80_000
    used = used_bytes(folder, columns)
    assert used <= server.sent <= 1.1 * used
    sizes = [path.stat().st_size for path in folder.glob("*.parquet")]
    assert server.sent < 0.8 * sum(sizes), "of columns that nobody asked for nothing is fetched"


@pytest.mark.filterwarnings("ignore:.*come twice")
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_state_of_local_files_goes_on_from_afar_and_back(folder, server, remote, shuffle):
    def load(data, **options):
        return DataLoader(data, batch_size=50, shuffle=shuffle, seed=5, **options)

    whole = rows_of(load(near(folder)))
    begun = load(near(folder), num_workers=2)
    rows = []
    for _, batch in zip(range(13), begun, strict=False):
        rows += rows_of([batch])
    middle = load(afar(server, remote), num_workers=2)
    middle.load_state_dict(begun.state_dict())
    for _, batch in zip(range(20), middle, strict=False):
        rows += rows_of([batch])
    end = load(near(folder))
    end.load_state_dict(middle.state_dict())
    assert rows + rows_of(end) == whole


def test_filters_and_copies_leave_the_same_rows(folder, server, remote):
    options = {"filters": [("id", ">=", 1300), ("x", "<", 0.5)]}
    data = pickle.loads(pickle.dumps(afar(server, remote, **options)))
    assert rows_of(DataLoader(data, batch_size=32)) == rows_of(DataLoader(near(folder, **options), batch_size=32))
    fetched = [path for path, _ in server.asked]
    assert len(data) < ROWS / 2
    assert fetched.count("/a.parquet") < fetched.count("/b.parquet"), "row groups below 1300 are never fetched"


@pytest.mark.parametrize("pattern", ["*.parquet", "", "[ab].parque*"])
def test_folders_and_patterns(folder, server, remote, pattern):
    (folder / "notes.txt").write_text("no data")
    assert len(ParquetDataset(f"{server.url}/{pattern}", ["id"], remote=remote)) == ROWS
    with pytest.raises(HastenError, match=r"(?s)no Parquet file at http.*give the files' own URLs as a list"):
        ParquetDataset(f"{server.url}/z*.parquet", remote=remote)
    with pytest.raises(HastenError, match="names several folders"):
        ParquetDataset(f"{server.url}/*/z*.parquet", remote=remote)


def test_a_server_without_the_last_bytes_of_a_file(folder, remote):
    server = Server(folder, ranges="no suffix", etag=False)
    data = afar(server, remote)
    assert rows_of(DataLoader(data, batch_size=64)) == rows_of(DataLoader(near(folder), batch_size=64))
    server.close()


def test_headers_are_sent_and_a_cache_of_the_whole_is_not_shared_without_a_version(server, tmp_path):
    server.headers = {"Authorization": "Bearer abc"}
    with pytest.raises(RemoteError, match=r"may not be read: the server answered 401 .*\n.*storage_options"):
        afar(server, Remote(cache_size=0))
    remote = Remote(cache_dir=tmp_path / "cache", storage_options={"headers": {"Authorization": "Bearer abc"}})
    assert len(afar(server, remote)) == ROWS


@pytest.mark.parametrize("status", [403, 404, 410, 418])
def test_an_answer_that_will_not_pass_is_said_at_once(server, remote, status):
    server.refused = status
    secret = server.url.replace("http://", "http://me:secret@") + "/a.parquet?X-Amz-Signature=hidden"
    with pytest.raises(RemoteError) as caught:
        ParquetDataset(secret, remote=remote)
    assert len(server.asked) == 1
    said = str(caught.value)
    assert "is not there" in said if status in (404, 410) else f"answered {status}" in said
    assert "/a.parquet?..." in said
    assert "secret" not in said
    assert "hidden" not in said


def test_what_cannot_be_read_is_refused_before_training(folder, server, remote, monkeypatch):
    (folder / "page.parquet").write_text("<html>please log in</html>" * 40)
    with pytest.raises(HastenError, match=r"cannot read .*page.parquet as Parquet: it has no footer"):
        ParquetDataset(f"{server.url}/page.parquet", remote=remote)
    (folder / "empty.parquet").touch()
    with pytest.raises(HastenError, match=r"empty.parquet is empty"):
        ParquetDataset(f"{server.url}/empty.parquet", remote=remote)
    server.ranges = "none"
    with pytest.raises(HastenError, match="gives whole files only: it answered 200"):
        afar(server, remote)
    server.ranges = "all"
    with pytest.raises(HastenError, match="has no column 'z'"):
        afar(server, remote, ["z"])
    with pytest.raises(HastenError, match=r"nonsense:// cannot be read: .*nonsense"):
        ParquetDataset("nonsense://a/b.parquet", remote=remote)
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    with pytest.raises(HastenError, match=r"s3:// cannot be read here: Install s3fs.*\n.*hasten\[s3\]"):
        ParquetDataset("s3://bucket/a.parquet", remote=remote)
    with pytest.raises(HastenError, match="retries=-1"):
        Remote(retries=-1)
    with pytest.raises(HastenError, match=r"must be a hasten.data.Remote"):
        ParquetDataset(f"{server.url}/a.parquet", remote={"retries": 1})


def test_workers_that_are_forked_leave_the_parents_connections_alone(folder, server, remote):
    data = afar(server, Remote(cache_size=0, timeout=60))
    begun = iter(DataLoader(data, batch_size=50))
    rows = rows_of([next(begun)])
    processes = DataLoader(data, batch_size=200, num_workers=2, workers="process")
    assert rows_of(processes) == rows_of(DataLoader(near(folder), batch_size=200))
    assert rows + rows_of(begun) == rows_of(DataLoader(near(folder), batch_size=50))


def test_a_server_that_is_not_there_is_said_soon(remote):
    free = Server(".")
    free.close()
    with pytest.raises(RemoteError, match=r"no connection .*\(3 attempts in \d s\)"):
        ParquetDataset(f"{free.url}/a.parquet", remote=remote)
    with pytest.raises(RemoteError, match=r"nowhere.invalid/a.parquet cannot be read: no connection"):
        ParquetDataset("http://nowhere.invalid/a.parquet", remote=remote)


@pytest.mark.filterwarnings("ignore:.*trying again")
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "workers": "process"}])
def test_a_server_that_fails_for_good_ends_the_pass_whatever_on_error_says(server, tmp_path, workers):
    data = afar(server, Remote(cache_dir=tmp_path / "cache", retries=1, timeout=0.5))
    iterator = iter(DataLoader(data, batch_size=100, on_error="skip", **workers))
    next(iterator)
    server.refused = 503
    with pytest.raises(RemoteError, match=r"[ab].parquet cannot be read: the server answered 503 .*2 attempts"):
        list(iterator)
    server.refused = None
    assert len(rows_of(DataLoader(data, batch_size=100))) == ROWS / 100, "and what failed is fetched again"


@pytest.mark.parametrize("etag", [True, False])
def test_a_file_that_changes_on_the_server_is_said(folder, tmp_path, etag):
    server = Server(folder, etag=etag)
    data = afar(server, Remote(cache_dir=tmp_path / "cache"))
    data[0]
    shutil.copy(folder / "b.parquet", tmp_path / "old")
    time.sleep(1.1 if not etag else 0)  # Last-Modified knows seconds
    write(folder, "b.parquet", 9000, group=200)
    with pytest.raises(RemoteError, match=r"b.parquet was changed or replaced while it is read"):
        data[ROWS - 1]
    (folder / "b.parquet").unlink()
    with pytest.raises(RemoteError, match=r"b.parquet is not there"):
        data[ROWS - 1]
    assert data[1]["id"] == 1, "other files are read on"
    server.close()


@pytest.mark.filterwarnings("ignore:.*trying again")
def test_a_slow_server_is_given_up_in_bounded_time(server, tmp_path):
    data = afar(server, Remote(cache_size=0, timeout=0.3, retries=1))
    server.failing, server.kinds, server.stall = 1.0, ("stall",), 30
    with pytest.raises(RemoteError, match=r"was silent for 0.3 s, or too slow \(2 attempts"):
        data[0]


INTERRUPTED = """
import faulthandler, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from hasten.data import DataLoader, ParquetDataset, Remote
data = ParquetDataset(sys.argv[1], ["id"], remote=Remote(cache_size=0, timeout=600))
print("opened", flush=True)
sys.stdin.readline()
faulthandler.dump_traceback_later(20)
for batch in DataLoader(data, batch_size=10, num_workers=int(sys.argv[2])):
    pass
"""


# Slow: each is a process of its own that imports torch; with workers it is the same threads that fetch.
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_ctrl_c_does_not_wait_for_a_server_that_hangs(server, workers):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, f"{server.url}/a.parquet", workers],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "opened\n"
    server.failing, server.kinds, server.stall = 1.0, ("stall",), 600
    asked = len(server.asked)
    process.stdin.write("\n")
    process.stdin.flush()
    while len(server.asked) == asked:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    process.kill()
    said = process.communicate()[1]
    assert "KeyboardInterrupt" in said
    assert "Timeout (" not in said, said
    assert process.returncode in (-signal.SIGINT, 130, 1)


def test_any_store_of_fsspec(folder, remote):
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/bucket/train", recursive=True)
    for path in ("memory://bucket/train/", "memory://bucket/train", "memory://bucket/train/*.parquet"):
        data = ParquetDataset(path, ["id", "x", "vector"], remote=remote, window=4)
        loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
        assert rows_of(loader) == rows_of(DataLoader(near(folder), batch_size=64, shuffle=True))
    store.pipe("/bucket/train/b.parquet", (folder / "a.parquet").read_bytes())
    data = ParquetDataset("memory://bucket/train/", ["id"], remote=Remote(cache_size=0))
    store.pipe("/bucket/train/b.parquet", (folder / "b.parquet").read_bytes())
    with pytest.raises(RemoteError, match=r"b.parquet was changed"):
        data[ROWS - 1]
    with pytest.raises(RemoteError, match=r"memory://bucket/nothing.parquet is not there"):
        ParquetDataset("memory://bucket/nothing.parquet", remote=remote)
    store.rm("/bucket", recursive=True)
    with pytest.raises(RemoteError, match=r"ftp://127.0.0.1:1/a.parquet cannot be read: no connection .*refused"):
        ParquetDataset("ftp://me:secret@127.0.0.1:1/a.parquet", remote=remote)
    assert len(ParquetDataset(folder.as_uri(), ["id"])) == ROWS
