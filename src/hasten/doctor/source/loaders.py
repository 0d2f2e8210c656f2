"""Rules on DataLoaders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.rule import Change, Mend, Problem, Rule
from hasten.doctor.source.syntax import (
    argument,
    dotted,
    is_open,
    is_word,
    last_name,
    names_in,
    receiver,
    walk,
    with_keyword,
)

_TEST = re.compile(
    r"(^|_|\b)(val|valid|validation|test|eval|infer|predict|dev)(_|\d|\b|loader|set|dl|data)", re.IGNORECASE
)
_TRAIN = re.compile(r"train|^(data_?)?loader$|^dl$", re.IGNORECASE)
_MADE_UP = re.compile(r"random(?!_split)|dummy|fake|toy|synthetic|boring", re.IGNORECASE)
_LIGHT = frozenset(
    [
        "tensor",
        "as_tensor",
        "from_numpy",
        "long",
        "float",
        "int",
        "len",
        "astype",
        "size",
        "contiguous",
        "clone",
        "copy",
    ]
)


def _loaders(code: Code) -> Iterator[tuple[cst.Call, str]]:
    """Calls of torch's DataLoader whose arguments can be read, with the name each is given."""
    for call in code.script.calls:
        full = code.script.qualified(call.func)
        if (
            last_name(call.func) != "DataLoader"
            or is_open(call)
            or full.startswith(("torch_geometric", "torchdata", "monai"))
        ):
            continue
        if full in code.script.classes or not (full.startswith("torch.") or "torch" in full or full == "DataLoader"):
            continue
        yield call, _name_of(code, call)


def _name_of(code: Code, call: cst.Call) -> str:
    """The name a loader is assigned to, or that of the function that returns it."""
    for above in code.script.ancestors(call):
        if isinstance(above, cst.Assign):
            return dotted(above.targets[0].target)
        if isinstance(above, cst.FunctionDef):
            return above.name.value
        if isinstance(above, cst.DictElement):
            return str(code.script.value_of(above.key))
    return ""


def _trains(code: Code, call: cst.Call, name: str) -> bool:
    """Whether a loader feeds the training."""
    short = name.rpartition(".")[2]
    dataset = argument(call, "dataset", 0)
    scope = code.script.scope(call)
    if isinstance(scope, cst.FunctionDef) and _TEST.search(scope.name.value) and not _TRAIN.search(scope.name.value):
        return False
    words = f"{short} {code.text(dataset, 200) if dataset is not None else ''}"
    if _TEST.search(short) or (_TEST.search(words) and not _TRAIN.search(words)):
        return False
    if _TRAIN.search(short):
        return True
    if is_word(argument(call, "shuffle", 2), "True"):
        return True
    return any(short in names_in(loop.iter) for loop in code.training.step_loops if isinstance(loop, cst.For))


def _in_memory(code: Code, call: cst.Call) -> bool:
    """Whether a loader's dataset only hands out what is in memory: workers would not help."""
    dataset = argument(call, "dataset", 0)
    return dataset is not None and _hands_out_memory(code, dataset)


def _hands_out_memory(code: Code, dataset: cst.BaseExpression, depth: int = 0) -> bool:
    if depth > 3:
        return False
    if _MADE_UP.search(code.text(dataset, 200)):
        return True
    made = [dataset, *code.script.assigned(dotted(dataset))] if dotted(dataset) else [dataset]
    for value in made:
        if not isinstance(value, cst.Call):
            continue
        name = last_name(value.func)
        if _MADE_UP.search(name):
            return True
        if name in ("TensorDataset", "list", "zip"):
            return True
        if name in ("random_split", "Subset") and value.args and value.args[0].value is not dataset:
            return _hands_out_memory(code, value.args[0].value, depth + 1)
        if name in code.script.classes:
            getters = [
                node
                for node in walk(code.script.classes[name])
                if isinstance(node, cst.FunctionDef) and node.name.value == "__getitem__"
            ]
            calls = [node for getter in getters for node in walk(getter.body) if isinstance(node, cst.Call)]
            if getters and all(last_name(inner.func) in _LIGHT for inner in calls):
                return True
    return any(isinstance(value, cst.List | cst.ListComp | cst.Subscript | cst.Tuple) for value in made)


class WorkersZero(Rule):
    """Without workers the training process makes its batches itself, and the device waits meanwhile."""

    name = "workers_zero"
    technique = "loader_workers"
    sources = ("Falcon, tip 1", "Lin, tip 1", "Kuhn, tip 2")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Training loaders with num_workers=0, or without the argument."""
        for call, name in _loaders(code):
            given = argument(call, "num_workers", 5)
            if given is not None and code.script.value_of(given) != 0:
                continue
            if code.script.value_of(given) is False or not _trains(code, call, name) or _in_memory(code, call):
                continue
            if argument(call, "multiprocessing_context") is not None:
                continue
            default = given is not None and not isinstance(given, cst.Integer)
            yield Problem(
                call,
                f"the training process makes its batches itself (num_workers is 0{' by default' if default else ''})",
                "give the loader num_workers, and see with `hasten doctor` what they bring",
            )


class WorkersRecreated(Rule):
    """Workers that end with each epoch are started anew for the next, which waits for them."""

    name = "workers_recreated"
    technique = "loader_workers"
    sources = ("PyTorch: DataLoader, persistent_workers",)
    may_change = "from the second epoch on, the order of the samples and their random changes are drawn otherwise"

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Loaders with workers that are iterated once an epoch and are not kept."""
        for call, name in _loaders(code):
            workers = code.script.value_of(argument(call, "num_workers", 5))
            if not isinstance(workers, int) or workers < 1 or argument(call, "persistent_workers") is not None:
                continue
            if not _trains(code, call, name) or not _in_epochs(code, name) or _made_in_epochs(code, call):
                continue
            given = argument(call, "num_workers", 5)
            literal = isinstance(given, cst.Integer)
            left = ""
            if any(
                last_name(other.func) == "set_epoch" and "sampler" not in dotted(other.func)
                for other in code.script.calls
            ):
                left = "the dataset is told the epoch: workers that stay would not hear of it"
            value: cst.BaseExpression = cst.Name("True")
            if not literal and given is not None:
                zero = cst.ComparisonTarget(cst.GreaterThan(), cst.Integer("0"))
                value = cst.Comparison(given, [zero])
            yield Problem(
                call,
                f"its {workers} workers end after every epoch and are started again",
                "give the loader persistent_workers=True",
                () if left else (Mend(call, _kept_alive(value)),),
                left,
            )


def _kept_alive(value: cst.BaseExpression) -> Change:
    return lambda call: with_keyword(call, "persistent_workers", value)


def _made_in_epochs(code: Code, call: cst.Call) -> bool:
    """Whether the loader itself is made anew in every epoch: keeping its workers would not help."""
    return bool(code.training.loops_around(call))


def _in_epochs(code: Code, name: str) -> bool:
    """Whether a loader of this name is iterated inside a loop over epochs, here or in a function called there."""
    short = name.rpartition(".")[2]
    for loop in code.training.epoch_loops:
        for node in walk(loop):
            if isinstance(node, cst.For) and node is not loop and short in names_in(node.iter):
                return True
            if isinstance(node, cst.Call) and any(short in names_in(arg.value) for arg in node.args):
                if last_name(node.func) in code.script.functions:
                    return True
    return False


class PageableMemory(Rule):
    """Batches in ordinary memory are copied twice on their way to the GPU, and the copy waits."""

    name = "pageable_memory"
    technique = "pin_memory"
    sources = ("Falcon, tip 2", "Lin, tip 2", "Kuhn, tip 2")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Training loaders that do not pin, in a file that moves batches to a GPU."""
        moves = any(last_name(call.func) in ("cuda", "to") and receiver(call) is not None for call in code.script.calls)
        if not code.script.uses_cuda or not moves or not code.training.any:
            return
        for call, name in _loaders(code):
            given = argument(call, "pin_memory", 7)
            if given is not None and code.script.value_of(given) is not False:
                continue
            if _trains(code, call, name):
                yield Problem(
                    call, "batches for the GPU are left in pageable memory", "give the loader pin_memory=True"
                )
