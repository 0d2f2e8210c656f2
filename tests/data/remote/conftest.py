"""Files, a server that gives them, and how they are fetched."""

import pytest

from hasten.data import Remote
from tests.data.remote.range_server import Server
from tests.data.remote.tables import ROWS, write


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "data", "a.parquet", 0)
    write(tmp_path / "data", "b.parquet", ROWS // 2, group=200)
    return tmp_path / "data"


@pytest.fixture
def server(folder):
    server = Server(folder)
    yield server
    server.close()


@pytest.fixture
def remote(tmp_path):
    return Remote(cache_dir=tmp_path / "cache", timeout=0.5)
