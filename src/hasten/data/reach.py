"""What a function's code names, and whose code is looked into."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

# Libraries whose functions depend on their arguments only (and on random generators and files): not looked into.
TRUSTED = frozenset(sys.stdlib_module_names - {"__main__"}) | {
    *("torch", "torchvision", "torchaudio", "numpy", "PIL", "scipy", "pandas", "cv2", "skimage", "sklearn", "tqdm"),
    *("albumentations", "transformers", "tokenizers", "datasets", "timm", "einops", "h5py", "hasten"),
}


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# A sample that says or writes something does so in another process or order, or not at all where it is kept.
SAYS = words("print input exec eval globals get_worker_info current_process getLogger get_ident")
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
    "torchaudio librosa decord av lmdb zarr pyarrow read_parquet pandas sqlite3 fromfile"
)


def is_trusted(thing: Any) -> bool:
    """Whether a class, function or module is of a library that is not looked into."""
    name = getattr(thing, "__module__", None) or getattr(thing, "__name__", None) or ""
    return not isinstance(name, str) or name.partition(".")[0] in TRUSTED


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
