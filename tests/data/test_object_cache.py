"""Samples that are ready to be copied are those of the store, and nobody's copy is another's."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import hasten.data.object_cache as room_of_ready
from hasten.data.object_cache import ObjectCache, copy_of
from hasten.data.opened_files import opened, told_by
from hasten.data.sample_store import pack


def pixels(size: tuple[int, int], mode: str) -> Image.Image:
    noise = np.random.default_rng(sum(size)).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    image.info.update(dpi=(72, 72), comment=b"made here")
    return image


sizes = st.tuples(st.integers(1, 5), st.integers(1, 5))
leaves = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(),
    st.builds(pixels, sizes, st.sampled_from(["1", "L", "RGB", "RGBA"])),
    st.builds(lambda size: np.arange(size[0] * size[1], dtype=np.float32).reshape(size), sizes),
    st.builds(lambda size: np.asfortranarray(np.ones(size)), sizes),
    st.builds(lambda size: torch.arange(size[0] * size[1]).reshape(size), sizes),
    st.builds(lambda size: torch.rand(2, 3, *size).contiguous(memory_format=torch.channels_last), sizes),
    st.builds(lambda size: torch.ones(size, dtype=torch.bfloat16).t(), sizes),
    st.builds(np.int64, st.integers(0, 9)),
)
samples = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def spoil(part: Any) -> None:
    """Change all that can be changed in a sample, in place."""
    if isinstance(part, torch.Tensor | np.ndarray):
        part[...] = 99
    elif isinstance(part, Image.Image):
        part.paste(1, (0, 0, *part.size))
        part.info["spoilt"] = True
    elif isinstance(part, dict | list | tuple):
        for inner in part.values() if isinstance(part, dict) else part:
            spoil(inner)
        if not isinstance(part, tuple):
            part.clear()


def layout(part: Any) -> Any:
    """Strides of all arrays and tensors, modes of images."""
    if isinstance(part, torch.Tensor):
        return part.stride(), part.is_inference()
    if isinstance(part, np.ndarray):
        return part.strides, part.flags.writeable
    if isinstance(part, Image.Image):
        return part.mode, part.readonly, sorted(vars(part))
    if isinstance(part, dict):
        return {key: layout(inner) for key, inner in part.items()}
    return [layout(inner) for inner in part] if isinstance(part, list | tuple) else type(part)


@given(sample=samples)
def test_copies_are_what_the_store_gives_and_the_readers_own(sample: Any) -> None:
    ready, stored = ObjectCache(), pickle.loads(pack(sample))
    expected = pack(stored)
    if not ready.add("place", {}, stored):
        assert sample is None
        return
    for _ in range(3):
        found = ready.find("place")
        copied = copy_of(found)
        assert pack(copied) == expected
        assert layout(copied) == layout(found)
        spoil(copied)
    assert 0 < ready.bytes < 1 << 20


twice = torch.ones(2)


class Scores(list[int]):
    """A list with methods of its own."""


@pytest.mark.parametrize(
    "sample",
    [(twice, twice), {"a": [1], "b": {"c": {1, 2}}}, (Scores(),), torch.ones(4)[:2], torch.nn.Parameter(twice)],
    ids=["one tensor twice", "a set", "a list of another class", "part of a tensor", "a parameter"],
)
def test_what_a_copy_may_give_otherwise_stays_in_the_store(sample: Any) -> None:
    ready = ObjectCache()
    assert ready.add(0, {}, sample) is False
    assert (ready.find(0), ready.bytes) == (None, 0)


def test_a_file_that_changed_takes_its_sample_with_it(tmp_path: Path) -> None:
    path = str(tmp_path / "a.txt")
    Path(path).write_text("1")
    ready = ObjectCache()
    assert ready.add(0, {path: told_by(path)}, [1])
    with opened() as heard:
        assert ready.find(0) == [1]
    assert heard.files == {path: told_by(path)}  # who listens is told, as if it had been read
    Path(path).write_text("23")
    assert ready.find(0) is None
    Path(path).unlink()
    assert ready.add(1, {path: None}, [2])  # a file that was looked for, and was not there
    assert ready.find(1) == [2]
    Path(path).write_text("4")
    assert ready.find(1) is None


def test_keys_of_several_kinds_are_several_places() -> None:
    ready = ObjectCache()
    for number, key in enumerate([1, True, "1", b"1"]):
        assert ready.add((type(key), key), {}, number)
    assert [ready.find((type(key), key)) for key in [1, True, "1", b"1"]] == [0, 1, 2, 3]


def test_all_together_take_no_more_than_a_part_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_of_ready, "memory_free", lambda: 8 << 20)
    monkeypatch.setattr(room_of_ready, "_alive", type(room_of_ready._alive)())
    one, other = ObjectCache(), ObjectCache()
    kept = [ready.add(number, {}, np.zeros(50_000, np.uint8)) for number in range(20) for ready in (one, other)]
    assert 10 < sum(kept) < 21  # of 50,000 bytes each, with what is beside them, in 1 MiB
    assert one.bytes + other.bytes <= 1 << 20
    one.clear()
    assert one.find(0) is None
    assert other.add(30, {}, np.zeros(50_000, np.uint8))


def test_forked_workers_read_it_and_fill_no_memory_of_their_own() -> None:
    ready = ObjectCache()
    assert ready.add(0, {}, [1])
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, repr((ready.find(0), ready.add(1, {}, [2]))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"([1], False)"
