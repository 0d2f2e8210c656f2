"""hasten.data.ParquetDataset: the rows of the files, each once, as tensors; what it cannot read is said at once."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset

from hasten.data import DataLoader, ParquetDataset
from hasten.errors import HastenError
from tests.data.loader_trainings import ranks_loaders

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

ROWS = 120
RAGGED = [list(range(row, row + row % 5)) for row in range(ROWS)]


def write(folder, name="a.parquet", start=0, rows=ROWS, group=10, **columns):
    folder.mkdir(exist_ok=True)
    ids = np.arange(start, start + rows)
    table = {
        "id": ids,
        "x": (ids * 0.5).astype(np.float32),
        "y": (ids * 2.0).astype(np.float32),
        "flag": ids % 2 == 0,
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 3).astype(np.int32)), 3),
        "tokens": [list(range(row, row + row % 5)) for row in ids.tolist()],
        "text": [f"row {row}" for row in ids],
        **columns,
    }
    pq.write_table(pa.table(table), folder / name, row_group_size=group)
    return folder / name


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "a.parquet", 0, 70)
    write(tmp_path, "b.parquet", 70, 50, group=7)
    return tmp_path


def ids_of(loader):
    return [batch["id"].tolist() for batch in loader]


def flat(batches):
    return [row for batch in batches for row in batch]


def test_batches_hold_the_columns_as_tensors(folder):
    data = ParquetDataset(folder, stack={"features": ["x", "y"]})
    assert len(data) == ROWS
    for batch in DataLoader(data, batch_size=16, shuffle=True, seed=1):
        ids = batch["id"]
        assert ids.dtype == torch.int64
        assert torch.equal(batch["features"], torch.stack([ids * 0.5, ids * 2.0], 1).float())
        assert torch.equal(batch["flag"], ids % 2 == 0)
        assert torch.equal(batch["vector"], ids[:, None].expand(-1, 3).int())
        assert batch["text"] == [f"row {row}" for row in ids.tolist()]
        assert batch["tokens_lengths"].tolist() == (ids % 5).tolist()
        for row, length, index in zip(batch["tokens"], batch["tokens_lengths"], ids.tolist(), strict=True):
            assert row[:length].tolist() == RAGGED[index]
            assert not row[length:].any()
        assert "x" not in batch or "features" in batch


def test_ragged_lists_are_packed_and_padded_by_what_is_asked(folder):
    data = ParquetDataset(folder, ["id", "tokens"], ragged="packed")
    for batch in DataLoader(data, batch_size=9, shuffle=True):
        bounds = batch["tokens_offsets"].tolist()
        for number, index in enumerate(batch["id"].tolist()):
            assert batch["tokens"][bounds[number] : bounds[number + 1]].tolist() == RAGGED[index]
    padded = next(iter(DataLoader(ParquetDataset(folder, ["tokens"], padding=-1), batch_size=3)))
    assert padded["tokens"].tolist() == [[-1, -1], [1, -1], [2, 3]]


def test_only_the_columns_asked_for_are_read(folder):
    batch = next(iter(DataLoader(ParquetDataset(folder / "*.parquet", ["x"]), batch_size=4)))
    assert {name: values.tolist() for name, values in batch.items()} == {"x": [0.0, 0.5, 1.0, 1.5]}
    assert ParquetDataset(folder)[119]["text"] == "row 119"
    assert ParquetDataset(folder)[-1]["vector"].tolist() == [119] * 3


@pytest.mark.parametrize("workers", [{"num_workers": 1}, {"num_workers": 3}, {"num_workers": 2, "workers": "process"}])
def test_workers_and_a_copy_change_nothing(folder, workers):
    data = ParquetDataset(folder, ["id"], window=3)
    plain = DataLoader(data, batch_size=7, shuffle=True)
    loader = DataLoader(pickle.loads(pickle.dumps(data)), batch_size=7, shuffle=True, **workers)
    for _ in range(2):
        batches = ids_of(loader)
        assert batches == ids_of(plain)
        assert sorted(flat(batches)) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore:.*come twice")
@pytest.mark.parametrize(("ranks", "after"), [(1, 2), (2, 4), (4, 1), (3, 2), (2, 3)])
def test_other_ranks_go_on_with_the_same_rows(folder, ranks, after):
    def loaders(count, batch_size):
        return ranks_loaders(
            ParquetDataset(folder, ["id"], window=4), count, batch_size=batch_size, shuffle=True, seed=2
        )

    whole = flat(ids_of(loaders(1, 120)[0]))
    first, second = loaders(ranks, 4), loaders(after, 5)
    passes = [iter(loader) for loader in first]
    rows = {row for _ in range(5) for one in passes for row in next(one)["id"].tolist()}
    assert rows == set(whole[: ranks * 20]) if ranks * 20 < ROWS else True
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
    shares = [ids_of(loader) for loader in second]
    assert len({len(share) for share in shares}) == 1
    assert rows | set(flat(flat(shares))) == set(range(ROWS))
    assert len(rows) + len(flat(flat(shares))) - ROWS < after


def test_ranks_read_row_groups_of_their_own(folder, monkeypatch):
    data = [ParquetDataset(folder, ["id"], window=4) for _ in range(2)]
    read = [[], []]
    for own, groups in zip(data, read, strict=True):
        plain = own._read
        monkeypatch.setattr(
            own,
            "_read",
            lambda group, *coming, plain=plain, groups=groups: (groups.append(group), plain(group, *coming))[1],
        )
    for rank in range(2):
        ids_of(DataLoader(data[rank], batch_size=6, shuffle=True, rank=rank, world_size=2))
    groups = [set(groups) for groups in read]
    # Groups that lie across the border of two lanes are read for both.
    assert sum(map(len, groups)) <= len(data[0]._groups) + 4
    assert all(len(seen) == len(groups) for seen, groups in zip(read, groups, strict=True)), "each only once"


def test_a_shuffled_epoch_is_well_mixed(tmp_path):
    data = ParquetDataset(write(tmp_path, rows=4000, group=100), ["id"], window=8)
    batches = ids_of(DataLoader(data, batch_size=80, shuffle=True))
    groups = [len({row // 100 for row in batch}) for batch in batches]
    assert min(groups) >= 8
    order = np.array(flat(batches))
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.5
    assert (np.diff(order) == 1).mean() < 0.01
    again = ids_of(DataLoader(data, batch_size=80, shuffle=True, seed=1))
    assert flat(again) != flat(batches)


def test_filters_leave_out_rows(folder):
    data = ParquetDataset(folder, ["id"], filters=[("x", ">=", 20.0), ("flag", "==", True)])
    wanted = [row for row in range(ROWS) if row * 0.5 >= 20 and row % 2 == 0]
    assert flat(ids_of(DataLoader(data, batch_size=8))) == wanted
    assert sorted(flat(ids_of(DataLoader(data, batch_size=8, shuffle=True, num_workers=2)))) == wanted


def jpeg(value, size=(20, 12), mode="RGB", **options):
    pixels = np.random.default_rng(value).integers(0, 255, (size[1], size[0], 4), np.uint8)
    image = Image.fromarray(pixels[:, :, :3]).convert(mode)
    stream = io.BytesIO()
    image.save(stream, "JPEG" if mode != "P" else "PNG", **options)
    return stream.getvalue()


KINDS = [
    {}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2, "quality": 30}, {"mode": "L"}, {"mode": "CMYK"},
    {"mode": "P"},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [True, False])
def test_images_are_pillows_pixels(tmp_path, monkeypatch, kind, fast):
    if not fast:
        monkeypatch.setattr("hasten.data.parquet_images._simplejpeg", lambda: None)
    files = [jpeg(number, **kind) for number in range(6)]
    column = pa.array([{"bytes": file, "path": None} for file in files])
    path = write(tmp_path, rows=6, picture=column)
    batch = next(iter(DataLoader(ParquetDataset(path, ["id"], images=["picture"]), batch_size=6)))
    wanted = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
    assert torch.equal(batch["picture"], torch.from_numpy(np.stack(wanted)).permute(0, 3, 1, 2))


def test_images_of_differing_sizes_are_a_list(tmp_path):
    files = [jpeg(number, size=(8 + number, 8)) for number in range(3)]
    batch = next(iter(DataLoader(ParquetDataset(write(tmp_path, rows=3, p=files), ["p"], images=["p"]), batch_size=3)))
    assert [image.shape for image in batch["p"]] == [(3, 8, 8 + number) for number in range(3)]


@pytest.mark.filterwarnings("ignore:.*failed")
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "workers": "process"}])
def test_a_damaged_image_is_named_or_left_out(tmp_path, workers):
    files = [jpeg(number) for number in range(12)]
    files[5], files[7] = files[5][:40], b"nothing"
    data = ParquetDataset(write(tmp_path, rows=12, group=4, p=files), ["id"], images=["p"])
    with pytest.raises(HastenError, match=r"row 5 \(.*a.parquet, row group 1, row 1 of it\): no image in column 'p'"):
        ids_of(DataLoader(data, batch_size=4, **workers))
    loader = DataLoader(data, batch_size=4, on_error="skip", **workers)
    assert ids_of(loader) == [[0, 1, 2, 3], [4, 6], [8, 9, 10, 11]]
    assert [fault.index for fault in loader.faults] == [5, 7]
    batches = ids_of(DataLoader(data, batch_size=4, on_error="substitute", **workers))
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert not {5, 7} & set(flat(batches))


@pytest.mark.filterwarnings("ignore:.*failed")
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "process"}])
def test_a_damaged_row_group_is_named_or_left_out(tmp_path, workers):
    path = write(tmp_path, rows=40, group=10)
    spot = pq.read_metadata(path).row_group(2).column(0)
    with path.open("r+b") as file:
        file.seek(min(spot.dictionary_page_offset or spot.data_page_offset, spot.data_page_offset))
        file.write(b"\xff" * 16)
    data = ParquetDataset(path, ["id"])
    with pytest.raises(HastenError, match=r"cannot read .*a.parquet, row group 2: ") as caught:
        ids_of(DataLoader(data, batch_size=8, **workers))
    assert "one of the samples 16, 17" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    loader = DataLoader(data, batch_size=8, on_error="skip", **workers)
    assert flat(ids_of(loader)) == [*range(20), *range(30, 40)]
    assert [fault.index for fault in loader.faults] == list(range(20, 30))
    assert loader.faults[3].where == f"{path}, row group 2, row 3 of it"


def test_the_limit_of_pixels_holds(tmp_path, monkeypatch):
    data = ParquetDataset(write(tmp_path, rows=1, p=[jpeg(1, size=(40, 40))]), ["id"], images=["p"])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    with pytest.raises(HastenError, match="DecompressionBomb"):
        data[0]


class Doubled:
    def __call__(self, batch):
        return {"double": batch["id"] * 2}


def test_a_transform_gets_whole_batches(folder):
    loader = DataLoader(ParquetDataset(folder, ["id"], transform=Doubled()), batch_size=50, num_workers=2)
    assert flat(batch["double"].tolist() for batch in loader) == list(range(0, 240, 2))


def test_a_transform_is_not_left_out_where_rows_are_asked_for_one_by_one(folder):
    data = ParquetDataset(folder, ["id"], transform=Doubled())
    for loader in (TorchLoader(data, 4), DataLoader(Subset(data, [1, 3]), 2)):
        with pytest.raises(HastenError, match="rows of a ParquetDataset with a transform come in batches"):
            next(iter(loader))
    assert data.read_batch([3])["double"].tolist() == [6]


class Drawn:
    def __call__(self, batch):
        return {"id": batch["id"] + torch.randint(0, 5, batch["id"].shape)}


def test_a_transform_that_draws_from_the_trainings_generator_is_refused_on_threads(folder):
    with pytest.raises(HastenError, match="draw from the process-wide random generators"):
        next(iter(DataLoader(ParquetDataset(folder, ["id"], transform=Drawn()), 4, num_workers=1)))


@pytest.mark.parametrize("ragged", ["pad", "packed"])
def test_a_row_has_all_that_its_lists_have(folder, ragged):
    data = ParquetDataset(folder, ["id", "tokens", "vector"], ragged=ragged)
    for index in (0, 4, 119, -1):
        row = data[index]
        assert row["tokens"].tolist() == RAGGED[index]
        assert row["vector"].tolist() == [index % ROWS] * 3
        assert row.keys() == {"id", "tokens", "vector"} | ({"tokens_lengths"} if ragged == "pad" else set())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": ["tokens"], "padding": 0.5}, "padding=0.5 is no int64, of which the lists in column 'tokens' are"),
        ({"columns": ["tokens"], "padding": float("nan")}, "padding=nan is no int64"),
        ({"columns": ["tokens"], "padding": 1 << 63}, "is no int64"),
        ({"paths": "nowhere/*.parquet"}, "no Parquet file at nowhere"),
        ({"paths": []}, "no path"),
        ({"paths": "nonsense://bucket/a.parquet"}, "cannot be read"),
        ({"columns": ["z"]}, "a.parquet has no column 'z'"),
        ({"images": ["x"]}, "'x' is float: images are columns of bytes"),
        ({"stack": {"both": ["id", "x"]}}, "columns of one type of number, not float, int64"),
        ({"ragged": "cut"}, "'pad' or 'packed'"),
        ({"window": 0}, "at least 1"),
        ({"filters": [("id", ">", 1000)]}, "no row passes"),
        ({"filters": [("nothing", ">", 1)]}, "cannot be applied"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(folder, options, text):
    with pytest.raises(HastenError, match=text):
        ParquetDataset(**{"paths": folder, **options})


def test_files_that_do_not_belong_together_or_are_none(folder, tmp_path):
    (tmp_path / "text.txt").write_text("no parquet")
    with pytest.raises(HastenError, match=r"cannot read .*text.txt as Parquet"):
        ParquetDataset(tmp_path / "text.txt")
    pq.write_table(pa.table({"x": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(HastenError, match=r"'x' is float in .*a.parquet and string in .*c.parquet"):
        ParquetDataset(tmp_path, ["x"])
    pq.write_table(pa.table({"x": pa.array([], pa.float32())}), tmp_path / "empty.parquet")
    with pytest.raises(HastenError, match="their files have no rows"):
        ParquetDataset(tmp_path / "empty.parquet")
    pq.write_table(pa.table({"x": [1, None]}), tmp_path / "nulls.parquet")
    with pytest.raises(HastenError, match=r"'x' has 1 nulls in .*nulls.parquet, row group 0"):
        ids_of(DataLoader(ParquetDataset(tmp_path / "nulls.parquet")))
    valid = ParquetDataset(
        tmp_path / "nulls.parquet", filters=pytest.importorskip("pyarrow.dataset").field("x").is_valid()
    )
    assert [batch["x"].tolist() for batch in DataLoader(valid)] == [[1]]


def test_a_file_that_vanishes_or_changes_while_it_is_read_is_said(folder):
    data = ParquetDataset(folder, ["id"])
    path = write(folder, "a.parquet", 500, 70)
    with pytest.raises(HastenError, match=r"a.parquet was changed"):
        data[0]
    path.unlink()
    with pytest.raises(HastenError, match=r"a.parquet cannot be read any more: No such file"):
        data[0]


def test_a_state_of_other_files_is_refused(folder, tmp_path):
    state = DataLoader(ParquetDataset(folder, ["id"]), shuffle=True).state_dict()
    assert len(str(state)) < 500
    write(tmp_path / "other", rows=ROWS)
    with pytest.raises(HastenError, match="other data or another order"):
        DataLoader(ParquetDataset(tmp_path / "other", ["id"]), shuffle=True).load_state_dict(state)


@pytest.mark.parametrize(("pixels", "workers"), [(16, "process"), (128, "thread")])
def test_very_small_images_are_decoded_in_processes(tmp_path, pixels, workers):
    path = write(tmp_path, rows=20, image=[jpeg(number, (pixels, pixels)) for number in range(20)])
    data = ParquetDataset(path, ["id"], images=["image"])
    loader = DataLoader(data, 4, num_workers=2, shuffle=True)
    assert loader.workers == data.best_workers == workers
    threads = DataLoader(data, 4, num_workers=2, shuffle=True, workers="thread")
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(loader, threads, strict=True))


def test_a_transform_that_may_use_the_gpu_stays_in_this_process(tmp_path, monkeypatch):
    path = write(tmp_path, rows=20, image=[jpeg(number) for number in range(20)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ParquetDataset(path, images=["image"], transform=lambda batch: batch).best_workers == "thread"
    assert ParquetDataset(path, images=["image"]).best_workers == "process"
