"""Predicts which files a sample will ask its dataset's `loader` function for, from what earlier samples asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

_SUBSETS = 8  # inside each other


class FilePredictor:
    """Says what `dataset[i]` will hand to its loader function.

    A dataset keeps paths in an attribute: `self.samples[i][0]`, `self.paths[i]`, `os.path.join(self.root,
    self.names[i])`. One batch shows in which. A wrong guess costs time only: what is not asked for is dropped.

    Args:
        dataset: A loader's.
        inner: The dataset in its Subsets that has the loader function.
        ways: What was learnt of the inner dataset: attribute, place within its elements, how that becomes a key.
    """

    def __init__(self, dataset: Any, inner: Any, ways: list[tuple[str, int | None, Any]]) -> None:
        self._dataset, self._inner, self._ways = dataset, inner, ways

    @property
    def knows(self) -> bool:
        """Whether anything was learnt."""
        return bool(self._ways)

    def learn(self, indices: Sequence[int], keys: Sequence[Any]) -> None:
        """Find out where the keys come from that the samples of a batch asked for, in order."""
        if not keys or not indices:
            return
        asked = set(keys)
        for attribute, place, part in self._parts(self._place(indices[0])):
            for key in dict.fromkeys(keys[:4]):  # what a first sample may ask for
                way = attribute, place, _maker(part, key)
                if way[2] is None:
                    continue
                told = [self._key(way, index) for index in indices]
                if all(key in asked for key in told) and len(set(told)) >= min(len(set(indices)), len(asked)):
                    self._ways.append(way)
                    break
            if len(self._ways) >= 2 or (self._ways and len(keys) <= len(indices)):
                return  # `imgs` beside `samples`: the same said twice

    def keys(self, index: int) -> list[Any]:
        """Return what sample `index` will ask for; [] where that cannot be said."""
        try:
            return [self._key(way, index) for way in self._ways]
        except (IndexError, KeyError, TypeError, AttributeError):  # the dataset changed: it says so itself when asked
            return []

    def _key(self, way: tuple[str, int | None, Any], index: int) -> Any:
        attribute, place, make = way
        index = self._place(index)
        if not attribute:
            return make(index)
        part = vars(self._inner)[attribute][index]
        return make(part if place is None else part[place])

    def _place(self, index: int) -> int:
        """An index as the inner dataset has it."""
        from torch.utils.data import Subset

        dataset = self._dataset
        for _ in range(_SUBSETS):
            if type(dataset) is not Subset:
                break
            index, dataset = dataset.indices[index], dataset.dataset
        return index

    def _parts(self, index: int) -> list[tuple[str, int | None, Any]]:
        """Everything that stands at an index in the inner dataset's attributes, and the index itself."""
        found: list[tuple[str, int | None, Any]] = []
        for name, held in list(vars(self._inner).items()):
            if not isinstance(held, list | tuple) and type(held).__name__ != "ndarray":
                continue
            try:
                part = held[index]
            except IndexError:
                continue
            if isinstance(part, list | tuple):
                found += [(name, place, inside) for place, inside in enumerate(part)]
            else:
                found.append((name, None, part))
        return [*found, ("", None, index)]


def _maker(part: Any, key: Any) -> Any:
    """Return a function that makes keys like this one of such parts: itself, or with text around it; None: none."""
    if type(part) is type(key) and part == key:
        return _itself
    if not isinstance(part, str | PurePath) or not isinstance(key, str | PurePath):
        return None
    text, whole = os.fspath(part), os.fspath(key)
    before, middle, after = whole.rpartition(text)
    if not middle or not text:
        return None
    kind = type(key)
    return lambda other: kind(f"{before}{os.fspath(other)}{after}")


def _itself(part: Any) -> Any:
    return part
