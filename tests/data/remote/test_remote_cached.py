"""What ParquetDataset has fetched is kept: for the next epoch and run, for other processes, and for this user alone."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hasten.data import DataLoader, Remote
from tests.data.remote.tables import ROWS, afar, near, rows_of

pytest.importorskip("pyarrow")
pytest.importorskip("aiohttp")


def test_the_second_epoch_and_the_second_run_come_from_the_cache(server, remote):
    first = rows_of(loader := DataLoader(afar(server, remote), batch_size=64, shuffle=True, num_workers=2))
    sent = server.sent
    rows_of(loader)
    assert server.sent == sent
    assert rows_of(DataLoader(afar(server, remote), batch_size=64, shuffle=True)) == first
    assert server.sent - sent <= 2 << 14, "footers: the file may have changed"


SHARING = """
import sys
from hasten.data.remote.files import Reader, RemoteFile
from hasten.data.remote.options import Remote
reader = Reader(Remote(cache_dir=sys.argv[1]))
total = 0
for url in sys.argv[2:]:
    file = RemoteFile(url, reader)
    for group in range(file.metadata.num_row_groups):
        total += sum(file.read(group, ["id"])["id"].to_pylist())
print(total, "torch" in sys.modules)
"""


def test_several_processes_share_one_cache(server, tmp_path):
    server.delay = 0.01
    command = [sys.executable, "-c", SHARING, tmp_path / "cache", f"{server.url}/a.parquet", f"{server.url}/b.parquet"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate(timeout=100)[0].strip() for process in processes} == {f"{sum(range(ROWS))} False"}
    asked = [one for one in server.asked if not one[1].startswith("bytes=-")]
    assert len(set(asked)) == len(asked), "each range is fetched by one of them"


def test_a_cache_that_cannot_be_written_costs_time_only(folder, server, tmp_path):
    (tmp_path / "file").touch()
    data = afar(server, Remote(cache_dir=tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="fetched bytes are not kept in") as warned:
        assert rows_of(DataLoader(data, batch_size=64)) == rows_of(DataLoader(near(folder), batch_size=64))
    assert len([one for one in warned if "not kept" in str(one.message)]) == 1


def test_the_default_cache_is_this_users_own(monkeypatch, tmp_path, server):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = Remote().folder()
    assert place == tmp_path / f"hasten-cache-{os.geteuid()}"
    place.mkdir()
    place.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write to it"):
        afar(server, Remote())[0]
    place.chmod(0o700)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        afar(server, Remote())[0]
    assert list(Path(place).glob("*.part"))
