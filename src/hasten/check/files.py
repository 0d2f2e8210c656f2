"""Compare the files that two runs saved."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROUNDED = 0.05
"""Relative difference of a saved tensor that the rounding of a training may explain."""
_ONLY_PLAIN, _ONLY_PLAN = "saved only as it is", "saved only under the plan"


Load = Callable[[Path], tuple[Any] | None]
"""Returns a file's content in a 1-tuple, as plain values and tensors; None if the file is of another kind."""


class FileDifference(NamedTuple):
    """A saved value that differs: the file, the value's path of keys in it ("" for the file), and how it differs."""

    file: str
    key_path: str
    how: str


def compare_files(plain: Path, plan: Path, rounded: float, load: Load, base: Path) -> list[FileDifference]:
    """Compare the folders into which two runs saved.

    Files written by torch are compared value by value. Strides count too, since fused optimizer kernels rely on them.
    Other files are compared by their bytes if the plan is exact, otherwise by their presence. Long numbers in file
    names (a date, most process ids) are ignored.

    Args:
        plain: Folder of the unchanged script's files.
        plan: Folder of the files saved under the plan.
        rounded: Relative difference allowed for saved tensors; 0.0 for equality to the bit.
        load: Reads files of the kind that the training saves.
        base: Folder that reported names are relative to: sandboxed runs save under the full path of the original.

    Returns:
        The differences, sorted by file name.
    """
    plan_files, plain_files = _by_name(plan, base), _by_name(plain, base)
    differences = []
    for name in sorted({*plan_files, *plain_files}):
        if name not in plan_files or name not in plain_files:
            differences.append(FileDifference(name, "", _ONLY_PLAIN if name in plain_files else _ONLY_PLAN))
        else:
            value_differences = _compare(plain_files[name], plan_files[name], rounded, load)
            differences += [FileDifference(name, key_path, how) for key_path, how in value_differences]
    return differences


def ignore_varying_names(
    differences: list[FileDifference], between_plain_runs: set[tuple[str, str]]
) -> list[FileDifference]:
    """Return the differences without files whose names contain a number that differs in every plain run.

    An example is a short process id, as in TensorBoard's `events.out.tfevents.1795518486.host.934.0`. Such a file is
    ignored if it is missing from a second plain run too, and both sides have as many of that name, numbers aside.

    Args:
        differences: Differences between the plain run and the plan's.
        between_plain_runs: (file, key path) of the differences between plain runs.
    """
    varying = {_numberless(file) for file, key_path in between_plain_runs if not key_path}
    missing = [_numberless(difference.file) for difference in differences if difference.how == _ONLY_PLAIN]
    extra = [_numberless(difference.file) for difference in differences if difference.how == _ONLY_PLAN]
    paired = {name for name in varying if name in extra and missing.count(name) == extra.count(name)}
    return [
        difference
        for difference in differences
        if difference.how not in (_ONLY_PLAIN, _ONLY_PLAN) or _numberless(difference.file) not in paired
    ]


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _by_name(root: Path, base: Path) -> dict[str, Path]:
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    files = [path for path in files if "__pycache__" not in path.parts]
    paths: dict[str, Path] = {}
    prefix = str(base).lstrip("/") + "/"
    for path in files:
        name = re.sub(r"\d{5,}", "#", str(path.relative_to(root)).removeprefix(prefix))
        while name in paths:
            name += "'"
        paths[name] = path
    return paths


def _compare(plain: Path, plan: Path, rounded: float, load: Load) -> Iterator[tuple[str, str]]:
    plain_content, plan_content = load(plain), load(plan)
    if plain_content is not None and plan_content is not None:
        yield from _differences("", plain_content[0], plan_content[0], rounded)
    elif (plain_content is None) != (plan_content is None):
        yield "", "only one of the two can be read"
    elif not rounded and plain.read_bytes() != plan.read_bytes():
        yield "", "other bytes"


def saved_by_torch(path: Path) -> tuple[Any] | None:
    """Return what torch saved in a file, in a 1-tuple; None if it is another kind of file, or holds other objects."""
    import torch

    with path.open("rb") as file:
        magic = file.read(2)
    if magic not in (b"PK", b"\x80\x02"):
        return None
    try:
        return (torch.load(path, map_location="cpu", weights_only=True),)
    except (pickle.UnpicklingError, RuntimeError, OSError, ValueError, EOFError, KeyError):
        return None


def _differences(key_path: str, plain: Any, plan: Any, rounded: float) -> Iterator[tuple[str, str]]:
    import torch

    if type(plain) is not type(plan):
        yield key_path, f"is a {type(plan).__name__}, and a {type(plain).__name__} without the plan"
    elif isinstance(plain, dict):
        if list(plain) != list(plan):
            differing_keys = [str(key) for key in {**plain, **plan} if (key in plain) != (key in plan)]
            yield key_path, f"has other keys: {', '.join(differing_keys[:4]) or 'in another order'}"
            return
        for key in plain:
            yield from _differences(f"{key_path}[{key!r}]", plain[key], plan[key], rounded)
    elif isinstance(plain, list | tuple):
        if len(plain) != len(plan):
            yield key_path, f"has {len(plan)} entries, and {len(plain)} without the plan"
            return
        for index, (plain_entry, plan_entry) in enumerate(zip(plain, plan, strict=True)):
            yield from _differences(f"{key_path}[{index}]", plain_entry, plan_entry, rounded)
    elif isinstance(plain, torch.Tensor):
        yield from ((key_path, how) for how in _tensor_differences(plain, plan, rounded))
    elif isinstance(plain, int | float) and not isinstance(plain, bool) and rounded:
        if not abs(plain - plan) <= rounded * abs(plain) + 1:  # a loss, a count of right answers
            yield key_path, f"is {plan}, and {plain} without the plan"
    elif plain != plan and not (isinstance(plain, float) and math.isnan(plain) and math.isnan(plan)):
        yield key_path, f"is {plan!r:.60}, and {plain!r:.60} without the plan"


def _tensor_differences(plain: Any, plan: Any, rounded: float) -> Iterator[str]:
    import torch

    from hasten.check import state

    if (plain.dtype, plain.shape) != (plan.dtype, plan.shape):
        yield f"is {plan.dtype}{tuple(plan.shape)}, and {plain.dtype}{tuple(plain.shape)} without the plan"
    elif plain.layout is torch.strided and plain.stride() != plan.stride():
        yield f"has strides {plan.stride()}, and {plain.stride()} without the plan"
    elif not rounded:
        if state.digest(plain) != state.digest(plan):
            yield "has other bits"
    elif plain.is_floating_point():
        a, b = plan.double(), plain.double()
        if not float((a - b).norm()) <= rounded * float(b.norm()) + 1e-12:
            yield f"differs by {float((a - b).norm()) / max(float(b.norm()), 1e-300):.2g} of its size"
    elif not torch.equal(plain, plan):
        yield "has other values"
