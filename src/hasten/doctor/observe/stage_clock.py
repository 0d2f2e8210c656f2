"""Time the stages of making one batch: reading, decoding, transforms, collating, and the rest.

While a batch is made, functions of known libraries and of the dataset are replaced by timed ones. Stages nest, and each
instant counts for the innermost: PIL reads its file while it decodes, and decodes lazily, within a transform. So the
stages of a batch add up to its total time.
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
_INNER = ("dataset", "datasets", "_dataset", "source_datapipe", "ds", "base")  # attributes with wrapped datasets
_FUNCTION_TYPES = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)

# (module, class in it or "", functions, stage, name of the decoder). Modules that are not imported are skipped.
_TIMED_FUNCTIONS: tuple[tuple[str, str, tuple[str, ...], str, str], ...] = (
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
    """Adds up the time of one thread by stage, each instant to the innermost open stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.decoders: dict[str, float] = {}
        self._open: list[tuple[str, str]] = []
        self._since = 0.0
        self._thread = 0

    def start(self) -> None:
        """Begin a batch in this thread; time outside of all stages counts as "other"."""
        self._thread = threading.get_ident()
        self._open = [("other", "")]
        self._since = perf_counter()

    def stop(self) -> None:
        """End the batch."""
        self._charge()
        self._open = []

    def is_active(self) -> bool:
        """Return whether this thread is making a batch under the clock."""
        return bool(self._open) and threading.get_ident() == self._thread

    def enter(self, stage: str, decoder: str = "") -> bool:
        """Begin a stage. Return False if it does not count here; then do not call `leave`."""
        if not self.is_active():
            return False
        self._charge()
        self._open.append((stage, decoder))
        return True

    def leave(self) -> None:
        """End the stage that was entered last."""
        if len(self._open) > 1:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Add the time since the last change of stage to the innermost stage."""
        now = perf_counter()
        if self._open:
            stage, decoder = self._open[-1]
            self.seconds[stage] += now - self._since
            if decoder:
                self.decoders[decoder] = self.decoders.get(decoder, 0.0) + now - self._since
        self._since = now

    def timed(self, plain: Callable[..., Any], stage: str, decoder: str = "") -> Callable[..., Any]:
        """Return `plain` wrapped to count as a stage."""

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
    """Replaces functions by timed ones for one batch, and restores them.

    Args:
        clock: The clock.
        fetcher: torch's fetcher, which asks the dataset and collates.
    """

    def __init__(self, clock: StageClock, fetcher: Any) -> None:
        self._clock = clock
        self._fetcher = fetcher
        self._undo: list[tuple[Any, str, Any, bool]] = []  # owner, name, value before, whether it was its own
        self._replaced: set[tuple[int, str]] = set()

    def install(self) -> None:
        """Replace the functions: the collating one, known libraries', `open`, and the dataset's transforms."""
        self._replace(self._fetcher, "collate_fn", self._clock.timed(self._fetcher.collate_fn, "collate"))
        for name, class_name, names, stage, decoder in _TIMED_FUNCTIONS:
            owner = sys.modules.get(name)
            if class_name and owner is not None:
                owner = vars(owner).get(class_name)
            for attribute in names if owner is not None else ():
                if plain := vars(owner).get(attribute):
                    self._replace(owner, attribute, self._clock.timed(plain, stage, decoder))
        self._install_pil()
        for module in (builtins, io):
            self._replace(module, "open", _opening(self._clock, module.open))
        for dataset in _datasets(self._fetcher.dataset):
            self._install_transforms(dataset)
        self._replace_imported_names()

    def remove(self) -> None:
        """Restore everything that was replaced, in reverse order."""
        while self._undo:
            owner, name, value, in_instance = self._undo.pop()
            if in_instance:
                setattr(owner, name, value)
            else:
                delattr(owner, name)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute once, and remember how to restore it."""
        if (id(owner), name) in self._replaced:
            return
        in_instance = name in getattr(owner, "__dict__", {})
        previous = vars(owner)[name] if in_instance else None
        try:
            setattr(owner, name, value)
        except (AttributeError, TypeError):  # a C extension's class, or an object with slots: not timed
            return
        self._replaced.add((id(owner), name))
        self._undo.append((owner, name, previous, in_instance))

    def _install_pil(self) -> None:
        """Time the lazy decoding of PIL images: `load` of every file format, and `convert` of images from files."""
        image_file = sys.modules.get("PIL.ImageFile")
        if image_file is None:
            return
        classes = [image_file.ImageFile]
        for cls in classes:  # the list grows in the loop
            classes += cls.__subclasses__()
            if load := vars(cls).get("load"):
                self._replace(cls, "load", self._clock.timed(load, "decode", "PIL"))
        image = sys.modules["PIL.Image"].Image
        if convert := vars(image).get("convert"):  # of an image from a file, it is part of decoding
            decode = self._clock.timed(convert, "decode", "PIL")
            file_image = image_file.ImageFile
            self._replace(
                image, "convert", lambda s, *a, **k: (decode if isinstance(s, file_image) else convert)(s, *a, **k)
            )

    def _install_transforms(self, dataset: Any) -> None:
        """Time a dataset's attributes and methods whose names say that they transform samples."""
        members = {**vars(type(dataset)), **getattr(dataset, "__dict__", {})}
        for name, value in members.items():
            if name.startswith("__") or not any(word in name.lower() for word in _TRANSFORMS):
                continue
            if isinstance(value, _FUNCTION_TYPES):
                self._replace(dataset, name, self._clock.timed(getattr(dataset, name), "transform"))
            elif callable(value) and not isinstance(value, type):  # an object: Python looks `__call__` up in its class
                kind: Any = type(value)
                self._replace(kind, "__call__", self._clock.timed(kind.__call__, "transform"))

    def _replace_imported_names(self) -> None:
        """Also replace functions that the script imported by name, as in `from PIL.Image import open`.

        Search the modules that define the datasets, the collate function and the datasets' `loader` functions.
        """
        timed = {
            id(value): vars(owner)[name]
            for owner, name, value, in_instance in self._undo
            if in_instance and callable(value)
        }
        sources = [*_datasets(self._fetcher.dataset), getattr(self._fetcher.collate_fn, "__wrapped__", None)]
        sources += [getattr(source, "loader", None) for source in sources]
        names = {
            getattr(source, "__module__", None) or type(source).__module__ for source in sources if source is not None
        }
        for module in filter(None, map(sys.modules.get, names - {"builtins", "io"})):
            for name, value in list(vars(module).items()):
                if callable(value) and id(value) in timed and vars(module)[name] is not timed[id(value)]:
                    self._replace(module, name, timed[id(value)])


def _datasets(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and the datasets that it wraps (as Subset and ConcatDataset do), at most 17 in all."""
    queue, visited = [dataset], set[int]()
    for current in queue:  # the list grows in the loop
        if id(current) in visited or len(visited) > 16:
            continue
        visited.add(id(current))
        yield current
        attributes = getattr(current, "__dict__", {})
        for name in _INNER:
            value = attributes.get(name)
            queue += value[:4] if isinstance(value, list | tuple) else [] if value is None else [value]


class _TimedFile(io.FileIO):
    """A raw file whose reads are timed. Under Python's usual buffer, only reads that reach the system are."""

    clock: StageClock

    def readinto(self, buffer: Any) -> Any:
        """Read into a buffer, timed."""
        return self._count(super().readinto, buffer)

    def readall(self) -> Any:
        """Read the rest of the file, timed."""
        return self._count(super().readall)

    def _count(self, read: Callable[..., Any], *args: Any) -> Any:
        """Call `read` within the "read" stage."""
        if not self.clock.enter("read"):
            return read(*args)
        try:
            return read(*args)
        finally:
            self.clock.leave()


def _opening(clock: StageClock, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `open` wrapped so that opening files, and reading from those opened in binary mode, is timed."""
    timed_open = clock.timed(plain, "read")

    def open(*args: Any, **kwargs: Any) -> Any:
        opened = timed_open(*args, **kwargs)
        if (
            not clock.is_active()
            or type(opened) is not io.BufferedReader
            or type(opened.raw) is not io.FileIO
            or isinstance(opened.raw.name, int)
        ):
            return opened
        # Reopen the file as a _TimedFile, on a duplicate of its descriptor: that keeps the position and needs no path.
        name = opened.raw.name
        raw = opened.detach()
        timed = _TimedFile(os.dup(raw.fileno()), "rb")
        timed.clock = clock
        timed.name = name
        raw.close()
        return io.BufferedReader(timed)

    return functools.wraps(plain)(open)
