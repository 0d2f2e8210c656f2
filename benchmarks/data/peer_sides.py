"""The sides of benchmarks/data/peers.py: each prepares a kind of data, and gives passes over it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.peer_tables import COLUMNS, rows_of

BATCH = 256
THREADS = 2
_SOME = 200_000  # rows of the table that a peer's own format is written of: a rate needs no more
Pass = Callable[[int], Iterator[Any]]


@dataclasses.dataclass(frozen=True)
class Facts:
    """A side.

    Args:
        package: As it is installed.
        shuffles: What of the data.
        resumes: From the middle of an epoch, as its own documentation has it.
        prepare: Reads or converts a kind of data; returns what gives the batches of pass `n`.
    """

    package: str
    shuffles: str
    resumes: str
    prepare: Callable[[str, Path], Pass]


def _decoded(raw: bytes) -> Any:
    """A JPEG as tensor, 3 x height x width; by simplejpeg where it is installed, as hasten does."""
    import torch

    try:
        import simplejpeg
    except ImportError:
        from PIL import Image

        return torch.from_numpy(np.array(Image.open(io.BytesIO(raw)).convert("RGB"))).permute(2, 0, 1)
    return torch.from_numpy(simplejpeg.decode_jpeg(raw, "RGB")).permute(2, 0, 1)


class Encoded:
    """Images in memory as JPEG, decoded as all sides decode them."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return _decoded(self.files[index])


def _sample(kind: str, row: Any) -> Any:
    """A row as tensor."""
    import torch

    return _decoded(row) if kind == "images" else torch.from_numpy(np.array(row))


def _values(batches: Any) -> Iterator[Any]:
    """The tensors of batches that are dictionaries of one entry."""
    for batch in batches:
        yield next(iter(batch.values()))


def _hasten(workers: int, shuffle: bool = True, later: bool = False) -> Callable[[str, Path], Pass]:
    """Epochs of a data set that was opened just before, or `later` ones of one that has been read already."""

    def prepare(kind: str, folder: Path) -> Pass:
        from hasten.data import DataLoader, ParquetDataset

        options: dict[str, Any] = {
            "images": {"columns": ["image"], "images": ["image"]},
            "tabular": {"columns": [], "stack": {"x": COLUMNS}},
            "tokens": {"columns": ["tokens"]},
        }[kind]
        path = folder / f"{kind}.parquet"
        read = ParquetDataset(path, **options)
        if later:
            for _ in DataLoader(read, BATCH):
                pass

        def begin(number: int) -> Iterator[Any]:
            data = read if later else ParquetDataset(path, **options)
            return _values(DataLoader(data, BATCH, shuffle=shuffle, num_workers=workers, seed=number))

        return begin

    return prepare


def _torch(kind: str, folder: Path) -> Pass:
    from torch.utils.data import DataLoader

    from benchmarks.data.loaders import Images, Rows

    rows = rows_of(kind, folder)
    loader = DataLoader(Images(rows) if kind == "images" else Rows(rows), BATCH, shuffle=True)
    return lambda number: iter(loader)


def _expert(kind: str, folder: Path) -> Pass:
    from torch.utils.data import DataLoader

    from benchmarks.data.loaders import Gathered, as_it_is

    rows = rows_of(kind, folder)
    loader: Any = (
        DataLoader(Encoded(rows), BATCH, shuffle=True, num_workers=THREADS)  # type: ignore[arg-type]
        if kind == "images"
        else DataLoader(Gathered(rows), BATCH, shuffle=True, collate_fn=as_it_is)
    )
    return lambda number: iter(loader)


def _datasets(kind: str, folder: Path) -> Pass:
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader

    data = Dataset.from_parquet(str(folder / f"{kind}.parquet"), cache_dir=str(folder / "datasets"))

    def decoded(rows: Any) -> Any:
        return {"image": [_decoded(raw) for raw in rows["image"]]}

    if kind == "images":
        data = data.with_transform(decoded)
        loader: Any = DataLoader(data, BATCH, shuffle=True, num_workers=THREADS)
        return lambda number: _values(loader)
    data = data.with_format("torch")

    def stacked(batches: Any) -> Iterator[Any]:
        for batch in batches:
            yield batch["tokens"] if kind == "tokens" else torch.stack([batch[name] for name in COLUMNS], 1)

    return lambda number: stacked(data.shuffle(seed=number).iter(BATCH))


def _webdataset(kind: str, folder: Path) -> Pass:
    import torch
    import webdataset

    rows = rows_of(kind, folder, _SOME // 4)
    place = folder / f"web-{kind}"
    place.mkdir(exist_ok=True)
    with webdataset.ShardWriter(f"{place}/%05d.tar", maxcount=max(1, len(rows) // 16), verbose=0) as writer:
        for number, row in enumerate(rows):
            raw = row if kind == "images" else row.tobytes()
            writer.write({"__key__": f"{number:08}", "bin": raw})
    shards = sorted(map(str, place.glob("*.tar")))
    kinds = {"tabular": torch.float32, "tokens": torch.int32}

    def sample(found: Any) -> Any:
        raw = found["bin"]
        return _decoded(raw) if kind == "images" else torch.frombuffer(bytearray(raw), dtype=kinds[kind])

    def begin(number: int) -> Iterator[Any]:
        data = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=number).shuffle(4096).map(sample)
        workers = THREADS if kind == "images" else 0
        return iter(webdataset.WebLoader(data, batch_size=BATCH, num_workers=workers))

    return begin


def _mosaic(kind: str, folder: Path) -> Pass:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    rows = rows_of(kind, folder, _SOME)
    clean_stale_shared_memory()
    shape = "" if kind == "images" else f":{rows.shape[1]}"
    encoding = {"images": "bytes", "tabular": f"ndarray:float32{shape}", "tokens": f"ndarray:int32{shape}"}[kind]
    place = str(folder / f"mds-{kind}")
    with MDSWriter(out=place, columns={"x": encoding}) as writer:
        for row in rows:
            writer.write({"x": row})

    class Tensors(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return _sample(kind, super().__getitem__(index)["x"])

    data = Tensors(local=place, shuffle=True, batch_size=BATCH)
    return lambda number: iter(DataLoader(data, BATCH, num_workers=THREADS if kind == "images" else 0))


def _litdata(kind: str, folder: Path) -> Pass:
    import litdata

    rows = rows_of(kind, folder, _SOME)
    place = folder / f"lit-{kind}"
    writer = litdata.streaming.writer.BinaryWriter(str(place), chunk_bytes="16MB")
    for number, row in enumerate(rows):
        writer[number] = row
    writer.done()
    writer.merge()

    class Tensors(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return _sample(kind, super().__getitem__(index))

    workers = THREADS if kind == "images" else 0

    def begin(number: int) -> Iterator[Any]:
        data = Tensors(str(place), shuffle=True, seed=number)
        return iter(litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers))

    return begin


def _grain(kind: str, folder: Path) -> Pass:
    import grain
    import torch

    rows = rows_of(kind, folder)

    def as_array(row: Any) -> Any:
        return _decoded(row).numpy() if kind == "images" else row

    def begin(number: int) -> Iterator[Any]:
        data = grain.MapDataset.source(rows).shuffle(seed=number).map(as_array)
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=2 * BATCH)
        return map(torch.from_numpy, data.to_iter_dataset(options).batch(BATCH))

    return begin


def _spdl(kind: str, folder: Path) -> Pass:
    import torch
    from spdl.pipeline import PipelineBuilder

    rows = rows_of(kind, folder)

    def made(indices: Any) -> Any:
        if kind == "images":
            return torch.stack([_decoded(rows[index]) for index in indices])
        return torch.from_numpy(rows[indices])

    def begin(number: int) -> Iterator[Any]:
        order = np.random.default_rng(number).permutation(len(rows))
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        builder = PipelineBuilder().add_source(batches).pipe(made, concurrency=THREADS).add_sink(4)
        pipeline = builder.build(num_threads=THREADS)
        with pipeline.auto_stop():
            yield from pipeline

    return begin


def _arrow_batches(tables: Iterator[Any], kind: str) -> Iterator[Any]:
    """Tensors of BATCH rows from tables of any length."""
    import torch

    for table in tables:
        if kind == "images":
            held: Any = table.column("image").to_pylist()
        elif kind == "tokens":
            column = table.column("tokens")
            column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
            held = column.flatten().to_numpy(zero_copy_only=False).reshape(table.num_rows, -1)
        else:
            held = np.stack([table.column(name).to_numpy(zero_copy_only=False) for name in COLUMNS], axis=1)
        for start in range(0, len(held), BATCH):
            part = held[start : start + BATCH]
            yield torch.stack([_decoded(raw) for raw in part]) if kind == "images" else torch.from_numpy(part.copy())


def _daft(kind: str, folder: Path) -> Pass:
    import daft

    file = str(folder / f"{kind}.parquet")

    def begin(number: int) -> Iterator[Any]:
        found = daft.read_parquet(file).to_arrow_iter()
        return _arrow_batches(found, kind)

    return begin


def _ray(kind: str, folder: Path) -> Pass:
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray
    import torch

    if not ray.is_initialized():  # by a former kind
        ray.init(num_cpus=THREADS, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = ray.data.read_parquet(str(folder / f"{kind}.parquet"))

    def begin(number: int) -> Iterator[Any]:
        options: dict[str, Any] = {"batch_size": BATCH, "local_shuffle_buffer_size": 4096, "local_shuffle_seed": number}
        if kind != "tabular":
            for batch in data.iter_batches(batch_format="numpy", **options):
                (column,) = batch.values()
                if kind == "images":
                    yield torch.stack([_decoded(raw) for raw in column])
                else:
                    yield torch.from_numpy(np.stack(column))
            return
        for batch in data.iter_torch_batches(**options):
            yield torch.stack([batch[name] for name in COLUMNS], 1)

    return begin


def _limit(kind: str, folder: Path) -> Pass:
    import pyarrow.parquet as pq

    from hasten.data.parquet_images import decode

    file = folder / f"{kind}.parquet"

    def begin(number: int) -> Iterator[Any]:
        with pq.ParquetFile(file) as opened:
            for group in itertools.count():
                if group == opened.num_row_groups:
                    return
                read = opened.read_row_group(group, use_threads=False)
                yield decode(read["image"].to_pylist(), "image") if kind == "images" else read

    return begin


_WINDOW = "row groups, and rows of 16 of them"
_EXACTLY = "exactly, on other ranks and workers"
SIDES: dict[str, Facts] = {
    "hasten": Facts("hasten", _WINDOW, _EXACTLY, _hasten(2)),
    "hasten, no workers": Facts("hasten", _WINDOW, _EXACTLY, _hasten(0)),
    "hasten, in order": Facts("hasten", "nothing here", _EXACTLY, _hasten(0, shuffle=False)),
    "hasten, later epochs": Facts("hasten", _WINDOW, _EXACTLY, _hasten(0, later=True)),
    "torch": Facts("torch", "all rows, in memory", "not by itself", _torch),
    "torch, expert": Facts("torch", "all rows, in memory", "not by itself", _expert),
    "datasets": Facts("datasets", "all rows, by an index", "not map-style ones", _datasets),
    "webdataset": Facts("webdataset", "shards, and a buffer of 4096", "not", _webdataset),
    "mosaicml": Facts("mosaicml-streaming", "shards, and blocks", "if the global batch divides", _mosaic),
    "litdata": Facts("litdata", "chunks, and rows within them", "yes, with its own loader", _litdata),
    "grain": Facts("grain", "all rows, by an index", "exactly, on other ranks", _grain),
    "spdl": Facts("spdl", "all rows, by the script's order", "not by itself", _spdl),
    "daft": Facts("daft", "nothing here", "not within an epoch", _daft),
    "ray": Facts("ray", "a buffer of 4096", "not within an epoch", _ray),
    "limit": Facts("pyarrow", "nothing: reads in order, makes no batches", "-", _limit),
}
