"""Makes the samples of a batch: seeded one by one, watched for hangs, and with a policy for samples that fail.

`SampleFetcher` replaces the dataset in a loader's workers. Before each sample it writes the index and time into the
worker's beat (read by `passes`) and reseeds the generators. `Collate` replaces the collate function, and sends the
failed samples (`SampleFault`) along with the batch to the training's `FaultLedger`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from hasten.data.elastic import KeyedBatch
from hasten.data.first_batches import KeyedPart, Packed
from hasten.data.permutation import key_of, keys_of
from hasten.data.remote.options import RemoteError
from hasten.data.sample_keys import Reseed, draws_nothing
from hasten.errors import HastenError
from hasten.messages import warn

ON_ERROR = ("raise", "skip", "substitute")
_SHM = "/dev/shm"
IDLE, COLLATING = -1, -2  # stand in a worker's beat instead of a sample index
_SHOWN = 5  # faults listed in a message
_TRIES = 10  # substitutes tried for a failed sample


class SampleError(HastenError, RuntimeError):
    """A batch of which every sample failed."""


@dataclasses.dataclass(frozen=True)
class SampleFault:
    """A sample that raised an error and was skipped or replaced.

    Args:
        index: Index of the sample.
        epoch: Epoch in which it failed.
        error: Type and message of the exception.
        stack: Its traceback.
        substitute: Index of the sample used instead; None: the sample was skipped.
        where: File, row group and row for a ParquetDataset; "" for other datasets.
    """

    index: int
    epoch: int
    error: str
    stack: str
    substitute: int | None = None
    where: str = ""


class FaultLedger:
    """The faults of a loader's passes, with the warnings about them.

    Iterators hold the ledger and not the loader, which would be a reference cycle.
    """

    def __init__(self) -> None:
        self.faults: list[SampleFault] = []

    def note(self, faults: list[SampleFault]) -> None:
        """Add a batch's faults, and warn about the very first with its stack."""
        if not self.faults:
            first = faults[0]
            warn(f"sample {first.index} of epoch {first.epoch} failed and {_fate(first)}:\n{first.stack}", stacklevel=4)
        self.faults.extend(faults)

    def tell(self) -> None:
        """Warn, at the end of a pass, how many samples have failed so far."""
        if self.faults:
            shown = "; ".join(f"{fault.index} ({fault.error}) {_fate(fault)}" for fault in self.faults[:_SHOWN])
            more = ", ..." if len(self.faults) > _SHOWN else ""
            warn(f"{len(self.faults)} samples failed so far: {shown}{more}", stacklevel=4)


def _fate(fault: SampleFault) -> str:
    return "is left out" if fault.substitute is None else f"is replaced by sample {fault.substitute}"


class FetchedBatch:
    """A batch with the faults of its samples, as a worker sends them."""

    __slots__ = ("batch", "faults")

    def __init__(self, batch: Any, faults: list[SampleFault]) -> None:
        self.batch = batch
        self.faults = faults

    def pin_memory(self, *device: Any) -> FetchedBatch:
        """Called by torch's pin_memory thread."""
        return FetchedBatch(pin_memory(self.batch, *device), self.faults)


class SampleFetcher(Dataset[Any]):
    """A wrapper around the dataset, for a loader's workers, that makes the samples of a `KeyedBatch`.

    Args:
        dataset: The user's dataset.
        collate: The user's collate function; generators stored in it are reseeded too.
        on_error: "raise", "skip" or "substitute".
        shared: Reseed the process-wide generators, and those stored in dataset and collate, for each sample.
    """

    def __init__(self, dataset: Any, collate: Any, on_error: str, shared: bool) -> None:
        self.dataset = dataset
        self.on_error = on_error
        self.faults: list[SampleFault] = []  # of the current batch
        self.partial = False  # whether the current batch is only a part of one (see first_batches)
        self.worker: int | None = None
        self._beat = np.zeros(4, np.int64)  # the current sample: index, start (ns), batch number
        self.read_batch = getattr(dataset, "read_batch", None)  # a ParquetDataset reads whole batches: no collate
        self.reseed = None
        if not draws_nothing(dataset, collate):
            self.reseed = Reseed({"dataset": dataset, "collate_fn": collate}, shared)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def watched(self, beat: Any, worker: int) -> None:
        """Report the current sample in `beat`, this worker's row of shared memory, from now on."""
        self._beat, self.worker = beat, worker

    def begins(self, index: int, number: int) -> None:
        """Report that a sample begins, or a step that is IDLE or COLLATING."""
        self._beat[1] = time.monotonic_ns()
        self._beat[2] = number
        self._beat[0] = index

    def __getitems__(self, batch: list[int]) -> list[Any]:
        """Return the samples of a batch, with failed ones treated as `on_error` says."""
        if not isinstance(batch, KeyedBatch):  # the loader's sampler was replaced: use fixed keys
            batch = KeyedBatch(list(batch), 0, 0, 0)
        self.faults = []
        try:
            if self.read_batch is not None:
                return [self._read_batch(self.read_batch, batch)]
            many = getattr(self.dataset, "__getitems__", None)
            samples = self._together(many, batch) if many is not None else self._each(batch)
            self.partial = isinstance(batch, KeyedPart)
            if not samples and not self.partial:
                raise SampleError(f"all {len(batch)} samples of {self._where(batch)} failed: {self.faults[0].stack}")
            self.begins(COLLATING, batch.number)
        except BaseException:
            self.begins(IDLE, batch.number)
            raise
        return samples

    def _together(self, many: Callable[[list[int]], Any], batch: KeyedBatch) -> list[Any]:
        """Call the dataset's `__getitems__`, seeded by the first sample; if that fails, make the samples one by one."""
        with self._at_once(batch):
            return list(many(list(batch)))
        return self._each(batch)  # reached when `_at_once` swallowed an error

    @contextlib.contextmanager
    def _at_once(self, batch: KeyedBatch) -> Iterator[None]:
        """Run a block that makes many samples, seeded by the first; swallow its error if `on_error` allows faults."""
        self.begins(batch[0], batch.number)
        if self.reseed is not None:
            self.reseed(_keys(batch, batch[:1])[0])
        try:
            yield
        except Exception as error:
            if self.on_error == "raise" or isinstance(error, RemoteError):
                error.add_note(self._note(f"one of the samples {_few(batch)}", batch, error))
                raise

    def _read_batch(self, read: Callable[[list[int]], Any], batch: KeyedBatch) -> Any:
        """Read a batch at once; if that fails, find the samples that fail and read the others."""
        with self._at_once(batch):
            return read(batch)
        good: list[int] = []
        for index in batch:
            try:
                self._sample(index)
                good.append(index)
            except Exception as error:
                if isinstance(error, RemoteError):  # the server is down, not one sample bad: don't retry them all
                    raise
                self._replace(index, error, batch, [])
                substitute = self.faults[-1].substitute
                good += [] if substitute is None else [substitute]
        if not good:
            raise SampleError(f"all {len(batch)} samples of {self._where(batch)} failed: {self.faults[0].stack}")
        return read(good)

    def _sample(self, index: int) -> Any:
        """Return one sample; of a ParquetDataset one row before the transform, which is made for batches."""
        return self.dataset[index] if self.read_batch is None else self.dataset.row(index)

    def _each(self, batch: KeyedBatch) -> list[Any]:
        """Make the samples one by one, each seeded by its own key."""
        dataset, reseed, beat = self.dataset, self.reseed, self._beat
        beat[2] = batch.number
        keys = _keys(batch, batch) if reseed is not None else batch
        samples = []
        for index, key in zip(batch, keys, strict=True):
            beat[1] = time.monotonic_ns()
            beat[0] = index
            if reseed is not None:
                reseed(key)
            try:
                samples.append(dataset[index])
            except Exception as error:
                if self.on_error == "raise" or isinstance(error, RemoteError):
                    error.add_note(self._note(f"sample {index}", batch, error))
                    raise
                self._replace(index, error, batch, samples)
        return samples

    def _replace(self, index: int, error: Exception, batch: KeyedBatch, samples: list[Any]) -> None:
        """Skip a failed sample, or append a substitute chosen by seed, epoch and index; note the fault."""
        description = f"{type(error).__name__}: {error}"
        stack = "".join(traceback.format_exception(error))
        substitute = None
        if self.on_error == "substitute":
            for number in range(_TRIES):
                substitute = key_of(batch.seed, batch.epoch, index, number) % len(self.dataset)
                if self.reseed is not None:
                    self.reseed(_keys(batch, [substitute])[0])
                try:
                    samples.append(self._sample(substitute))
                    break
                except Exception as failure:
                    last = failure
            else:
                last.add_note(self._note(f"sample {index}, and {_TRIES} others tried in its place,", batch, last))
                raise last
        where = getattr(self.dataset, "where", None) if self.read_batch is not None else None
        place = "" if where is None else where(index)
        self.faults.append(SampleFault(index, batch.epoch, description, stack, substitute, place))

    def _where(self, batch: KeyedBatch) -> str:
        worker = "" if self.worker is None else f", worker {self.worker}"
        return f"batch {batch.number} of epoch {batch.epoch}{worker}"

    def _note(self, which: str, batch: KeyedBatch, error: Exception) -> str:
        note = f"hasten: {which} of {type(self.dataset).__name__} failed ({self._where(batch)})"
        if isinstance(error, RemoteError):
            return note
        return (
            f'{note}; DataLoader(on_error="skip") leaves such samples out, on_error="substitute" takes others in their '
            "place"
        )


class Collate:
    """A `collate_fn` that runs the user's, and attaches the faults of failed samples to the batch.

    Args:
        collate: The user's collate function.
        source: The fetcher that made the samples.
        shares: Move tensors to shared memory here, so that this worker can report a full /dev/shm. torch moves them
            in its queue's thread, which on an error prints it and drops the batch, and the training waits forever.
    """

    def __init__(self, collate: Callable[[Any], Any], source: SampleFetcher, shares: bool) -> None:
        self.collate = collate
        self.source = source
        self.shares = shares

    def __call__(self, samples: Any) -> Any:
        source = self.source
        try:
            if source.partial:
                packed = Packed(samples, source.faults)
                if self.shares:
                    share(packed.content)
                return packed
            batch = samples[0] if source.read_batch is not None else self.collate(samples)
            if self.shares:
                share(batch)
        except Exception as error:
            error.add_note(f"hasten: while {len(samples)} samples of {type(source.dataset).__name__} were collated")
            if no_room(error):
                error.add_note(f"hasten: {shm_text()}")
            raise
        finally:
            source.begins(IDLE, 0)
            if source.reseed is not None:
                source.reseed.over()
        return FetchedBatch(batch, source.faults) if source.faults else batch


def share(batch: Any) -> None:
    """Move a batch's tensors to shared memory, in a worker; raise an error that `no_room` recognizes if it is full."""
    for tensor in _to_share(batch):
        if not tensor.is_shared():
            tensor.share_memory_()


def no_room(error: BaseException) -> bool:
    """Return whether this is torch's error for full shared memory."""
    return "shm" in str(error) or "shared memory" in str(error)


def shared_bytes(batch: Any) -> int:
    """Return the bytes of shared memory that a batch takes when a worker sends it."""
    return sum(int(tensor.nbytes) for tensor in _to_share(batch))


def _to_share(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        if batch.device.type == "cpu" and batch.layout == torch.strided:
            yield batch
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from _to_share(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _to_share(part)


def shm_free() -> int | None:
    """Return the free bytes in /dev/shm; None if it does not exist."""
    try:
        return shutil.disk_usage(_SHM).free
    except OSError:
        return None


def shm_text() -> str:
    """Return, in words, how much shared memory is free and how to get more."""
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError:
        return "There is no /dev/shm here"
    return (
        f"/dev/shm has {usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MB free: fewer workers, a smaller "
        "prefetch_factor or batch_size, workers='thread', or more of it (docker run --shm-size=8g)"
    )


def _keys(batch: KeyedBatch, indices: list[int]) -> list[int]:
    key = key_of(batch.seed, batch.epoch)
    keys: list[int] = keys_of(key, np.asarray(indices, np.int64)).tolist()
    return keys


def _few(batch: list[int]) -> str:
    return ", ".join(map(str, batch[:8])) + (", ..." if len(batch) > 8 else "")
