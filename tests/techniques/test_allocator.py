"""The allocator is chosen in the environment, and is really the one in use."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.switchboard import Switchboard
from hasten.techniques import CATALOGUE, Choices, Refusal, build
from hasten.techniques.memory import allocator
from hasten.techniques.memory.allocator import Allocator, library
from tests.techniques.conftest import CPU, MODEL, evidence_of

HEAP = """
import os, torch
def heap():
    for line in open("/proc/self/maps"):
        if line.rstrip().endswith("[heap]"):
            low, high = line.split()[0].split("-")
            return int(high, 16) - int(low, 16)
    return 0
before = heap()
x = torch.empty(512 << 20, dtype=torch.uint8)
del x
maps = open("/proc/self/maps").read()
print(heap() - before >= 256 << 20, "jemalloc" in maps, "tcmalloc" in maps)
"""


def run(folder: Path, setting: str, **env: str) -> str:
    (folder / "train.py").write_text(HEAP)
    (folder / "hasten.toml").write_text(f'[techniques]\nallocator = "{setting}"\n' if setting else "")
    command = [str(Path(sys.executable).with_name("hasten")), "run", "--quiet", "train.py"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    done = subprocess.run(command, cwd=folder, env={**inherited, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_glibc_keeps_the_memory_of_freed_tensors(tmp_path: Path) -> None:
    assert run(tmp_path, "") == "False False False\n"
    assert run(tmp_path, "glibc") == "True False False\n"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_glibc_keeps_memory_in_a_process_that_nobody_started_so(tmp_path: Path) -> None:
    """As in `python train.py` with `Trainer(plan=...)`: only what runs can tell it."""
    setup = "import hasten, torch\nhasten.setup(torch.nn.Linear(1, 1), allocator='glibc')\n"
    inherited = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    command = [sys.executable, "-c", setup + HEAP]
    done = subprocess.run(command, cwd=tmp_path, env=inherited, capture_output=True, text=True, check=False)
    assert done.stdout == "True False False\n", done.stderr


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc"])
def test_an_installed_allocator_is_loaded(tmp_path: Path, name: str) -> None:
    if not library(name):
        pytest.skip(f"{name} is not installed")
    assert run(tmp_path, name).split()[1 if name == "jemalloc" else 2] == "True"


def environment(setting: str, **before: str) -> dict[str, str]:
    (technique,) = build({"allocator": setting}, CATALOGUE)
    technique.environment(before)
    return before


def test_what_the_environment_has_already_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "library", lambda name: f"/lib/lib{name}.so")
    tunables = environment("glibc", GLIBC_TUNABLES="glibc.malloc.check=3")["GLIBC_TUNABLES"].split(":")
    assert tunables[0] == "glibc.malloc.check=3"
    assert "glibc.malloc.mmap_threshold=1073741824" in tunables
    assert environment("jemalloc", LD_PRELOAD="/mine.so") == {"LD_PRELOAD": "/lib/libjemalloc.so:/mine.so"}
    assert environment("tcmalloc") == {"LD_PRELOAD": "/lib/libtcmalloc.so"}
    monkeypatch.setattr(allocator, "library", lambda name: "")
    assert environment("jemalloc", LD_PRELOAD="/mine.so") == {"LD_PRELOAD": "/mine.so"}


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "library", lambda name: "")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    useless = CATALOGUE["allocator"].useless
    assert useless("jemalloc", CPU) == "jemalloc is not installed"
    assert "not glibc" in useless("glibc", CPU)
    answer = Allocator.settings(evidence_of())
    assert isinstance(answer, Refusal)
    assert "neither" in answer.reason


def test_the_linker_is_asked_where_a_library_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "\tlibjemalloc.so.2 (libc6,x86-64) => /usr/lib/libjemalloc.so.2\n\tlibc.so.6 (libc6) => /lib/libc.so.6\n"

    def answer(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 0, stdout=listing)

    monkeypatch.setattr(subprocess, "run", answer)
    library.cache_clear()
    try:
        assert library("jemalloc") == "/usr/lib/libjemalloc.so.2"
        assert library("tcmalloc") == ""
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
        library.cache_clear()
        assert library("jemalloc") == ""
    finally:
        library.cache_clear()


def test_worth_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator, "library", lambda name: "/x.so" if name == "tcmalloc" else "")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    answer = Allocator.settings(evidence_of())
    assert isinstance(answer, Choices)
    assert answer.settings == ("glibc", "tcmalloc")
    on_gpu = Allocator.settings(evidence_of(models=(dataclasses.replace(MODEL, device="cuda"),)))
    assert isinstance(on_gpu, Refusal)
    assert "GPU" in on_gpu.reason
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")
    chosen = Allocator.settings(evidence_of())
    assert isinstance(chosen, Refusal)
    assert "LD_PRELOAD" in chosen.reason


FAULTS = """
import ctypes, resource
from hasten.switchboard import Switchboard
from hasten.techniques.memory.allocator import Allocator

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
board = Switchboard([Allocator("glibc")])

def faults():
    for number in range(5):
        if number == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        chunks = [libc.malloc(SIZE) for _ in range(2)]
        for chunk in chunks:
            libc.memset(chunk, 1, SIZE)
        for chunk in chunks:
            libc.free(chunk)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 2

print(faults())
for wanted in ({"allocator": "glibc"}, {}) * 2:
    board.switch(wanted)
    print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("size", [8 << 20, 34 << 20])
def test_it_is_switched_in_a_process_that_runs(size: int) -> None:
    """Two chunks a step, whose pages are faulted in at each step without it: as many behind `off` as before `on`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    script = [sys.executable, "-c", FAULTS.replace("SIZE", str(size))]
    printed = subprocess.run(script, capture_output=True, text=True, check=True, env=environment).stdout
    plain, *others = map(int, printed.split())
    pages = 2 * size // os.sysconf("SC_PAGE_SIZE")
    assert plain > 0.9 * pages
    assert max(others[::2]) < 0.01 * pages
    assert others[1::2] == [pytest.approx(plain, rel=0.05)] * 2


def test_what_the_environment_chose_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1000000")
    board = Switchboard([Allocator("glibc")])
    board.switch({"allocator": "glibc"})
    assert board.on == {}
    assert "the environment chooses an allocator already" in board.broken["allocator"]
