"""Select the blocks of a model to recompute: repeated blocks, those of given classes, those at given paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

_WORD = re.compile(r"\w+(?:\.\w+)*(?:-\d+)?")
_RANGE = re.compile(r"((?:.*\.)?)(\d+)-(\d+)")
_MOST = 10_000  # blocks that a range may name
_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel's and torch.compile's, around the whole model


def words_of(setting: str) -> list[str]:
    """Return the names in a setting, "Block, blocks.0-2" -> ["Block", "blocks.0", "blocks.1", "blocks.2"].

    Return [] if one of them is neither a class name nor a path nor a range of paths.
    """
    words = []
    for word in (part.strip() for part in setting.split(",")):
        if not _WORD.fullmatch(word):
            return []
        if match := _RANGE.fullmatch(word):
            begin, first, last = match[1], int(match[2]), int(match[3])
            if not 0 <= last - first < _MOST:
                return []
            words += [f"{begin}{number}" for number in range(first, last + 1)]
        elif "-" in word:
            return []
        else:
            words.append(word)
    return words


def in_ranges(paths: Iterable[str]) -> str:
    """Write paths as a setting, with ranges: ["blocks.0", "blocks.1", "tail.4"] -> "blocks.0-1,tail.4"."""
    runs: list[tuple[str, int, int]] = []  # prefix, first number, last number; -1 for a path without a number
    for path in paths:
        begin, dot, last = path.rpartition(".")
        number = int(last) if re.fullmatch("0|[1-9][0-9]*", last) else -1  # "01" is a name: a range would drop the 0
        if runs and number >= 0 and runs[-1][0] == begin + dot and number == runs[-1][2] + 1:
            runs[-1] = (*runs[-1][:2], number)
        else:
            runs.append((begin + dot, number, number) if number >= 0 else (path, -1, -1))
    return ",".join(
        begin + ("" if first < 0 else f"{first}" if first == last else f"{first}-{last}") for begin, first, last in runs
    )


def repeated(model: Any) -> list[Any]:
    """Return the blocks that a model repeats: outermost entries of one container and class, with layers inside."""
    from torch.nn import ModuleList, Sequential

    if isinstance(model, ModuleList | Sequential):
        entries = list(model._modules.values())
        counts = Counter(type(entry) for entry in entries if _worth_it(entry))
        blocks = {id(entry): entry for entry in entries if counts[type(entry)] >= 2 and _worth_it(entry)}
    else:
        blocks = {}
    for child in model.children():
        if id(child) not in blocks:
            blocks |= {id(block): block for block in repeated(child)}
    return list(blocks.values())


def _worth_it(block: Any) -> bool:
    """Return whether a block keeps more activations than its input: a single layer of torch does not."""
    single = type(block).__module__.startswith("torch.nn.") and not any(True for _ in block.children())
    return not single and any(True for _ in block.parameters())


def named(model: Any, names: Collection[str]) -> list[Any]:
    """Return the outermost modules inside a model whose class has one of the names."""
    blocks: dict[int, Any] = {}
    for child in model.children():
        matching = [child] if type(child).__name__ in names else named(child, names)
        blocks |= {id(block): block for block in matching}
    return list(blocks.values())


def paths_in(model: Any) -> dict[str, Any]:
    """Return a model's modules by path, without the prefixes of wrappers around the whole model."""
    return {_bare(name): module for name, module in model.named_modules() if name}


def _bare(path: str) -> str:
    while (wrapper := path.partition(".")[0] + ".") in _WRAPPERS and wrapper != path + ".":
        path = path.removeprefix(wrapper)
    return path
