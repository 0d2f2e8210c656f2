"""Reads from a function's bytecode which names it refers to, and decides which code to inspect.

Before hasten keeps a sample or makes it elsewhere, it must know what the sample depends on and does. Bytecode cannot
show that in full, so names decide: code that names `write` may write. The word lists below err on the safe side.
"""

from __future__ import annotations

import builtins
import dis
import itertools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

from hasten.evidence.libraries import is_library

# Libraries whose functions depend only on their arguments, random generators and files: their code is not inspected.
TRUSTED = frozenset(sys.stdlib_module_names - {"__main__"}) | {
    *("torch", "torchvision", "torchaudio", "numpy", "PIL", "scipy", "pandas", "cv2", "skimage", "sklearn", "tqdm"),
    *("albumentations", "transformers", "tokenizers", "datasets", "timm", "einops", "h5py", "hasten"),
}


ALWAYS = ("torch", "numpy", "hasten")  # trusted in any folder: people build these from source


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# A sample that prints or writes something would do it in another process or order, or not at all if it is cached.
SAYS = words("print input exec eval globals logging lseek get_worker_info current_process getLogger get_ident")
WRITES = words(
    "write writelines write_text write_bytes dump imwrite to_csv to_pickle savetxt savez savez_compressed tofile save "
    "mkdir makedirs unlink rename rmtree touch system popen Popen check_call check_output setattr"
)
# Inputs that inspecting objects and opened files cannot show: files' state, the process, the clock, new generators,
# names computed at run time.
UNSEEN = words(
    "exists isfile is_file isdir is_dir stat lstat getmtime getsize access lexists islink is_symlink readlink realpath "
    "resolve samefile environ environb getenv getenvb expandvars expanduser home argv orig_argv flags getpid "
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns now today utcnow "
    "fromtimestamp localtime gmtime strftime ctime mktime astimezone gethostname getlogin getuser cpu_count urlopen "
    "urandom secrets token_bytes token_hex token_urlsafe randbelow uuid1 uuid4 default_rng RandomState SystemRandom "
    "PCG64 PCG64DXSM MT19937 Philox SFC64 SeedSequence seed initial_seed get_rng_state getstate get_state "
    "get_num_threads getcontext geterr get_printoptions "
    "vars __dict__ __globals__ __getattribute__ modules import_module __import__ locate resolve_name _getframe "
    "builtins __builtins__ truetype load_default getOpenProfile set_flush_denormal set_printoptions"
)
# Names that read files without Python's audit events.
UNREAD = words(
    "cv2 imread read_image read_file read_video decode_image h5py File memmap from_file skimage imageio soundfile "
    "torchaudio torchcodec librosa decord av lmdb zarr pyarrow read_parquet pandas polars duckdb sqlite3 fromfile "
    "pread preadv safetensors safe_open rasterio SimpleITK ReadImage netCDF4 openslide pyvips kornia_rs tensorstore "
    "Thread ThreadPool ThreadPoolExecutor"
)


def is_trusted(value: Any) -> bool:
    """Return whether a class, function or module belongs to a library whose code is not inspected."""
    if isinstance(value, FunctionType):
        # Judge by the code's file, not `__module__`: `functools.wraps` gives the script's function a library's name, or
        # the reverse.
        name, file = value.__globals__.get("__name__"), value.__code__.co_filename
        return isinstance(name, str) and is_of_library(name) and (_is_always(name) or _is_librarys(file))
    if isinstance(value, ModuleType):
        name = value.__name__  # not getattr(): a module's own `__getattr__` may answer any other name
    else:
        name = getattr(value, "__module__", None) or getattr(value, "__name__", None) or ""
    return not isinstance(name, str) or is_of_library(name)


def is_of_library(module: str) -> bool:
    """Return whether a module name belongs to a library whose code is not inspected."""
    return _is_always(module) or (module.partition(".")[0] in TRUSTED and is_installed(module.partition(".")[0]))


def _is_always(module: str) -> bool:
    return module.partition(".")[0] in ALWAYS


def _is_librarys(file: str) -> bool:
    return file.startswith("<") or is_library(file)  # "<frozen os>", or code that a library ran by `exec`


def is_installed(top: str) -> bool:
    """Return whether the loaded module of this name is the library: a folder `datasets` next to train.py is not."""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    places = [file] if isinstance(file, str) else list(getattr(module, "__path__", ()))
    return all(is_library(str(place)) for place in places)


def names_of(function: FunctionType) -> frozenset[str]:
    """Return all names of globals and attributes in a function's code, including functions nested in it."""
    return frozenset(name for code in codes_of(function.__code__) for name in code.co_names)


def stores(function: FunctionType, elements: bool = False) -> bool:
    """Return whether a function's code sets attributes or globals or, with `elements`, entries of containers."""
    names = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", *("STORE_SUBSCR", "DELETE_SUBSCR") * elements)
    return any(
        instruction.opname in names
        for code in codes_of(function.__code__)
        for instruction in dis.get_instructions(code)
    )


def named_at_run_time(function: FunctionType) -> tuple[set[str], bool]:
    """Return the constant names that a function passes to `getattr`, and whether it passes any computed ones."""
    names: set[str] = set()
    hidden = False
    for code in codes_of(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL")]
        for place, step in enumerate(steps):
            if step.argval not in ("getattr", "attrgetter", "methodcaller") or not step.opname.startswith("LOAD_"):
                continue
            constants: set[str] = set()
            for following in steps[place + 1 :]:
                if not following.opname.startswith("LOAD_"):
                    break
                if following.opname == "LOAD_CONST" and isinstance(following.argval, str):
                    constants.add(following.argval)
            shown = bool(constants) and following.opname in ("PRECALL", "CALL")
            names |= {part for name in constants for part in name.split(".")} if shown else set()
            hidden = hidden or not shown
    return names, hidden


def formats(function: FunctionType) -> bool:
    """Return whether a function may convert objects to text: f-strings, `str(it)`, `"%s" % it`."""
    if names_of(function) & {"str", "repr", "format", "format_map", "ascii"}:
        return True
    return any(
        step.opname.startswith(("FORMAT_", "CONVERT_VALUE"))
        or (step.opname == "LOAD_CONST" and isinstance(step.argval, str) and "%" in step.argval)
        for code in codes_of(function.__code__)
        for step in dis.get_instructions(code)
    )


def makes_unseeded(function: FunctionType) -> bool:
    """Return whether a function makes a `random.Random()` without a seed."""
    for code in codes_of(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "PRECALL")]
        for step, then in itertools.pairwise(steps):
            if step.argval == "Random" and then.opname == "CALL" and then.arg == 0:
                return True
    return False


def imports_of(function: FunctionType) -> list[str]:
    """Return the full names of the modules that a function imports when it runs."""
    names = []
    for code in codes_of(function.__code__):
        steps = list(dis.get_instructions(code))
        for place, step in enumerate(steps):
            if step.opname != "IMPORT_NAME":
                continue
            level = next((other.argval for other in steps[place - 2 : place] if type(other.argval) is int), 0)
            package = (function.__globals__.get("__package__") or "").split(".")
            above = package[: len(package) - level + 1] if level else []
            names.append(".".join([*above, *([step.argval] if step.argval else [])]))
    return names


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code object, and those of functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def is_set(cell: CellType) -> bool:
    """Return whether a closure variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises ValueError
    except ValueError:
        return False
    return True


def globals_of(function: FunctionType) -> list[str]:
    """Return the globals that a function reads, sorted, including names that a script added to `builtins`."""
    return sorted(
        {
            instruction.argval
            for code in codes_of(function.__code__)
            for instruction in dis.get_instructions(code)
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            and (instruction.argval in function.__globals__ or _is_put_into_builtins(instruction.argval))
        }
    )


def _is_put_into_builtins(name: str) -> bool:
    value = vars(builtins).get(name)
    return name in vars(builtins) and not isinstance(value, type | BuiltinFunctionType)
