"""Splits a batch into parts of so many samples each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence

from hasten.trainer.batches import MOVABLE, mapped, tensors
from hasten.trainer.errors import misconfigured

_BY_HAND = "define split_batch(self, batch, size) in the module: it returns the parts, in order"


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has: rows of its first tensor that has any, or entries of its lists.

    Entries count where lists hold what cannot be columns: a detector's `(images, targets)`, a list of `(image, label)`,
    a list of texts. 0 where nobody knows.
    """
    if lists := _lists_of_samples(batch):
        return len(lists[0])
    for tensor in tensors(batch):
        if tensor.dim():
            return len(tensor)
    return len(batch) if isinstance(batch, list | tuple) else 0


def split(batch: Any, size: int) -> list[Any]:
    """Return a batch in parts of `size` samples; the last has what is left.

    Tensors and arrays are cut along their first dimension (views: nothing is copied), in nested lists, tuples, dicts
    and dataclasses. So are lists with an entry a sample: texts, a detector's images and the dicts of its targets.
    Numbers, texts and tensors of no dimension go to each part as they are.

    Args:
        batch: Any structure that a loader gives; one with no more than `size` samples is its own only part.
        size: Samples of a part.

    Raises:
        HastenError: Something in the batch has no row for each sample, or is nothing that can be cut.
    """
    count = samples_in(batch)
    if not count:
        raise misconfigured(f"microbatch cannot tell how many samples a {type(batch).__name__} has", _BY_HAND)
    if count <= size:
        return [batch]
    leaves = _Leaves(batch, count)
    return [mapped(batch, leaves, _Cut(count, slice(start, start + size))) for start in range(0, count, size)]


def chosen(batch: Any, rows: list[int]) -> Any:
    """Return a copy of these samples of a batch that `split` can split, in this order."""
    count = samples_in(batch)
    return mapped(batch, _Leaves(batch, count), _Cut(count, rows))


def labels_differ(batch: Any) -> bool:
    """Whether a tensor with one number a sample (labels, lengths) does not have the same number for all of them."""
    count = samples_in(batch)
    labels = [one for one in tensors(batch) if one.dim() and len(one) == one.numel() == count]
    return any(bool((one != one[:1]).any()) for one in labels)


class _Leaves:
    """What is cut as a whole, or cannot be; `isinstance` asks it, so that `mapped` goes into everything else."""

    def __init__(self, batch: Any, count: int) -> None:
        self._batch, self._count = batch, count
        self._lists = _lists_of_samples(batch)

    def __instancecheck__(self, part: Any) -> bool:
        if isinstance(part, torch.Tensor | numpy.ndarray | PackedSequence):
            return True
        if any(part is one for one in self._lists):
            return True
        if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
            return self._has_entry_a_sample(part)
        return isinstance(part, MOVABLE) and not isinstance(part, Mapping) and not dataclasses.is_dataclass(part)

    def _has_entry_a_sample(self, part: list[Any] | tuple[Any, ...]) -> bool:
        """Whether a list has an entry for each sample, rather than a column: texts, or boxes, as many as there are.

        `[x, y]` of two samples is columns: each has two rows. So is a batch itself, but for one of texts alone.
        """
        if len(part) != self._count or self._are_columns_and_constants(part):
            return False
        rows = [len(tensor) if tensor.dim() else 0 for tensor in tensors(part)]
        return not rows or (part is not self._batch and any(one != self._count for one in rows))

    def _are_columns_and_constants(self, part: list[Any] | tuple[Any, ...]) -> bool:
        """Whether it is columns of all samples beside what is the same for each: `(x, weight)`, of two samples."""
        columns = [one for one in part if _rows(one) == self._count]
        others = [one for one in part if _rows(one) != self._count]
        return bool(columns) and bool(others) and all(_rows(one) is None for one in others)


class _Cut:
    """Cuts leaves of one part: a slice of the samples (tensors stay views), or those at some places (copies)."""

    def __init__(self, count: int, rows: slice | list[int]) -> None:
        self._count, self._rows = count, rows

    def __call__(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor | numpy.ndarray):
            if not leaf.ndim:
                return leaf
            if len(leaf) != self._count:
                raise misconfigured(
                    f"microbatch cannot split this batch: it has {self._count} samples by its first tensor, and in it"
                    f" is a tensor of shape {tuple(leaf.shape)}",
                    _BY_HAND,
                )
        elif not isinstance(leaf, list | tuple) or isinstance(leaf, PackedSequence):
            raise misconfigured(f"microbatch cannot split a {type(leaf).__name__}", _BY_HAND)
        if isinstance(leaf, list | tuple) and not isinstance(self._rows, slice):
            return type(leaf)([leaf[row] for row in self._rows])
        return leaf[self._rows]


def _rows(entry: Any) -> int | None:
    """Return how long a column is; None: it is a single value."""
    if isinstance(entry, torch.Tensor | numpy.ndarray):
        return len(entry) if entry.ndim else None
    return len(entry) if isinstance(entry, list | tuple | Mapping) else None


def _lists_of_samples(batch: Any) -> list[list[Any] | tuple[Any, ...]]:
    """Return the lists in a batch, or the batch itself, that have an entry a sample; none where they may be columns.

    A list of three images of three channels has three rows in each tensor, as three columns of three samples have: what
    is beside them tells. `(images, targets)` and `(images, labels)` do, two lists of tensors do not.
    """
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and len(batch) > 1 and _are_samples(batch):
        return [batch]
    columns = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    lists = [column for column in columns if isinstance(column, list | tuple)]
    whole = [one for one in columns if isinstance(one, torch.Tensor | numpy.ndarray) and one.ndim]
    lengths = {*map(len, lists), *map(len, whole)}
    kinds = [{*map(_kind, column)} for column in lists]
    if len(lists) + len(whole) < 2 or len(lengths) != 1 or any(len(kind) != 1 for kind in kinds):
        return []
    rows = [{len(tensor) for tensor in tensors(column) if tensor.dim()} for column in lists]
    for column, of in zip(lists, rows, strict=True):
        sentences = len(of) > 1 or (of and whole and of != lengths)  # no columns of one number of samples
        others = whole or any(kind != {"Tensor"} for kind in kinds) or any(other != of for other in rows)
        if sentences or (others and _are_images(column)):
            return lists
    return []


def _are_images(column: list[Any] | tuple[Any, ...]) -> bool:
    """Whether these are images, color by color."""
    return all(isinstance(one, torch.Tensor) and one.dim() == 3 and len(one) in (1, 3, 4) for one in column)


def _are_samples(entries: list[Any] | tuple[Any, ...]) -> bool:
    """Whether these are `(image, label)` each, or such a dict: what columns would not have, in which all are alike."""
    parts = [tuple(one.values()) if isinstance(one, Mapping) else one for one in entries]
    if not all(isinstance(one, tuple | list) and len(one) > 1 for one in parts):
        return False
    kinds = {tuple(map(_kind, one)) for one in parts}
    return len(kinds) == 1 and {*kinds.pop()} in ({"Tensor", "int"}, {"Tensor", "float"}, {"Tensor", "str"})


def _kind(entry: Any) -> str:
    """Return what an entry is, as far as entries of one list are alike in it."""
    if isinstance(entry, torch.Tensor):
        return "Tensor"
    return f"dict of {sorted(map(str, entry))}" if isinstance(entry, Mapping) else type(entry).__name__
