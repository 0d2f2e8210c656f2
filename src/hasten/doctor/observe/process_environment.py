"""Record the training process's environment: threads, local world size, allocator, and the disk of its data."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hasten.evidence import ProcessEnvironment
from hasten.evidence.disks import filesystem
from hasten.taps.protocol import Session
from hasten.taps.step_listeners import NEVER

_INSIDE = 3  # levels of datasets within datasets to search (Subset, ConcatDataset, a script's own wrapper)
# Attributes in which datasets keep the folder of their files.
_NAMES = ("root", "root_dir", "data_dir", "data_path", "data_root", "folder", "path", "img_dir", "image_dir", "dir")
_READ_EARLY = 20  # steps after which threads are read; at its end, a script may have changed them


def install(session: Session) -> None:
    """Read threads and the data's folder in an early step, and the rest when the run ends."""
    reader = SurroundingsReader(session)
    session.observers.append(reader)
    session.step_listeners.add(reader.on_step, _READ_EARLY)


class SurroundingsReader:
    """Reads the process's environment."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._threads = (0, 0)
        self._folder = ""

    def on_step(self, steps: int) -> int:
        """Read threads and the dataset's folder, once."""
        with self._session.run.guard("observing surroundings"):  # a dataset's attributes may raise when they are read
            self._read()
        return NEVER

    def _read(self) -> None:
        """Read the number of threads and find the folder of the data."""
        import torch

        self._threads = torch.get_num_threads(), torch.get_num_interop_threads()
        # In `for batch in iter(DataLoader(...))` the loader is freed at once, but its iterator keeps the dataset.
        recorder = self._session.run.recorder
        passes = list(recorder._open.values()) if recorder is not None else ()
        datasets = [getattr(running.iterator(), "_dataset", None) for running in passes]
        datasets += [getattr(built.loader(), "dataset", None) for built in self._session.loaders]
        self._folder = next((folder for dataset in datasets if (folder := folder_of(dataset))), "")

    def facts(self) -> dict[str, Any]:
        """Return the environment, as `surroundings`."""
        if not self._threads[0]:
            self._read()
        kind, rotational = filesystem(Path(self._folder)) if self._folder else ("", None)
        return {
            "surroundings": ProcessEnvironment(
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
    """Return the first number of a variable like OMP_NUM_THREADS ("4", or "4,2" by nesting level); None without one."""
    match = re.match(r"\s*(\d+)", text or "")
    return int(match[1]) if match else None


def _jpeg() -> str:
    """Return the library with which PIL decodes JPEGs; "" if PIL is not in use."""
    if "PIL.Image" not in sys.modules:
        return ""
    from PIL import features

    if not features.check("jpg"):
        return ""
    return "libjpeg-turbo" if features.check_feature("libjpeg_turbo") else "libjpeg"


def folder_of(dataset: Any, depth: int = _INSIDE) -> str:
    """Return the folder of a dataset's files, judging by its attributes; "" if they do not tell.

    Search attributes named `root` and the like, lists of paths (`samples`, `files`), all other attributes, and then the
    datasets inside it, up to `depth` levels.
    """
    try:
        attributes = dict(vars(dataset))
    except TypeError:  # no attributes: a list, a C type
        return _folder(dataset[0]) if isinstance(dataset, list | tuple) and dataset else ""
    attributes = {name: value for name, value in attributes.items() if not _is_tensor(value)}
    lists = [value[0] for value in attributes.values() if isinstance(value, list | tuple) and value]
    for value in (*map(attributes.get, _NAMES), *lists, *attributes.values()):
        if folder := _folder(value):
            return folder
    if depth:
        for value in attributes.values():
            inner = value[0] if isinstance(value, list | tuple) and value else value
            if hasattr(inner, "__getitem__") and hasattr(inner, "__dict__") and (folder := folder_of(inner, depth - 1)):
                return folder
    return ""


def _is_tensor(value: Any) -> bool:
    """Return whether a value is torch's or numpy's, and no dataset: it can be indexed like one (a tensor, an array)."""
    module = type(value).__module__
    # "torch.utils.data." is the module of a Subset's Subset, which is a dataset.
    return module.split(".")[0] in ("torch", "numpy") and not module.startswith("torch.utils.data.")


def _folder(value: Any) -> str:
    """Return the folder that a path names, or the parent of the file it names; else "". Of a tuple, use the first."""
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
    except (OSError, ValueError):  # text that is no valid path, such as one with a null byte
        pass
    return ""
