"""ParquetDataset over a real S3 server on loopback (moto's): `pip install -e '.[test-s3]'`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from hasten.data import DataLoader, ParquetDataset, Remote, RemoteError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
s3fs = pytest.importorskip("s3fs", reason="no s3fs here: pip install -e '.[test-s3]'")
pytest.importorskip("moto.server", reason="no S3 server here: pip install -e '.[test-s3]'")

ROWS = 20_000
# Slow: the server and botocore take some seconds to import.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*trying again")]

# A part of the answers are 500s or cut short, as a busy store's are, and what is sent is counted. A process of its own:
# the server draws from the process-wide random numbers, and the test looks whether reading does.
SERVER = """
import itertools, json, random, signal
from moto.server import ThreadedMotoServer

class Failing:
    def __init__(self, plain):
        self.plain, self.share, self.sent, self.failures = plain, 0.0, 0, 0
        self.draw, self.turn = random.Random(0), itertools.count()

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"].startswith("/-/"):
            self.share = float(environ["PATH_INFO"].removeprefix("/-/") or self.share)
            start_response("200 OK", [])
            return [json.dumps([self.sent, self.failures]).encode()]
        fails = environ["REQUEST_METHOD"] in ("GET", "HEAD") and self.draw.random() < self.share
        self.failures += fails
        if fails and next(self.turn) % 2:
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self.plain(environ, start_response))
        body = body[: len(body) // 2] if fails else body
        self.sent += len(body)
        return [body]

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
server._server.app = Failing(server._server.app)
print("http://%s:%s" % server.get_host_and_port(), flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def store():
    """An S3 server's address, and s3fs's options to reach it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    url = process.stdout.readline().strip()
    yield url, {"key": "key", "secret": "secret", "client_kwargs": {"endpoint_url": url}}
    process.kill()
    process.communicate()


def told(url, share=""):
    """Bytes sent and answers failed so far; from here on this part of the answers fails."""
    with urllib.request.urlopen(f"{url}/-/{share}") as answer:
        return json.load(answer)


@pytest.fixture
def bucket(store, tmp_path, request):
    """A folder of files, here and in the store."""
    url, options = store
    told(url, 0.0)
    folder, name = tmp_path / "train", f"bucket-{abs(hash(request.node.name))}"
    folder.mkdir()
    for number in range(2):
        ids = np.arange(ROWS // 2) + number * ROWS // 2
        table = {"id": ids, "x": np.random.default_rng(number).random((len(ids),)), "unused": ids * 0.5}
        pq.write_table(pa.table(table), folder / f"{number}.parquet", row_group_size=2000)
    system = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    system.mkdir(name)
    system.put(str(folder), f"{name}/train", recursive=True)
    return folder, name, system


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize("path", ["train/", "train/*.parquet", "train"])
def test_samples_are_those_of_the_local_files_while_answers_fail(store, bucket, tmp_path, path):
    url, options = store
    folder, name, _ = bucket
    before, failed = told(url, 0.05)
    remote = Remote(storage_options=options, cache_dir=tmp_path / "cache", timeout=5)
    data = ParquetDataset(f"s3://{name}/{path}", ["id", "x"], remote=remote, window=4)
    wanted = ids(DataLoader(ParquetDataset(folder, ["id", "x"], window=4), 100, shuffle=True))
    random.seed(5)
    state = random.getstate()
    loader = DataLoader(data, 100, shuffle=True, num_workers=2)
    assert ids(loader) == wanted
    assert random.getstate() == state, "retries draw from no generator of the training"
    sent, failures = told(url)
    footers = [pq.read_metadata(file) for file in folder.iterdir()]
    groups = [footer.row_group(n) for footer in footers for n in range(footer.num_row_groups)]
    used = sum(group.column(n).total_compressed_size for group in groups for n in (0, 1))
    most = max(group.total_byte_size for group in groups)
    assert sent - before <= 1.1 * used + 2 * (16 << 10) + 20_000 + (failures - failed) * most
    begun = DataLoader(ParquetDataset(folder, ["id", "x"], window=4), 100, shuffle=True)
    first = [batch["id"].tolist() for _, batch in zip(range(7), begun, strict=False)]
    loader.load_state_dict(begun.state_dict())
    assert first + ids(loader) == wanted


def test_what_is_wrong_is_said(store, bucket):
    _, options = store
    folder, name, system = bucket
    remote = Remote(storage_options=options, cache_size=0, timeout=5, retries=1)
    with pytest.raises(RemoteError, match=r"nothing.parquet is not there"):
        ParquetDataset(f"s3://{name}/nothing.parquet", remote=remote)
    with pytest.raises(RemoteError, match=r"s3://no-such-bucket-here/a.parquet is not there"):
        ParquetDataset("s3://no-such-bucket-here/a.parquet", remote=remote)
    data = ParquetDataset(f"s3://{name}/train/", ["id"], remote=remote)
    assert data[0]["id"] == 0
    system.put(str(folder / "0.parquet"), f"{name}/train/1.parquet")
    with pytest.raises(RemoteError, match=r"1.parquet was changed or replaced"):
        data[ROWS - 1]
    system.rm(f"{name}/train/1.parquet")
    with pytest.raises(RemoteError, match=r"1.parquet is not there"):
        data[ROWS - 1]
