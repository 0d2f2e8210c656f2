"""The names that a function's code refers to, and which code is inspected."""

from __future__ import annotations

import builtins
import dis
import itertools
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
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
# What no look at objects and opened files shows: files' state, the process and its clock, generators, names made up.
UNSEEN = words(
    "exists isfile is_file isdir is_dir stat lstat getmtime getsize access lexists islink is_symlink readlink realpath "
    "resolve samefile environ environb getenv getenvb expandvars expanduser home argv orig_argv flags getpid "
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns now today utcnow "
    "fromtimestamp localtime gmtime strftime ctime mktime astimezone gethostname getlogin getuser cpu_count urlopen "
    "urandom secrets token_bytes token_hex token_urlsafe randbelow uuid1 uuid4 default_rng RandomState SystemRandom "
    "PCG64 PCG64DXSM MT19937 Philox SFC64 SeedSequence seed initial_seed get_rng_state getstate get_state "
    "vars __dict__ __globals__ __getattribute__ modules import_module __import__ locate resolve_name _getframe "
    "builtins __builtins__ truetype load_default getOpenProfile set_flush_denormal set_printoptions"
)
# What reads files where Python does not hear of it.
UNREAD = words(
    "cv2 imread read_image read_file read_video decode_image h5py File memmap from_file skimage imageio soundfile "
    "torchaudio librosa decord av lmdb zarr pyarrow read_parquet pandas sqlite3 fromfile pread preadv "
    "Thread ThreadPool ThreadPoolExecutor"
)


def is_trusted(thing: Any) -> bool:
    """Whether a class, function or module is of a library that is not looked into."""
    if isinstance(thing, FunctionType):
        # Where its code is from: `functools.wraps` gives the script's function a library's name, and the reverse.
        name, file = thing.__globals__.get("__name__"), thing.__code__.co_filename
        return isinstance(name, str) and is_of_library(name) and (_is_always(name) or _is_librarys(file))
    if isinstance(thing, ModuleType):
        name = thing.__name__  # its own `__getattr__` may answer for anything else
    else:
        name = getattr(thing, "__module__", None) or getattr(thing, "__name__", None) or ""
    return not isinstance(name, str) or is_of_library(name)


def is_of_library(module: str) -> bool:
    """Whether a module's name is of a library that is not looked into."""
    return _is_always(module) or (module.partition(".")[0] in TRUSTED and is_installed(module.partition(".")[0]))


def _is_always(module: str) -> bool:
    return module.partition(".")[0] in ALWAYS


def _is_librarys(file: str) -> bool:
    return file.startswith("<") or is_library(file)  # "<frozen os>", what a library made by `exec`


def is_installed(top: str) -> bool:
    """Whether the module of a library's name is that library: a folder `datasets` beside train.py is the script's."""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    places = [file] if isinstance(file, str) else list(getattr(module, "__path__", ()))
    return all(is_library(str(place)) for place in places)


def names_of(function: FunctionType) -> frozenset[str]:
    """Return all names of globals and attributes in a function's code, functions inside it included."""
    return frozenset(name for code in codes_of(function.__code__) for name in code.co_names)


def stores(function: FunctionType, elements: bool = False) -> bool:
    """Whether a function's code sets attributes or globals; with `elements`, entries of containers as well."""
    names = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", *("STORE_SUBSCR", "DELETE_SUBSCR") * elements)
    return any(
        instruction.opname in names
        for code in codes_of(function.__code__)
        for instruction in dis.get_instructions(code)
    )


def named_at_run_time(function: FunctionType) -> tuple[set[str], bool]:
    """Return the names that a function gives to `getattr`, and whether it gives any that its code does not show."""
    names: set[str] = set()
    hidden = False
    for code in codes_of(function.__code__):
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


def formats(function: FunctionType) -> bool:
    """Whether a function's code may ask objects for their text: f-strings, `str(it)`, `"%s" % it`."""
    if names_of(function) & {"str", "repr", "format", "format_map", "ascii"}:
        return True
    return any(
        step.opname.startswith(("FORMAT_", "CONVERT_VALUE"))
        or (step.opname == "LOAD_CONST" and isinstance(step.argval, str) and "%" in step.argval)
        for code in codes_of(function.__code__)
        for step in dis.get_instructions(code)
    )


def makes_unseeded(function: FunctionType) -> bool:
    """Whether a function's code makes a `random.Random()` without a seed."""
    for code in codes_of(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "PRECALL")]
        for step, then in itertools.pairwise(steps):
            if step.argval == "Random" and then.opname == "CALL" and then.arg == 0:
                return True
    return False


def imports_of(function: FunctionType) -> list[str]:
    """Return the modules that a function's code imports when it runs, by their full names."""
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
    """Yield a function's code, and that of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def is_set(cell: CellType) -> bool:
    """Whether a closure's variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018 - an empty cell says so by raising
    except ValueError:
        return False
    return True


def globals_of(function: FunctionType) -> list[str]:
    """Return the globals that a function's code reads, in order, and what was put among Python's own names."""
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
