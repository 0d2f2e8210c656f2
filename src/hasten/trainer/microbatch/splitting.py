"""Split a batch into parts with a given number of samples.

Most batches are columns: tensors with a row per sample, in nested containers. Some are lists with an entry per sample:
a detector's images and targets, texts. A list of three images of three channels looks like three columns of three
samples, so the helpers below guess from what is beside a list which of the two it is.
"""

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
    """Return the number of samples in a batch: the rows of its first tensor that has rows, or the entries of its lists.

    Entries count if the lists cannot be columns: a detector's `(images, targets)`, a list of `(image, label)`, a list
    of texts. 0 if unknown.
    """
    if lists := _lists_of_samples(batch):
        return len(lists[0])
    for tensor in tensors(batch):
        if tensor.dim():
            return len(tensor)
    return len(batch) if isinstance(batch, list | tuple) else 0


def split(batch: Any, size: int) -> list[Any]:
    """Return a batch in parts of `size` samples; the last part has the remaining ones.

    Tensors and arrays are cut along their first dimension (as views, without a copy), in nested lists, tuples, dicts
    and dataclasses. Lists with an entry per sample are cut too: texts, a detector's images and the dicts of its
    targets. Numbers, texts and 0-dim tensors go to each part unchanged.

    Args:
        batch: Any structure that a loader may return; with no more than `size` samples, it is the only part.
        size: Samples per part.

    Raises:
        HastenError: Something in the batch has no row per sample, or cannot be cut.
    """
    count = samples_in(batch)
    if not count:
        raise misconfigured(f"microbatch cannot tell how many samples a {type(batch).__name__} has", _BY_HAND)
    if count <= size:
        return [batch]
    leaves = _Leaves(batch, count)
    return [mapped(batch, leaves, _Cut(count, slice(start, start + size))) for start in range(0, count, size)]


def chosen(batch: Any, rows: list[int]) -> Any:
    """Return a copy of the samples at these indices of a batch, in this order; for batches that `split` can split."""
    count = samples_in(batch)
    return mapped(batch, _Leaves(batch, count), _Cut(count, rows))


def labels_differ(batch: Any) -> bool:
    """Return whether a tensor with one number per sample (labels, lengths) holds different numbers."""
    count = samples_in(batch)
    labels = [tensor for tensor in tensors(batch) if tensor.dim() and len(tensor) == tensor.numel() == count]
    return any(bool((tensor != tensor[:1]).any()) for tensor in labels)


class _Leaves:
    """Stand-in for a type: `isinstance` asks it which parts of a batch are cut as a whole, or cannot be cut.

    `mapped` descends into all other parts.
    """

    def __init__(self, batch: Any, count: int) -> None:
        self._batch, self._count = batch, count
        self._lists = _lists_of_samples(batch)

    def __instancecheck__(self, part: Any) -> bool:
        if isinstance(part, torch.Tensor | numpy.ndarray | PackedSequence):
            return True
        if any(part is samples for samples in self._lists):
            return True
        if isinstance(part, list | tuple) and not hasattr(part, "_fields"):
            return self._has_entry_a_sample(part)
        return isinstance(part, MOVABLE) and not isinstance(part, Mapping) and not dataclasses.is_dataclass(part)

    def _has_entry_a_sample(self, part: list[Any] | tuple[Any, ...]) -> bool:
        """Return whether a list has an entry per sample (texts, or boxes of varying number) rather than columns.

        `[x, y]` of two samples has as many entries as samples, but is columns: each has two rows. So is the batch
        itself, unless it is a list of texts.
        """
        if len(part) != self._count or self._are_columns_and_constants(part):
            return False
        rows = [len(tensor) if tensor.dim() else 0 for tensor in tensors(part)]
        return not rows or (part is not self._batch and any(length != self._count for length in rows))

    def _are_columns_and_constants(self, part: list[Any] | tuple[Any, ...]) -> bool:
        """Return whether a list is columns beside values that all samples share: `(x, weight)`, with two samples."""
        columns = [entry for entry in part if _rows(entry) == self._count]
        others = [entry for entry in part if _rows(entry) != self._count]
        return bool(columns) and bool(others) and all(_rows(entry) is None for entry in others)


class _Cut:
    """Cuts the leaves for one part: a slice of the samples (tensors stay views), or samples at indices (copies)."""

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
    """Return the length of a column; None: it is a single value."""
    if isinstance(entry, torch.Tensor | numpy.ndarray):
        return len(entry) if entry.ndim else None
    return len(entry) if isinstance(entry, list | tuple | Mapping) else None


def _lists_of_samples(batch: Any) -> list[list[Any] | tuple[Any, ...]]:
    """Return the lists in a batch, or the batch itself, that have an entry per sample; none if they may be columns.

    A list of three images of three channels has three rows in each tensor, as three columns of three samples have.
    Other entries of the batch can decide it: `(images, targets)` and `(images, labels)` do, two lists of tensors do
    not.
    """
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and len(batch) > 1 and _are_samples(batch):
        return [batch]
    columns = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    lists = [column for column in columns if isinstance(column, list | tuple)]
    arrays = [column for column in columns if isinstance(column, torch.Tensor | numpy.ndarray) and column.ndim]
    lengths = {*map(len, lists), *map(len, arrays)}
    types_in = [{*map(_kind, column)} for column in lists]
    if len(lists) + len(arrays) < 2 or len(lengths) != 1 or any(len(kind) != 1 for kind in types_in):
        return []
    rows = [{len(tensor) for tensor in tensors(column) if tensor.dim()} for column in lists]
    for column, own_rows in zip(lists, rows, strict=True):
        # Tensors of different lengths (sentences), or of another length than the arrays beside them, are no columns.
        sentences = len(own_rows) > 1 or (own_rows and arrays and own_rows != lengths)
        # Images are taken for samples only if something beside them is not like them: labels, dicts, other tensors.
        has_others = (
            arrays or any(kind != {"Tensor"} for kind in types_in) or any(other_rows != own_rows for other_rows in rows)
        )
        if sentences or (has_others and _are_images(column)):
            return lists
    return []


def _are_images(column: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether all entries are images with the channels first."""
    return all(isinstance(entry, torch.Tensor) and entry.dim() == 3 and len(entry) in (1, 3, 4) for entry in column)


def _are_samples(entries: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether all entries are samples, as `(image, label)` or a dict of both: columns do not mix types."""
    samples = [tuple(entry.values()) if isinstance(entry, Mapping) else entry for entry in entries]
    if not all(isinstance(sample, tuple | list) and len(sample) > 1 for sample in samples):
        return False
    kinds = {tuple(map(_kind, sample)) for sample in samples}
    return len(kinds) == 1 and {*kinds.pop()} in ({"Tensor", "int"}, {"Tensor", "float"}, {"Tensor", "str"})


def _kind(entry: Any) -> str:
    """Return a name of the type of an entry; entries of one list of samples have the same."""
    if isinstance(entry, torch.Tensor):
        return "Tensor"
    return f"dict of {sorted(map(str, entry))}" if isinstance(entry, Mapping) else type(entry).__name__
