"""What is written is what is read: every type, every bit, every layout, sharing included."""

from __future__ import annotations

import argparse
import datetime
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten import HastenError
from hasten.trainer.checkpoint import NotSaved, read, write

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def same(one, other):
    """Equal to the last bit, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        flat = [t.detach().contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8).tolist() for t in (one, other)]
        about = [(t.dtype, t.shape, t.requires_grad) for t in (one, other)]
        return flat[0] == flat[1] and about[0] == about[1]
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, complex):
        return same((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, dict):
        keys = all(same(a, b) for a, b in zip(one, other, strict=True)) if len(one) == len(other) else False
        return keys and all(same(a, b) for a, b in zip(one.values(), other.values(), strict=True))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape) * dtype.itemsize
    high = 1 if dtype is torch.bool else 255
    raw = draw(st.lists(st.integers(0, high), min_size=size, max_size=size))
    tensor = torch.tensor(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    if draw(st.booleans()) and tensor.dim():
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()) and tensor.dim():
        tensor = tensor[..., ::2]
    return tensor


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(codec=None)),
    st.binary(max_size=2000),
    st.builds(bytearray, st.binary()),
    st.datetimes(),
    st.datetimes(timezones=st.just(datetime.timezone(datetime.timedelta(hours=2)))),
    st.timedeltas(),
    st.dates(),
    st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), torch.channels_last, torch.strided]),
    st.sampled_from([Path("/a/b"), Path("c"), PureWindowsPath("C:\\x"), range(3, 9, 2), NotSaved("a.B", "B()")]),
    st.sampled_from(
        [np.float32(0.1), np.int8(-3), np.bool_(True), np.complex128(1j), np.str_(""), np.datetime64("2020")]
    ),
)
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda k: st.tuples(k, k), max_leaves=3
)
ARRAYS = st.sampled_from(
    [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6)[::-2],
        np.array(3.5),
        np.zeros((0, 2), np.uint16),
        np.array(["a", "längst"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.arange(3, dtype=">f4"),
        np.zeros(2, [("a", "i4"), ("b", "f8", (2,))]),
        np.arange(3, dtype=np.longdouble),
        np.broadcast_to(np.float32(1.5), (2, 2)),
    ]
)


def nested(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 5)),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda d: argparse.Namespace(**d)).map(vars),
    )


STATES = st.dictionaries(st.text(), st.recursive(PLAIN | tensors() | ARRAYS, nested, max_leaves=10), max_size=5)


@pytest.mark.filterwarnings("ignore:.*view of a.*read-only")
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(state=STATES)
def test_every_state_comes_back_to_the_last_bit(state, tmp_path):
    path = tmp_path / "a.ckpt"
    assert write(path, state) == []
    assert same(read(path), state)
    safetensors.torch.load_file(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(state=STATES)
def test_every_state_is_written_so_that_other_tools_read_it(state, tmp_path):
    path = tmp_path / "a.ckpt"
    write(path, state, format="torch")
    torch.load(path, weights_only=True)
    assert list(read(path)) == list(state)


def test_sets_counters_and_namespaces(tmp_path):
    state = {
        "s": {1, "a", (2, 3)},
        "f": frozenset([1]),
        "c": Counter("aab"),
        "n": argparse.Namespace(lr=0.1, p=Path("x")),
    }
    write(tmp_path / "a.ckpt", state)
    assert read(tmp_path / "a.ckpt") == state


def test_safetensors_reads_the_tensors_under_their_paths(tmp_path):
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    step = {"step": torch.tensor(3.0), "exp_avg": torch.randn(2).bfloat16()}
    state = {"state_dict": {"conv.weight": weight}, "optimizer_states": [{"state": {0: step}}]}
    write(tmp_path / "a.ckpt", state)
    found = safetensors.torch.load_file(tmp_path / "a.ckpt")
    assert set(found) == {
        "state_dict/conv.weight",
        "optimizer_states/0/state/0/step",
        "optimizer_states/0/state/0/exp_avg",
    }
    assert torch.equal(found["state_dict/conv.weight"], weight)
    assert torch.equal(found["optimizer_states/0/state/0/exp_avg"], step["exp_avg"])


def test_strides_survive(tmp_path):
    tensors = [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 2, 4, 4).to(memory_format=torch.channels_last_3d),
        torch.randn(3, 5).t(),
        torch.randn(3, 5),
    ]
    write(tmp_path / "a.ckpt", {"t": tensors})
    assert [t.stride() for t in read(tmp_path / "a.ckpt")["t"]] == [t.stride() for t in tensors]


@pytest.mark.parametrize("format", ["hasten", "torch"])
def test_tensors_that_share_memory_share_it_again(tmp_path, format):
    weight = torch.nn.Parameter(torch.randn(30, 40))
    whole = torch.zeros(4, 5)
    state = {
        "sd": {"row_first": whole[2], "in": weight.detach(), "out": weight.detach()},
        "parameters": [weight, weight],
        "flat": whole,
        "column": whole[:, 1],
        "part": whole[1:3],
    }
    write(tmp_path / "a.ckpt", state, format=format)
    if format == "hasten":
        assert (tmp_path / "a.ckpt").stat().st_size < 2 * weight.nbytes
    back = read(tmp_path / "a.ckpt")
    back["sd"]["in"][0, 0] = 7
    assert back["sd"]["out"][0, 0] == back["parameters"][1][0, 0] == 7
    assert back["parameters"][0] is back["parameters"][1]
    assert isinstance(back["parameters"][0], torch.nn.Parameter)
    back["flat"][2, 1] = 5
    assert back["sd"]["row_first"][1] == back["column"][2] == back["part"][1, 1] == 5


@pytest.mark.parametrize("format", ["hasten", "torch"])
def test_a_slice_does_not_bring_all_it_was_cut_from(tmp_path, format):
    write(tmp_path / "a.ckpt", {"t": torch.randn(1_000_000)[:10], "u": torch.randn(1000, 1000)[:, 3]}, format=format)
    assert (tmp_path / "a.ckpt").stat().st_size < 30_000


def test_names_that_collide_are_kept_apart(tmp_path):
    state = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, "__metadata__": torch.ones(3), "": torch.ones(4)}
    write(tmp_path / "a.ckpt", state)
    assert same(read(tmp_path / "a.ckpt"), state)
    safetensors.torch.load_file(tmp_path / "a.ckpt")


def test_a_very_long_structure(tmp_path):
    state = {"text": [str(i) * 1_000_000 for i in range(18)], "ints": list(range(1000)), "t": torch.ones(3)}
    write(tmp_path / "a.ckpt", state)
    assert same(read(tmp_path / "a.ckpt"), state)
    safetensors.torch.load_file(tmp_path / "a.ckpt")


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Attributes(dict):
    pass


class Strange:
    def __repr__(self):
        raise ValueError("no")


@pytest.mark.parametrize("format", ["hasten", "torch"])
def test_what_cannot_be_stored_is_named_and_marked(tmp_path, format):
    loop: list = []
    loop.append(loop)
    state = {
        "hyper_parameters": Attributes(loss=torch.nn.CrossEntropyLoss(), color=Color.RED, level=Level.HIGH),
        "f": [print, Strange(), torch.eye(2).to_sparse(), torch.empty(2, device="meta"), np.array([{}], object)],
        "loop": loop,
        "in_set": {Color.RED},
        "key": {Color.RED: 1},
    }
    notes = write(tmp_path / "a.ckpt", state, format=format)
    assert "hyper_parameters.loss: a torch.nn.modules.loss.CrossEntropyLoss cannot be stored safely" in notes
    assert any(note.startswith("hyper_parameters: a ") and note.endswith("was stored as a dict") for note in notes)
    for where in ("hyper_parameters.color", "hyper_parameters.level", "f.0", "f.1", "f.2", "f.3", "f.4", "loop.0"):
        assert sum(note.startswith(f"{where}: ") for note in notes) == 1, (where, notes)
    back = read(tmp_path / "a.ckpt")
    lost = [back["hyper_parameters"]["loss"], back["hyper_parameters"]["color"], *back["f"], *back["loop"]]
    assert all(isinstance(value, NotSaved) for value in lost)
    assert lost[0] == NotSaved("torch.nn.modules.loss.CrossEntropyLoss", "CrossEntropyLoss()")
    assert back["hyper_parameters"]["level"] == 3
    assert type(back["hyper_parameters"]) is dict
    assert len(back["in_set"]) == len(back["key"]) == 1
    assert not [n for n in write(tmp_path / "b.ckpt", back) if "cannot" in n]  # known already


def test_real_optimizers_resume_from_it(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    write(tmp_path / "a.ckpt", state)
    back = read(tmp_path / "a.ckpt")
    assert type(back["state_dict"]) is OrderedDict
    assert same(back["optimizer_states"], state["optimizer_states"])
    optimizer.load_state_dict(back["optimizer_states"][0])


def test_only_dicts_and_known_formats(tmp_path):
    with pytest.raises(HastenError, match="dict, not a list"):
        write(tmp_path / "a.ckpt", [1])
    with pytest.raises(HastenError, match="no checkpoint format 'zip'"):
        write(tmp_path / "a.ckpt", {}, format="zip")
    assert list(tmp_path.iterdir()) == []
