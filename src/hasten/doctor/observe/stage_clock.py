"""The clock that is hung into reading, decoding, transforms and collating while one batch is made.

Stages nest, and each instant counts for the innermost one: PIL reads its file while it decodes, and it decodes, on
first use, within a transform. So the stages of a batch add up to the batch.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

STAGES = ("read", "decode", "transform", "collate", "other")
_TRANSFORMS = ("transform", "augment", "preprocess", "tokeniz")  # in the names of a dataset's attributes
_INNER = ("dataset", "datasets", "_dataset", "source_datapipe", "ds", "base")  # where datasets keep what they wrap
_PLAIN = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)

# Module, class in it or "", names, stage, and what then decodes. Only what has been imported is looked at.
_PLACES: tuple[tuple[str, str, tuple[str, ...], str, str], ...] = (
    ("PIL.Image", "", ("open",), "decode", "PIL"),
    ("cv2", "", ("imdecode", "imread"), "decode", "cv2"),
    ("torchvision.io", "", ("decode_image", "decode_jpeg", "decode_png", "read_image"), "decode", "torchvision"),
    ("torchvision.io.image", "", ("decode_image", "decode_jpeg", "decode_png", "read_image"), "decode", "torchvision"),
    ("torchvision.io", "", ("read_video",), "decode", "torchvision"),
    ("torchvision.io", "", ("read_file",), "read", ""),
    ("torchvision.io.image", "", ("read_file",), "read", ""),
    ("simplejpeg", "", ("decode_jpeg",), "decode", "simplejpeg"),
    ("turbojpeg", "TurboJPEG", ("decode",), "decode", "turbojpeg"),
    ("imageio", "", ("imread",), "decode", "imageio"),
    ("imageio.v2", "", ("imread",), "decode", "imageio"),
    ("imageio.v3", "", ("imread",), "decode", "imageio"),
    ("skimage.io", "", ("imread",), "decode", "skimage"),
    ("tifffile", "", ("imread",), "decode", "tifffile"),
    ("soundfile", "", ("read",), "decode", "soundfile"),
    ("torchaudio", "", ("load",), "decode", "torchaudio"),
    ("librosa", "", ("load",), "decode", "librosa"),
    ("nibabel", "", ("load",), "decode", "nibabel"),
    ("pydicom", "", ("dcmread",), "decode", "pydicom"),
    ("pandas", "", ("read_csv", "read_json", "read_parquet"), "decode", "pandas"),
    ("numpy", "", ("load", "fromfile"), "read", ""),
    ("torch", "", ("load",), "read", ""),
    ("zipfile", "ZipFile", ("open", "read"), "read", ""),
    ("zipfile", "ZipExtFile", ("read",), "read", ""),
    ("tarfile", "TarFile", ("extractfile", "next"), "read", ""),
    ("pyarrow.parquet", "", ("read_table",), "read", ""),
    ("pyarrow.parquet", "ParquetFile", ("read", "read_row_group", "read_row_groups"), "read", ""),
    ("h5py._hl.dataset", "Dataset", ("__getitem__",), "read", ""),
    ("h5py._hl.files", "File", ("__init__",), "read", ""),
    ("torchvision.transforms.transforms", "Compose", ("__call__",), "transform", ""),
    ("torchvision.transforms.v2._container", "Compose", ("forward",), "transform", ""),
    ("albumentations.core.composition", "Compose", ("__call__",), "transform", ""),
)


class StageClock:
    """Adds up where the time of one thread goes, each instant to the innermost stage that is open."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.decoders: dict[str, float] = {}
        self._open: list[tuple[str, str]] = []
        self._since = 0.0
        self._thread = 0

    def start(self) -> None:
        """A batch is begun, by this thread; until a stage is entered, its time is the dataset's own."""
        self._thread = threading.get_ident()
        self._open = [("other", "")]
        self._since = perf_counter()

    def stop(self) -> None:
        """The batch is made."""
        self._book()
        self._open = []

    def counts(self) -> bool:
        """Whether a batch is being made, by this thread."""
        return bool(self._open) and threading.get_ident() == self._thread

    def enter(self, stage: str, decoder: str = "") -> bool:
        """A stage begins; False where it does not count, and is not to be left."""
        if not self.counts():
            return False
        self._book()
        self._open.append((stage, decoder))
        return True

    def leave(self) -> None:
        """The stage that was entered last is over."""
        if len(self._open) > 1:
            self._book()
            self._open.pop()

    def _book(self) -> None:
        now = perf_counter()
        if self._open:
            stage, decoder = self._open[-1]
            self.seconds[stage] += now - self._since
            if decoder:
                self.decoders[decoder] = self.decoders.get(decoder, 0.0) + now - self._since
        self._since = now

    def timed(self, plain: Callable[..., Any], stage: str, decoder: str = "") -> Callable[..., Any]:
        """A function that counts as a stage."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.enter(stage, decoder):
                return plain(*args, **kwargs)
            try:
                return plain(*args, **kwargs)
            finally:
                self.leave()

        try:
            return functools.wraps(plain)(call)
        except (AttributeError, TypeError):  # a callable without a name
            return call


class StageHooks:
    """The places where the clock is hung for the length of one batch, and what was there before.

    Args:
        clock: The clock.
        fetcher: torch's fetcher, which asks the dataset and collates.
    """

    def __init__(self, clock: StageClock, fetcher: Any) -> None:
        self._clock = clock
        self._fetcher = fetcher
        self._undo: list[tuple[Any, str, Any, bool]] = []  # of what, which name, its value, and whether it was its own
        self._replaced: set[tuple[int, str]] = set()

    def install(self) -> None:
        """Hang the clock."""
        self._replace(self._fetcher, "collate_fn", self._clock.timed(self._fetcher.collate_fn, "collate"))
        for name, owner, names, stage, decoder in _PLACES:
            place = sys.modules.get(name)
            if owner and place is not None:
                place = vars(place).get(owner)
            for attribute in names if place is not None else ():
                if plain := vars(place).get(attribute):
                    self._replace(place, attribute, self._clock.timed(plain, stage, decoder))
        self._install_pil()
        for room in (builtins, io):
            self._replace(room, "open", _opening(self._clock, room.open))
        for dataset in _datasets(self._fetcher.dataset):
            self._install_transforms(dataset)
        self._imported_by_name()

    def remove(self) -> None:
        """Have everything as it was."""
        while self._undo:
            place, name, value, own = self._undo.pop()
            if own:
                setattr(place, name, value)
            else:
                delattr(place, name)

    def _replace(self, place: Any, name: str, value: Any) -> None:
        if (id(place), name) in self._replaced:
            return
        own = name in getattr(place, "__dict__", {})
        before = vars(place)[name] if own else None
        try:
            setattr(place, name, value)
        except (AttributeError, TypeError):  # a class of an extension, or one with slots: it is not looked into
            return
        self._replaced.add((id(place), name))
        self._undo.append((place, name, before, own))

    def _install_pil(self) -> None:
        room = sys.modules.get("PIL.ImageFile")
        if room is None:
            return
        kinds = [room.ImageFile]
        for kind in kinds:  # grows meanwhile
            kinds += kind.__subclasses__()
            if load := vars(kind).get("load"):
                self._replace(kind, "load", self._clock.timed(load, "decode", "PIL"))
        image = sys.modules["PIL.Image"].Image
        if convert := vars(image).get("convert"):  # of an image as it comes from its file, a part of decoding it
            decode = self._clock.timed(convert, "decode", "PIL")
            own = room.ImageFile
            self._replace(image, "convert", lambda s, *a, **k: (decode if isinstance(s, own) else convert)(s, *a, **k))

    def _install_transforms(self, dataset: Any) -> None:
        found = {**vars(type(dataset)), **getattr(dataset, "__dict__", {})}
        for name, value in found.items():
            if name.startswith("__") or not any(part in name.lower() for part in _TRANSFORMS):
                continue
            if isinstance(value, _PLAIN):
                self._replace(dataset, name, self._clock.timed(getattr(dataset, name), "transform"))
            elif callable(value) and not isinstance(value, type):
                kind: Any = type(value)
                self._replace(kind, "__call__", self._clock.timed(kind.__call__, "transform"))

    def _imported_by_name(self) -> None:
        """`from PIL.Image import open`: the modules of the script's own parts hold the plain function."""
        timed = {id(value): vars(place)[name] for place, name, value, own in self._undo if own and callable(value)}
        parts = [*_datasets(self._fetcher.dataset), getattr(self._fetcher.collate_fn, "__wrapped__", None)]
        parts += [getattr(part, "loader", None) for part in parts]
        rooms = {getattr(part, "__module__", None) or type(part).__module__ for part in parts if part is not None}
        for room in filter(None, map(sys.modules.get, rooms - {"builtins", "io"})):
            for name, value in list(vars(room).items()):
                if callable(value) and id(value) in timed and vars(room)[name] is not timed[id(value)]:
                    self._replace(room, name, timed[id(value)])


def _datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and those inside it: Subset, ConcatDataset and what scripts write like them."""
    queue, seen = [dataset], set[int]()
    for one in queue:  # grows meanwhile
        if id(one) in seen or len(seen) > 16:
            continue
        seen.add(id(one))
        yield one
        inside = getattr(one, "__dict__", {})
        for name in _INNER:
            value = inside.get(name)
            queue += value[:4] if isinstance(value, list | tuple) else [] if value is None else [value]


class _TimedFile(io.FileIO):
    """A file whose reads are timed while a batch is sampled, beneath the buffer that Python gives every file."""

    clock: StageClock

    def readinto(self, buffer: Any) -> Any:
        """As FileIO's."""
        return self._count(super().readinto, buffer)

    def readall(self) -> Any:
        """As FileIO's."""
        return self._count(super().readall)

    def _count(self, read: Callable[..., Any], *args: Any) -> Any:
        if not self.clock.enter("read"):
            return read(*args)
        try:
            return read(*args)
        finally:
            self.clock.leave()


def _opening(clock: StageClock, plain: Callable[..., Any]) -> Callable[..., Any]:
    """`open` whose binary files, opened for reading, are timed."""
    find = clock.timed(plain, "read")

    def open(*args: Any, **kwargs: Any) -> Any:
        opened = find(*args, **kwargs)
        if (
            not clock.counts()
            or type(opened) is not io.BufferedReader
            or type(opened.raw) is not io.FileIO
            or isinstance(opened.raw.name, int)
        ):
            return opened
        name = opened.raw.name
        raw = opened.detach()
        timed = _TimedFile(os.dup(raw.fileno()), "rb")
        timed.clock = clock
        timed.name = name
        raw.close()
        return io.BufferedReader(timed)

    return functools.wraps(plain)(open)
