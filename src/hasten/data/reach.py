"""What a function's code names, and whose code is looked into."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from hasten.evidence.libraries import is_library

# Libraries whose functions depend on their arguments only (and on random generators and files): not looked into.
TRUSTED = frozenset(sys.stdlib_module_names - {"__main__"}) | {
    *("torch", "torchvision", "torchaudio", "numpy", "PIL", "scipy", "pandas", "cv2", "skimage", "sklearn", "tqdm"),
    *("albumentations", "transformers", "tokenizers", "datasets", "timm", "einops", "h5py", "hasten"),
}


ALWAYS = ("torch", "numpy", "hasten")  # trusted wherever they lie: people build them in a folder of their own


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# A sample that says or writes something does so in another process or order, or not at all where it is kept.
SAYS = words("print input exec eval globals logging lseek get_worker_info current_process getLogger get_ident")
WRITES = words(
    "write writelines write_text write_bytes dump imwrite to_csv to_pickle savetxt savez savez_compressed tofile save "
    "mkdir makedirs unlink rename rmtree touch system popen Popen check_call check_output setattr"
)
# What no look at objects and opened files shows.
UNSEEN = words(
    "exists isfile is_file isdir is_dir stat getmtime getsize environ getenv time perf_counter monotonic now today "
    "time_ns getpid urandom urlopen token_bytes uuid1 uuid4 default_rng RandomState SystemRandom seed"
)
# What reads files where Python does not hear of it.
UNREAD = words(
    "cv2 imread read_image read_file read_video decode_image h5py File memmap from_file skimage imageio soundfile "
    "torchaudio librosa decord av lmdb zarr pyarrow read_parquet pandas sqlite3 fromfile pread preadv "
    "Thread ThreadPool ThreadPoolExecutor"
)


def is_trusted(thing: Any) -> bool:
    """Whether a class, function or module is of a library that is not looked into."""
    name = getattr(thing, "__module__", None) or getattr(thing, "__name__", None) or ""
    if not isinstance(name, str):
        return True
    top = name.partition(".")[0]
    return top in ALWAYS or (top in TRUSTED and is_installed(top))


def is_installed(top: str) -> bool:
    """Whether the module of a library's name is that library: a folder `datasets` beside train.py is the script's."""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    places = [file] if isinstance(file, str) else list(getattr(module, "__path__", ()))
    return all(is_library(str(place)) for place in places)


def is_pythons_wrapper(function: FunctionType) -> bool:
    """Whether the standard library made a function around one of the script's: a dataclass's `__repr__`, for example.

    It has the script's module as its own, but its code asks for nothing but what its closure holds.
    """
    return _in_the_standard_library(function.__code__.co_filename)


@functools.cache
def _in_the_standard_library(path: str) -> bool:
    inside = any(Path(path).is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))
    return inside and not {"site-packages", "dist-packages"} & set(Path(path).parts)


def names_of(function: FunctionType) -> frozenset[str]:
    """Return all names of globals and attributes in a function's code, functions inside it included."""
    return frozenset(name for code in _codes(function.__code__) for name in code.co_names)


def stores(function: FunctionType) -> bool:
    """Whether a function's code sets attributes or globals."""
    return any(
        instruction.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR")
        for code in _codes(function.__code__)
        for instruction in dis.get_instructions(code)
    )


def named_at_run_time(function: FunctionType) -> tuple[set[str], bool]:
    """Return the names that a function gives to `getattr`, and whether it gives any that its code does not show."""
    names: set[str] = set()
    hidden = False
    for code in _codes(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL")]
        for place, step in enumerate(steps):
            if step.argval not in ("getattr", "attrgetter", "methodcaller") or not step.opname.startswith("LOAD_"):
                continue
            given: set[str] = set()
            for other in steps[place + 1 :]:
                if not other.opname.startswith("LOAD_"):
                    break
                if other.opname == "LOAD_CONST" and isinstance(other.argval, str):
                    given.add(other.argval)
            shown = bool(given) and other.opname in ("PRECALL", "CALL")
            names |= {part for name in given for part in name.split(".")} if shown else set()
            hidden = hidden or not shown
    return names, hidden


def imports_of(function: FunctionType) -> list[str]:
    """Return the modules that a function's code imports when it runs, by their full names."""
    names = []
    for code in _codes(function.__code__):
        steps = list(dis.get_instructions(code))
        for place, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level = next((other.argval for other in steps[place - 2 : place] if type(other.argval) is int), 0)
            package = (function.__globals__.get("__package__") or "").split(".")
            above = package[: len(package) - level + 1] if level else []
            names.append(".".join([*above, *([step.argval] if step.argval else [])]))
    return names


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def globals_of(function: FunctionType) -> list[str]:
    """Return the globals that a function's code reads, in order."""
    return sorted(
        {
            instruction.argval
            for code in _codes(function.__code__)
            for instruction in dis.get_instructions(code)
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in function.__globals__
        }
    )
