"""The library versions, processor and settings that a sample's values depend on, apart from its dataset."""

from __future__ import annotations

import decimal
import functools
import importlib.metadata
import locale
import os
import platform
import sys
import types
import warnings
from typing import Any

from hasten.data.code_references import ALWAYS, TRUSTED, is_installed
from hasten.evidence.libraries import is_library
from hasten.evidence.machine import this_machine

# Libraries whose distribution is named differently from the module.
_DISTRIBUTIONS = {
    "PIL": ("pillow", "pillow-simd"),
    "cv2": ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
    "skimage": ("scikit-image",),
    "sklearn": ("scikit-learn",),
}
_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE", "TZ"),
)
# Library settings, with their values in a process that has not imported the module yet.
_ATTRIBUTES = {
    "PIL.ImageFile.LOAD_TRUNCATED_IMAGES": False,
    "PIL.Image.MAX_IMAGE_PIXELS": 89478485,
    "torchvision._image_backend": "PIL",
    "torchvision._video_backend": "pyav",
}
# Module, attribute, usual value: they are asked for with each sample.
_PLACES: list[tuple[str, str, Any]] = [
    (name.rpartition(".")[0], name.rpartition(".")[2], usual) for name, usual in _ATTRIBUTES.items()
]


def settings_of_libraries() -> tuple[Any, ...]:
    """Return the settings that a script may change for some samples, of the libraries that it has imported."""
    modules = sys.modules
    return tuple([getattr(modules.get(module), attribute, usual) for module, attribute, usual in _PLACES])


def library_state() -> tuple[Any, ...]:
    """Return everything in this process that a sample's values depend on, apart from its dataset, as plain values."""
    import torch

    machine = this_machine()
    precision = torch.get_float32_matmul_precision()
    return platform.system(), machine.cpu, machine.cpu_flags, versions(), precision, state_of_libraries()


def state_of_libraries() -> tuple[Any, ...]:
    """Return what a script may set of its libraries while it runs, without what techniques switch during a search."""
    import numpy
    import torch

    of_torch = (
        torch.are_deterministic_algorithms_enabled(),
        getattr(torch.backends.mkldnn, "enabled", None),
        torch.get_default_device().type,
    )
    # By these a sample may fail. Other filters change no sample, and libraries add them when they are imported.
    raising = tuple(repr(one) for one in warnings.filters if one[0] == "error")
    errors = tuple(sorted(numpy.geterr().items())), raising
    texts = (
        repr(numpy.get_printoptions()),
        repr(sorted(vars(torch._tensor_str.PRINT_OPTS).items())),
        *(sys.flags.utf8_mode, locale.getpreferredencoding(False), locale.setlocale(locale.LC_ALL)),
    )
    context = decimal.getcontext()
    decimals = (context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp)
    variables = tuple((name, os.environ.get(name)) for name in _VARIABLES)
    attributes = tuple(zip(_ATTRIBUTES, map(repr, settings_of_libraries()), strict=True))
    return of_torch, errors, texts, decimals, variables, attributes


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Return the installed versions of the trusted libraries, whether imported or not."""
    names = sorted(TRUSTED - sys.stdlib_module_names - {"__main__"})
    installed = []
    for name in (part for top in names for part in _DISTRIBUTIONS.get(top, (top,))):
        try:
            installed.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(installed)


def replaced_in_libraries() -> str:
    """Return the name of a library function that the script has replaced, or "".

    A library's version describes its behavior, unless the script has patched it: `Image.open = mine`.
    """
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top not in TRUSTED or top in ("__main__", "hasten") or not is_installed(top):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is types.FunctionType and _is_the_scripts(value):
                return f"{name}.{attribute}"
            # Not isinstance, which reads `__class__`: some objects answer that with a deprecation warning.
            if issubclass(type(value), type) and value.__module__ == name and top not in _MANY:
                for method, inner in list(vars(value).items()):
                    if type(inner) is types.FunctionType and _is_the_scripts(inner):
                        return f"{name}.{attribute}.{method}"
    return ""


_MANY = ("torch", "scipy", "pandas", "sklearn", "transformers")  # too many classes to check their methods


def _is_the_scripts(function: types.FunctionType) -> bool:
    top = (function.__module__ or "").partition(".")[0]
    if top in ALWAYS:
        return False
    file = function.__code__.co_filename
    return not file.startswith("<") and not is_library(file)
