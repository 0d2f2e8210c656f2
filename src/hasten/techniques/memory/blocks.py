"""Which blocks of a model are computed again: repeated ones, those of a class, those at paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

_WORD = re.compile(r"\w+(?:\.\w+)*(?:-\d+)?")
_RANGE = re.compile(r"((?:.*\.)?)(\d+)-(\d+)")
_MOST = 10_000  # blocks of a range
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel's and torch.compile's, around the whole model


def words_of(setting: str) -> list[str]:
    """Return the names of a setting, "Block, blocks.0-2" -> ["Block", "blocks.0", "blocks.1", "blocks.2"].

    [] where one of them is no name of a class, no path and no range of paths.
    """
    words = []
    for word in (part.strip() for part in setting.split(",")):
        if not _WORD.fullmatch(word):
            return []
        if found := _RANGE.fullmatch(word):
            begin, first, last = found[1], int(found[2]), int(found[3])
            if not 0 <= last - first < _MOST:
                return []
            words += [f"{begin}{number}" for number in range(first, last + 1)]
        elif "-" in word:
            return []
        else:
            words.append(word)
    return words


def in_ranges(paths: Iterable[str]) -> str:
    """Return paths as a setting, runs of numbers as one: ["blocks.0", "blocks.1", "tail.4"] -> "blocks.0-1,tail.4"."""
    runs: list[tuple[str, int, int]] = []
    for path in paths:
        begin, dot, last = path.rpartition(".")
        number = int(last) if re.fullmatch("0|[1-9][0-9]*", last) else -1  # "01" is a name
        if runs and number >= 0 and runs[-1][0] == begin + dot and number == runs[-1][2] + 1:
            runs[-1] = (*runs[-1][:2], number)
        else:
            runs.append((begin + dot, number, number) if number >= 0 else (path, -1, -1))
    return ",".join(
        begin + ("" if first < 0 else f"{first}" if first == last else f"{first}-{last}") for begin, first, last in runs
    )


def repeated(model: Any) -> list[Any]:
    """The blocks that a model repeats: outermost entries of one class, with layers inside, in one container."""
    from torch.nn import ModuleList, Sequential

    if isinstance(model, ModuleList | Sequential):
        entries = list(model._modules.values())
        often = Counter(type(entry) for entry in entries if _worth_it(entry))
        blocks = {id(entry): entry for entry in entries if often[type(entry)] >= 2 and _worth_it(entry)}
    else:
        blocks = {}
    for child in model.children():
        if id(child) not in blocks:
            blocks |= {id(block): block for block in repeated(child)}
    return list(blocks.values())


def _worth_it(block: Any) -> bool:
    """Whether a block keeps more than its input: a single layer of torch does not."""
    single = type(block).__module__.startswith("torch.nn.") and not any(True for _ in block.children())
    return not single and any(True for _ in block.parameters())


def named(model: Any, names: Collection[str]) -> list[Any]:
    """The outermost modules inside a model whose class has one of these names."""
    blocks: dict[int, Any] = {}
    for child in model.children():
        found = [child] if type(child).__name__ in names else named(child, names)
        blocks |= {id(block): block for block in found}
    return list(blocks.values())


def paths_in(model: Any) -> dict[str, Any]:
    """Return a model's modules by their paths in it, whatever wraps the whole model."""
    return {_bare(name): module for name, module in model.named_modules() if name}


def _bare(path: str) -> str:
    while (wrapper := path.partition(".")[0] + ".") in _WRAPPERS and wrapper != path + ".":
        path = path.removeprefix(wrapper)
    return path
