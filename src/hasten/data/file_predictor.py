"""Predicts which files a sample will pass to its dataset's `loader` function, from what earlier samples passed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

_SUBSETS = 8  # nested Subsets to unwrap, at most


class FilePredictor:
    """Predicts the arguments with which `dataset[i]` will call its loader function (the keys).

    Datasets keep paths in an attribute: `self.samples[i][0]`, `self.paths[i]`, `os.path.join(self.root,
    self.names[i])`. One batch shows which attribute it is. A wrong guess only costs time, as unused results are
    dropped.

    Args:
        dataset: The loader's dataset.
        inner: The dataset inside its Subsets that has the loader function.
        ways: What was learned about the inner dataset: attribute, place inside its elements, function that makes the
            key.
    """

    def __init__(self, dataset: Any, inner: Any, ways: list[tuple[str, int | None, Any]]) -> None:
        self._dataset, self._inner, self._rules = dataset, inner, ways

    @property
    def knows(self) -> bool:
        """Whether anything was learned."""
        return bool(self._rules)

    def learn(self, indices: Sequence[int], keys: Sequence[Any]) -> None:
        """Find the attributes from which the keys of a batch come.

        Args:
            indices: The batch's sample indices.
            keys: The keys that the samples passed to the loader function, in order.
        """
        if not keys or not indices:
            return
        requested = set(keys)
        for attribute, place, part in self._parts(self._place(indices[0])):
            for key in dict.fromkeys(keys[:4]):  # the first sample may have loaded several files
                rule = attribute, place, _maker(part, key)
                if rule[2] is None:
                    continue
                predicted = [self._key(rule, index) for index in indices]
                if requested.issuperset(predicted) and len(set(predicted)) >= min(len(set(indices)), len(requested)):
                    self._rules.append(rule)
                    break
            if len(self._rules) >= 2 or (self._rules and len(keys) <= len(indices)):
                return  # enough: more matches are the same list again (ImageFolder has `samples` and `imgs`)

    def keys(self, index: int) -> list[Any]:
        """Return the keys that sample `index` will ask for; [] if they cannot be predicted."""
        try:
            return [self._key(rule, index) for rule in self._rules]
        except (IndexError, KeyError, TypeError, AttributeError):  # the dataset changed; `dataset[index]` will raise
            return []

    def _key(self, rule: tuple[str, int | None, Any], index: int) -> Any:
        attribute, place, make = rule
        index = self._place(index)
        if not attribute:
            return make(index)
        part = vars(self._inner)[attribute][index]
        return make(part if place is None else part[place])

    def _place(self, index: int) -> int:
        """Return the inner dataset's index for an index of the outer dataset."""
        from torch.utils.data import Subset

        dataset = self._dataset
        for _ in range(_SUBSETS):
            if type(dataset) is not Subset:
                break
            index, dataset = dataset.indices[index], dataset.dataset
        return index

    def _parts(self, index: int) -> list[tuple[str, int | None, Any]]:
        """Return everything stored at an index in the inner dataset's attributes, and the index itself."""
        parts: list[tuple[str, int | None, Any]] = []
        for name, values in list(vars(self._inner).items()):
            if not isinstance(values, list | tuple) and type(values).__name__ != "ndarray":
                continue
            try:
                part = values[index]
            except IndexError:
                continue
            if isinstance(part, list | tuple):
                parts += [(name, place, inside) for place, inside in enumerate(part)]
            else:
                parts.append((name, None, part))
        return [*parts, ("", None, index)]


def _maker(part: Any, key: Any) -> Any:
    """Return a function that makes keys of such parts as this key is made of this part; None if there is no way.

    A key is the part itself, or a text or path that contains it: "/data/" + part + ".jpg".
    """
    if type(part) is type(key) and part == key:
        return _itself
    if not isinstance(part, str | PurePath) or not isinstance(key, str | PurePath):
        return None
    text, whole = os.fspath(part), os.fspath(key)
    before, middle, after = whole.rpartition(text)
    if not middle or not text:
        return None
    kind = type(key)
    return lambda path: kind(f"{before}{os.fspath(path)}{after}")


def _itself(part: Any) -> Any:
    return part
