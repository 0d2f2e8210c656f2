"""The sample store is a dictionary that processes share, and never gives a wrong sample."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import hasten.data.sample_store as room_of_stores
from hasten.data import SampleStore
from hasten.data.sample_store import pack

FORK = multiprocessing.get_context("fork")
MISSING = SampleStore.MISSING

# Equal in some way, but other keys all the same: their samples must not be mixed up.
keys = st.one_of(
    st.integers(-3, 3),
    st.sampled_from(["1", "int:1", "str:1", "", "(1, 2)", "b'1'"]),
    st.sampled_from([b"1", b"int:1", b"str:1", b"int:2", b""]),
    st.tuples(st.integers(0, 2), st.sampled_from([1, "1"])),
    st.none(),
)
samples = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    label: int


@given(writes=st.lists(st.tuples(keys, samples), max_size=30), asked=st.lists(keys))
def test_it_is_a_dictionary_that_keeps_what_came_first(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[Any, Any]], asked: list[Any]
) -> None:
    store = SampleStore(samples=40, capacity=1 << 16, folder=tmp_path_factory.getbasetemp())
    model: dict[Any, Any] = {}
    for key, sample in writes:
        assert store.put(key, sample)
        model.setdefault(key, sample)
        assert store.get(key) == model[key]
    for key in [*model, *asked]:
        found = store.get(key)
        assert found == model[key] if key in model else found is MISSING


@given(sizes=st.lists(st.integers(0, 400), max_size=60), capacity=st.integers(0, 3000), room=st.integers(1, 8))
def test_a_full_store_says_so_and_keeps_what_it_has(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], capacity: int, room: int
) -> None:
    store = SampleStore(samples=room, capacity=capacity, folder=tmp_path_factory.getbasetemp())
    kept = {}
    for key, size in enumerate(sizes):
        sample = bytes([key]) * size
        before = store.free_bytes
        if store.put(key, sample):
            kept[key] = sample
        else:
            assert store.free_bytes == before
        assert 0 <= store.free_bytes <= capacity
    for key, size in enumerate(sizes):
        assert store.get(key) == kept[key] if key in kept else store.get(key) is MISSING
        if size + 100 > capacity:
            assert key not in kept or len(pack(kept[key])) <= capacity


@given(data=st.data())
@settings(max_examples=300)
def test_a_corrupted_byte_is_a_missing_sample_never_a_wrong_one(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = SampleStore(samples=4, capacity=2000, folder=tmp_path_factory.getbasetemp())
    truth = {key: {"key": key, "x": random.Random(key).randbytes(50)} for key in range(4)}
    for key, sample in truth.items():
        store.put(key, sample)
    at = data.draw(st.integers(0, len(store._map) - 1))
    store._map[at] ^= data.draw(st.integers(1, 255))
    for key, sample in truth.items():
        found = store.get(key)
        assert found is MISSING or found == sample
    store.put(4, "a new one")  # wherever the damage is, it does not spread into a wrong sample
    for key, sample in {**truth, 4: "a new one"}.items():
        found = store.get(key)
        assert found is MISSING or found == sample


def _in_forks(count: int, work: Callable[[int], bool]) -> list[int | None]:
    def run(number: int) -> None:
        os._exit(0 if work(number) else 1)

    processes = [FORK.Process(target=run, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_forked_processes_write_the_same_keys(tmp_path: Path) -> None:
    store = SampleStore(samples=200, capacity=1 << 20, folder=tmp_path)

    def sample(key: int) -> bytes:
        return bytes([key]) * (key + 1)

    def write(number: int) -> bool:
        order = list(range(200))
        random.Random(number).shuffle(order)
        good = True
        for key in order:
            good &= store.put(key, sample(key))
            other = random.Random(key + number).randrange(200)
            good &= store.get(other) in (MISSING, sample(other))
        return good

    assert _in_forks(4, write) == [0] * 4
    assert [store.get(key) for key in range(200)] == [sample(key) for key in range(200)]
    # Each sample was kept once, whoever came first.
    assert (1 << 20) - store.free_bytes == sum(len(pack(sample(key))) for key in range(200))


def test_forked_processes_fill_it_to_the_brim(tmp_path: Path) -> None:
    store = SampleStore(samples=400, capacity=10_000, folder=tmp_path)

    def write(number: int) -> bool:
        for key in range(100):
            store.put((number, key), bytes([number]) * 90)
        return True

    assert _in_forks(3, write) == [0] * 3
    found = [store.get((number, key)) for number in range(3) for key in range(100)]
    assert all(one is MISSING or (len(set(one)) == 1 and len(one) == 90) for one in found)
    assert 50 < sum(one is not MISSING for one in found) < 100


ALL_DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_come_back_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    store = SampleStore(samples=2, capacity=1 << 16, folder=tmp_path)
    tensor = torch.ones(shape).to(dtype)
    assert store.put("x", tensor)
    found = store.get("x")
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bytes_of(found) == bytes_of(tensor)
    if tensor.numel():
        found.view(-1).view(torch.uint8).zero_()  # a sample is the reader's own: in-place work harms nobody
        assert bytes_of(store.get("x")) == bytes_of(tensor)


def test_strided_and_special_tensors_keep_what_they_are(tmp_path: Path) -> None:
    store = SampleStore(samples=8, capacity=1 << 20, folder=tmp_path)
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "view of a big one": torch.zeros(10_000)[:2],
        "channels last": torch.rand(1, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "wants a gradient": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    for name, tensor in tensors.items():
        assert store.put(name, tensor), name
        found = store.get(name)
        assert torch.equal(found, tensor), name
        assert (type(found), found.requires_grad) == (type(tensor), tensor.requires_grad), name
        assert tensor.is_contiguous() or name == "strided" or found.stride() == tensor.stride(), name
    assert len(pack(tensors["view of a big one"])) < 1000


def test_images_arrays_and_nested_samples(tmp_path: Path) -> None:
    store = SampleStore(samples=30, capacity=1 << 20, folder=tmp_path)
    random_pixels = np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    image = Image.fromarray(random_pixels)
    for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "I", "F"):
        converted = image.convert(mode)
        assert store.put(mode, converted)
        found = store.get(mode)
        assert (found.mode, found.size, found.tobytes()) == (converted.mode, converted.size, converted.tobytes())
        assert found.getpalette() == converted.getpalette()
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(file, "JPEG", exif=exif)
    lazy = Image.open(file)  # not read yet
    assert store.put("jpeg", lazy)
    assert store.get("jpeg").tobytes() == lazy.tobytes()
    assert store.get("jpeg").getexif()[0x0112] == 6
    nested = {"a": [torch.ones(2), (np.arange(3), "text")], "point": Point(torch.zeros(1), None), 3: b"raw"}
    assert store.put("nested", nested)
    found = store.get("nested")
    assert torch.equal(found["a"][0], torch.ones(2))
    assert found["a"][1][0].tolist() == [0, 1, 2]
    assert type(found["point"]) is Point
    assert found[3] == b"raw"
    assert store.put("record", Record(torch.ones(2), 3))
    assert store.get("record").label == 3


def test_equal_samples_are_packed_to_equal_bytes() -> None:
    def make() -> Any:
        pixels = np.random.default_rng(1).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        return (
            torch.from_numpy(pixels.copy()).float(),
            {"image": Image.fromarray(pixels), "label": np.int64(3), "name": "".join(["a", "b"])},
            torch.ones(2, dtype=torch.bfloat16),
            torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)).permute(2, 0, 1),
        )

    assert pack(make()) == pack(make())
    first, second = torch.zeros(100), torch.zeros(100)
    second[99] = 1e-30
    assert pack(first) != pack(second)
    assert pack(torch.zeros(2)) != pack(-torch.zeros(2))
    assert pack(torch.zeros(4).reshape(2, 2)) != pack(torch.zeros(4))


def test_what_cannot_be_pickled_is_not_kept(tmp_path: Path) -> None:
    store = SampleStore(samples=2, capacity=1 << 16, folder=tmp_path)
    with open(os.devnull) as file:
        for sample in (lambda: None, (x for x in "abc"), file):
            assert store.put("x", sample) is False
    assert store.get("x") is MISSING
    assert store.put(lambda: None, 1) is False  # a key, too, must be something that can be compared for good
    assert store.get(lambda: None) is MISSING


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    store = SampleStore(samples=2, capacity=1 << 16, folder=tmp_path)
    store.put(1, "kept")
    assert list(tmp_path.iterdir()) == []
    assert store.get(1) == "kept"


def test_a_full_disk_keeps_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SampleStore(samples=4, capacity=1 << 20, folder=tmp_path)
    assert store.put(1, "before")
    whole = os.fstatvfs(store._fd)
    full = os.statvfs_result((*whole[:4], 10, *whole[5:]))  # f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda _: full)
    assert store.put(2, "after") is False
    assert store.get(1) == "before"


def test_stores_share_the_room_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 4 << 30
    monkeypatch.setattr(room_of_stores, "_shm_free", lambda: free)
    monkeypatch.setattr(room_of_stores, "memory_free", lambda: 100 << 30)
    before = room_of_stores.room()
    assert before <= free // 2
    stores = [SampleStore(samples=1, capacity=room_of_stores.room(), folder=tmp_path) for _ in range(6)]
    assert sum(store.free_bytes for store in stores) < free
    stores.clear()
    assert room_of_stores.room() == before  # what is gone gives its room back


def test_the_room_is_what_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_of_stores, "_shm_free", lambda: 100 << 30)
    monkeypatch.setattr(room_of_stores, "memory_free", lambda: 1 << 30)
    assert 0 <= room_of_stores.room() <= 1 << 29
    monkeypatch.setattr(room_of_stores, "memory_free", lambda: 0)
    assert room_of_stores.room() == 0


def test_a_key_of_every_loaders_sampler_is_found_again(tmp_path: Path) -> None:
    store = SampleStore(samples=10, capacity=1 << 16, folder=tmp_path)
    for key in (3, np.int64(4), "a/b.jpg", "undecodable\udcff.jpg", b"raw", (1, 2)):
        assert store.put(key, repr(key))
        assert store.get(pickle.loads(pickle.dumps(key))) == repr(key)
