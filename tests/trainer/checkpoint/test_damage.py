"""No damage goes unnoticed, nothing in a file is run, and every refusal says what and what to do."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch

from hasten.trainer.checkpoint import CheckpointError, latest_good, read, verify, write

STATE = {"state_dict": {"w": torch.arange(5.0), "b": torch.tensor(True)}, "epoch": 3, "a": np.arange(2)}


@pytest.fixture
def good(tmp_path):
    write(tmp_path / "a.ckpt", STATE)
    return tmp_path / "a.ckpt"


def test_every_flipped_bit_is_found(good):
    data = bytearray(good.read_bytes())
    for place in range(len(data)):
        for bit in (place % 8, 5):  # the sixth turns a letter's case, which a lenient reader forgives
            data[place] ^= 1 << bit
            good.write_bytes(data)
            with pytest.raises(CheckpointError) as caught:
                verify(good)
            assert str(good) in caught.value.message
            assert caught.value.fix
            with pytest.raises(CheckpointError):
                read(good)
            data[place] ^= 1 << bit
    good.write_bytes(data)
    verify(good)


def test_every_truncation_and_every_addition_is_found(good):
    data = good.read_bytes()
    for length in range(len(data)):
        good.write_bytes(data[:length])
        for use in (read, verify):
            with pytest.raises(CheckpointError):
                use(good)
    good.write_bytes(data[:-3])
    with pytest.raises(CheckpointError, match=f"truncated: {len(data):,} bytes expected, it has {len(data) - 3:,}"):
        read(good)
    good.write_bytes(data + b" ")
    with pytest.raises(CheckpointError, match="too long"):
        read(good)


def test_damage_to_a_torch_file_is_found(tmp_path):
    path = tmp_path / "a.ckpt"
    write(path, {"w": torch.arange(50.0)}, format="torch")
    data = bytearray(path.read_bytes())
    place = data.index(torch.arange(50.0).numpy().tobytes()) + 30
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"record .*data/0"):
        verify(path)
    with pytest.raises(CheckpointError, match="damaged"):
        read(path)
    data[place] ^= 1
    for length in range(5, len(data), 29):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            read(path)
    # A flip that the archive's checksums do not cover lies in padding and changes nothing.
    for place in range(0, len(data), 3):
        data[place] ^= 4
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            assert torch.equal(read(path)["w"], torch.arange(50.0)), place
        data[place] ^= 4


def test_each_refusal_says_what_it_is(tmp_path):
    def refusal(path):
        with pytest.raises(CheckpointError) as caught:
            verify(path)
        with pytest.raises(CheckpointError):
            read(path)
        assert caught.value.fix
        assert str(path) in caught.value.message
        return str(caught.value)

    path = tmp_path / "x"
    assert "Checkpoint file not found" in refusal(path)
    write(tmp_path / "near.ckpt", {})
    assert "near.ckpt" in refusal(path)
    path.write_bytes(b"")
    assert "empty" in refusal(path)
    path.write_text("hello, this is text")
    assert "not a checkpoint" in refusal(path)
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))
    assert "pickle" in refusal(path)
    safetensors.torch.save_file({"w": torch.ones(2)}, path)
    assert "load_file" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "x")
    assert "not a checkpoint" in refusal(path)
    assert "folder" in refusal(tmp_path)
    data = (tmp_path / "near.ckpt").read_bytes()
    path.write_bytes(data.replace(b'"version":"1"', b'"version":"2"'))
    assert "Upgrade hasten" in refusal(path)


class Evil:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_pickled_code_is_not_run_but_named(tmp_path):
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {}, "x": Evil(f"touch {tmp_path}/ran")}, path)
    with pytest.raises(CheckpointError, match=r"objects of .*system") as caught:
        read(path)
    assert "weights_only=False" in caught.value.fix
    torch.save({"hyper_parameters": {"loss": torch.nn.MSELoss()}}, path)
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.loss\.MSELoss"):
        read(path)
    assert not (tmp_path / "ran").exists()


def test_a_plain_torch_checkpoint_is_read(tmp_path):
    model = torch.nn.Linear(2, 2)
    state = {"epoch": 1, "state_dict": model.state_dict(), "callbacks": {"M{'a': 1}": {"best": torch.tensor(0.5)}}}
    torch.save(state, tmp_path / "lightning.ckpt")
    back = read(tmp_path / "lightning.ckpt")
    assert torch.equal(back["state_dict"]["weight"], model.weight)
    assert back["callbacks"] == state["callbacks"]
    torch.save([1], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match="holds a list"):
        read(tmp_path / "list.ckpt")


def test_the_newest_good_one_is_found_and_the_bad_are_named(tmp_path):
    assert latest_good(tmp_path / "none") == (None, [])
    for i in range(4):
        write(tmp_path / f"{i}.ckpt", {"i": i, "t": torch.ones(4)}, format="torch" if i == 2 else "hasten")
        os.utime(tmp_path / f"{i}.ckpt", (i, i))
    assert latest_good(tmp_path) == (tmp_path / "3.ckpt", [])
    for i in (2, 3):
        os.truncate(tmp_path / f"{i}.ckpt", 200)
        os.utime(tmp_path / f"{i}.ckpt", (i, i))
    path, notes = latest_good(tmp_path)
    assert path == tmp_path / "1.ckpt"
    assert len(notes) == 2
    assert "3.ckpt" in notes[0]
    assert "2.ckpt" in notes[1]
    for i in (0, 1):
        (tmp_path / f"{i}.ckpt").write_bytes(b"")
    path, notes = latest_good(tmp_path)
    assert path is None
    assert len(notes) == 4


def test_without_verifying_it_is_read_all_the_same(good):
    data = bytearray(good.read_bytes())
    data[-1] ^= 1
    good.write_bytes(data)
    assert read(good, verify=False)["epoch"] == 3


def forge(path, state, entries=None, data=bytes(8)):
    """A file whose checksum is right and whose content is somebody's invention."""
    entries = {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}} if entries is None else entries
    head = {"format": "hasten", "version": "1", "checksum": "0" * 64, "state": json.dumps(state)}
    text = json.dumps({"__metadata__": head, **entries}, separators=(",", ":")).encode()
    raw = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode(), 1))


def pickled_array(command):
    file = io.BytesIO()
    np.save(file, np.array([Evil(command)], object), allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def test_forged_files_are_refused_and_run_nothing(tmp_path):
    path = tmp_path / "a.ckpt"
    forge(path, {"dict": {"t": {"tensor": {"at": "t"}}}})
    assert read(path)["t"].tolist() == [0, 0]
    for value in (
        {"unknown": 1},
        {"tuple": [], "set": []},
        {"tensor": {"at": "other"}},
        {"tensor": {"at": []}},
        {"tensor": {"at": "t", "view": [1, [2], [1]]}},
        {"tensor": {"at": "t", "view": [-1, [1], [1]]}},
        {"tensor": {"at": "t", "strides": [7]}},
        {"tensor": {"at": "t", "dtype": "load", "shape": [2]}},
        {"tensor": {"at": "t", "dtype": "float64", "shape": [2]}},
        {"torch": "load"},
        {"torch": "hub"},
        {"scalar": ["O", "00" * 8]},
        {"scalar": ["<f4", "0"]},
        {"npy": {"bytes": pickled_array(f"touch {tmp_path}/ran")}},
        {"npy": {"bytes": "AAAA"}},
        {"defaultdict": ["eval", {"dict": {}}]},
        {"path": ["os.system", "x"]},
        {"range": [1, 2, 0]},
        {"set": [[1]]},
        {"items": [[{"dict": {}}, 1]]},
        {"dict": [1]},
        {"complex": ["x", "y"]},
        {"datetime": ["yesterday", 0]},
    ):
        forge(path, {"dict": {"v": value}})
        with pytest.raises(CheckpointError, match="makes no sense"):
            read(path)
    forge(path, [1])
    with pytest.raises(CheckpointError, match="no dict"):
        read(path)
    for entry in (
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32"},
        7,
    ):
        forge(path, {"dict": {}}, {"t": entry})
        with pytest.raises(CheckpointError, match="header was changed"):
            read(path)
    deep = b"[" * 100_000
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(CheckpointError):
        read(path)
    assert not (tmp_path / "ran").exists()
