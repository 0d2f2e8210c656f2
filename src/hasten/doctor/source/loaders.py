"""Find the DataLoader calls of a file, and which of them feed its training."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.syntax import argument, dotted, has_star_arguments, is_name, last_name, names_in

# Names of loaders, datasets and functions for validation ("val_loader", "testset") and for training.
TEST = re.compile(
    r"(^|_|\b)(val|valid|validation|test|eval|infer|predict|dev)(_|\d|\b|loader|set|dl|data)", re.IGNORECASE
)
TRAIN = re.compile(r"train|^(data_?)?loader$|^dl$", re.IGNORECASE)


def loader_calls(code: Code) -> Iterator[tuple[cst.Call, str]]:
    """Yield each call of torch's DataLoader whose arguments can all be read, and the loader's name."""
    for call in code.script.calls:
        full = code.script.qualified(call.func)
        if (
            last_name(call.func) != "DataLoader"
            or has_star_arguments(call)
            # Their loaders are also named DataLoader, but have other arguments or defaults.
            or full.startswith(("torch_geometric", "torchdata", "monai"))
        ):
            continue
        if full in code.script.classes or not (full.startswith("torch.") or "torch" in full or full == "DataLoader"):
            continue
        yield call, name_given(code, call)


def name_given(code: Code, call: cst.Call) -> str:
    """Return the name that a loader is assigned to, or of the function or dict key around it; "" without any."""
    for ancestor in code.script.ancestors(call):
        if isinstance(ancestor, cst.Assign):
            return dotted(ancestor.targets[0].target)
        if isinstance(ancestor, cst.FunctionDef):
            return ancestor.name.value
        if isinstance(ancestor, cst.DictElement):
            return str(code.script.value_of(ancestor.key))
    return ""


def trains_with(code: Code, call: cst.Call, name: str) -> bool:
    """Return whether a loader feeds the training, guessed from names, its `shuffle`, and the loops over it.

    Args:
        code: The file.
        call: The call of DataLoader.
        name: The loader's name, from `loader_calls`.
    """
    short = name.rpartition(".")[2]
    dataset = argument(call, "dataset", 0)
    scope = code.script.scope(call)
    if isinstance(scope, cst.FunctionDef) and TEST.search(scope.name.value) and not TRAIN.search(scope.name.value):
        return False
    words = f"{short} {code.text(dataset, 200) if dataset is not None else ''}"
    if TEST.search(short) or (TEST.search(words) and not TRAIN.search(words)):
        return False
    if TRAIN.search(short):
        return True
    if is_name(argument(call, "shuffle", 2), "True"):
        return True
    return any(short in names_in(loop.iter) for loop in code.training.step_loops if isinstance(loop, cst.For))
