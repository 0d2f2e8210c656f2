"""The environment of the training process: threads, neighbours, allocator, and the disk of its data."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hasten.evidence import Surroundings
from hasten.evidence.disks import filesystem
from hasten.taps.protocol import Session
from hasten.taps.steps_over import NEVER

_INSIDE = 3  # datasets within datasets (Subset, ConcatDataset, a script's own wrapper)
_NAMES = ("root", "root_dir", "data_dir", "data_path", "data_root", "folder", "path", "img_dir", "image_dir", "dir")
_READ_EARLY = 20  # steps after which threads are read: a script may set them to others at its end


def install(session: Session) -> None:
    """Ask when the run ends, and for threads while it trains."""
    around = SurroundingsReader(session)
    session.observers.append(around)
    session.steps_over.tell(around.on_step, _READ_EARLY)


class SurroundingsReader:
    """Reads the surroundings, all but threads at the run's end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._threads = (0, 0)
        self._folder = ""

    def on_step(self, steps: int) -> int:
        """Read threads and the dataset's folder in an early step, and leave."""
        with self._session.run.guard("observing surroundings"):  # a dataset like no other
            self._read()
        return NEVER

    def _read(self) -> None:
        import torch

        self._threads = torch.get_num_threads(), torch.get_num_interop_threads()
        # A loader may live no longer than it takes to make an iterator, which keeps the dataset.
        recorder = self._session.run.recorder
        passes = list(recorder._open.values()) if recorder is not None else ()
        datasets = [getattr(each.iterator(), "_dataset", None) for each in passes]
        datasets += [getattr(known.held(), "dataset", None) for known in self._session.loaders]
        self._folder = next((found for dataset in datasets if (found := folder_of(dataset))), "")

    def facts(self) -> dict[str, Any]:
        """The surroundings."""
        if not self._threads[0]:
            self._read()
        kind, rotational = filesystem(Path(self._folder)) if self._folder else ("", None)
        return {
            "surroundings": Surroundings(
                omp_threads=_number(os.environ.get("OMP_NUM_THREADS")),
                threads=self._threads[0],
                interop_threads=self._threads[1],
                processes=_number(os.environ.get("LOCAL_WORLD_SIZE")) or 1,
                preload=os.environ.get("LD_PRELOAD", ""),
                allocator=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
                data_folder=self._folder,
                filesystem=kind,
                rotational=rotational,
                jpeg=_jpeg(),
            )
        }


def _number(text: str | None) -> int | None:
    """The first number of OMP_NUM_THREADS ("4" or "4,2" by nesting); None where there is none."""
    found = re.match(r"\s*(\d+)", text or "")
    return int(found[1]) if found else None


def _jpeg() -> str:
    """Return the library that PIL, if it is in use, decodes JPEGs with."""
    if "PIL.Image" not in sys.modules:
        return ""
    from PIL import features

    if not features.check("jpg"):
        return ""
    return "libjpeg-turbo" if features.check_feature("libjpeg_turbo") else "libjpeg"


def folder_of(dataset: Any, depth: int = _INSIDE) -> str:
    """The folder of a dataset's files, as its attributes tell; "" if they do not.

    Looks at what is called `root` and the like, at lists of paths (`samples`, `files`), and into datasets in it.
    """
    try:
        attributes = dict(vars(dataset))
    except TypeError:  # no attributes: a list, a C type
        return _folder(dataset[0]) if isinstance(dataset, list | tuple) and dataset else ""
    attributes = {name: value for name, value in attributes.items() if not _is_tensor(value)}
    lists = [value[0] for value in attributes.values() if isinstance(value, list | tuple) and value]
    for value in (*map(attributes.get, _NAMES), *lists, *attributes.values()):
        if found := _folder(value):
            return found
    if depth:
        for value in attributes.values():
            inner = value[0] if isinstance(value, list | tuple) and value else value
            if hasattr(inner, "__getitem__") and hasattr(inner, "__dict__") and (found := folder_of(inner, depth - 1)):
                return found
    return ""


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] in ("torch", "numpy")


def _folder(value: Any) -> str:
    """The folder that a path lies in; the first of a tuple may be one (path, target)."""
    if isinstance(value, tuple | list) and value:
        value = value[0]
    if not isinstance(value, str | Path) or not str(value) or len(str(value)) > 4000:
        return ""
    text = str(value)
    if "\n" in text or ("/" not in text and not os.path.exists(text)):
        return ""
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return str(path.resolve())
        if path.is_file():
            return str(path.resolve().parent)
    except (OSError, ValueError):  # a text that is no path
        pass
    return ""
