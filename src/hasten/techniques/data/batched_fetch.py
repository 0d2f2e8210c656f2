"""Gather batches of in-memory tensors with one indexing call, instead of sample by sample."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import NO_LOADER, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.replaced import plain_of


class BatchedFetch(Technique):
    """Gather a batch of a TensorDataset with one `index_select` per tensor.

    The DataLoader asks the dataset for each sample and stacks them; for tensors that are in memory anyway, this is most
    of the cost of a small step. Values, order and random numbers stay the same.

    Each batch is checked: if its rows could differ (another class, a replaced method or collate function, indices that
    are not plain ints, tensors of another kind), it is gathered sample by sample.
    """

    name = "batched_fetch"
    effect = Effect.EXACT
    relieves = Resource.DATA
    sources = ("Lin, tip 3", "fastai #3949")
    acts_on = "a DataLoader over a TensorDataset"
    liveness = Liveness.PASS  # a pass keeps the fetcher that it began with

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it for a TensorDataset with the default collate function."""
        loader = evidence.train_loader
        if loader is None:
            return NO_LOADER
        if loader.probe is None or not loader.probe.in_memory:
            return Refusal(f"{loader.dataset} is not a TensorDataset with the default collate function")
        return Choices((True,), "samples are tensors in memory, and are gathered one by one")

    def loader_options(self, options: dict[str, Any]) -> None:
        """Note that the loader's batches will be gathered at once; with workers, that happens in other processes."""
        from torch.utils.data import default_collate

        batched = options["batch_size"] is not None or options["batch_sampler"] is not None
        if batched and options["collate_fn"] in (None, default_collate) and holds_rows(options["dataset"]):
            self.did("loader")

    def fetcher(self, fetcher: Any) -> Any:
        """Gather batches at once if samples are rows of tensors."""
        from torch.utils.data import default_collate
        from torch.utils.data._utils.fetch import _MapDatasetFetcher

        if type(fetcher) is not _MapDatasetFetcher or not _is_torchs(_MapDatasetFetcher.fetch):
            return fetcher
        if not fetcher.auto_collation or fetcher.collate_fn is not default_collate or not holds_rows(fetcher.dataset):
            return fetcher
        return _Gather(fetcher)


class _OneByOne(Exception):  # noqa: N818 - a signal, not an error
    """Signal that this batch must be gathered sample by sample."""


def holds_rows(dataset: Any) -> bool:
    """Return whether a dataset's samples are rows of tensors: torch's own TensorDataset, or Subsets of it."""
    try:
        tensors, _ = _below(dataset, [])
    except _OneByOne:
        return False
    return bool(tensors) and all(map(_plain_rows, tensors)) and _all_torchs()


def _below(dataset: Any, rows: list[int]) -> tuple[Any, list[int]]:
    """Return the tensors of the TensorDataset inside a dataset's Subsets, and the rows of them that are meant."""
    from torch.utils.data import Subset, TensorDataset

    while type(dataset) is Subset:
        inside = dataset.__dict__
        if "__getitems__" in inside:
            raise _OneByOne
        rows = _rows_of(inside.get("indices"), rows) if rows else rows
        dataset = inside.get("dataset")
    if type(dataset) is not TensorDataset or "__getitems__" in dataset.__dict__:
        raise _OneByOne
    tensors = dataset.__dict__.get("tensors")
    if type(tensors) not in (tuple, list):
        raise _OneByOne
    return tensors, rows


def _rows_of(places: Any, indices: list[int]) -> list[int]:
    """Return `[places[i] for i in indices]` as plain ints."""
    numpy = sys.modules.get("numpy")
    try:
        if type(places) in (list, tuple, range):
            return _as_ints([places[i] for i in indices])
        if numpy is not None and type(places) is numpy.ndarray and places.ndim == 1 and places.dtype.kind == "i":
            return list(places[indices].tolist())
    except IndexError:  # gathered sample by sample, torch raises its own error with the index
        raise _OneByOne from None
    raise _OneByOne


def _as_ints(numbers: Any) -> list[int]:
    """Return indices as Python ints. Only ints and NumPy ints qualify: no booleans, masks or tensors."""
    kinds = set(map(type, numbers))
    if kinds == {int}:
        return list(numbers)
    numpy = sys.modules.get("numpy")
    if numpy is None or not kinds <= {int, numpy.int64, numpy.int32}:
        raise _OneByOne
    return [int(number) for number in numbers]


def _plain_rows(tensor: Any) -> bool:
    """Return whether stacking rows of this tensor equals selecting them, strides included."""
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dim() > 0
        and not tensor.requires_grad
        and tensor.is_contiguous()  # torch.stack keeps the order of channels-last rows, index_select does not
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
    )


def _is_torchs(function: Any) -> bool:
    """Return whether a function is defined in torch's own file, rather than put there by a script."""
    if type(function) is not FunctionType:
        return False
    room: ModuleType | None = sys.modules.get(function.__module__)
    code = function.__code__
    return room is not None and room.__name__.startswith("torch.utils.data.") and code.co_filename == room.__file__


def _look() -> Callable[[], list[Any]]:
    """Return a function that lists everything that decides how torch gathers and collates rows at the time of its call.

    Comparing two such lists detects any replacement in between: methods, collate functions, class attributes.
    """
    import torch
    from torch.utils.data import Dataset, Subset, TensorDataset
    from torch.utils.data._utils import collate

    of_tensors, of_subset = vars(TensorDataset), vars(Subset)  # live views: they show attributes set later too

    def now() -> list[Any]:
        by_kind = collate.default_collate_fn_map
        return [
            Subset.__getitem__, Subset.__getitems__, TensorDataset.__getitem__, collate.default_collate,
            collate.collate, collate.collate_tensor_fn, *by_kind.values(),
            getattr(Dataset, "__getitems__", None), getattr(TensorDataset, "__getitems__", None),
            of_tensors.get("tensors"), of_subset.get("dataset"), of_subset.get("indices"),
            # The technique channels_last wraps it, which matters for outputs of convolutions only.
            plain_of(torch.Tensor.__getitem__), torch.stack, *by_kind,
        ]  # fmt: skip

    return now


def _all_torchs() -> bool:
    """Return whether everything that `_look` lists is torch's own."""
    import torch
    from torch.utils.data._utils import collate

    now = _look()()
    functions = 6 + len(collate.default_collate_fn_map)
    return (
        all(map(_is_torchs, now[:functions]))
        and now[functions : functions + 5] == [None] * 5
        and not isinstance(plain_of(torch.Tensor.__getitem__), FunctionType)
        and not isinstance(torch.stack, FunctionType)
        and tuple not in collate.default_collate_fn_map
    )


class _Gather:
    """Fetcher that indexes whole batches, in place of torch's."""

    def __init__(self, fetcher: Any) -> None:
        import torch

        self._fetcher = fetcher
        self._now = _look()
        self._torchs = self._now()
        self._functions, self._dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
        self._as_index = torch.tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        """Return the result of `default_collate([dataset[i] for i in indices])`."""
        try:
            tensors, rows = self._rows(indices)
        except _OneByOne:
            tensors = None
        if tensors is None:  # outside the handler, so that its errors do not show ours as their context
            return self._fetcher.fetch(indices)
        index = self._as_index(rows)
        return [tensor.index_select(0, index) for tensor in tensors]

    def _rows(self, indices: Any) -> tuple[Any, list[int]]:
        """Return the tensors, and the rows of them that make up this batch."""
        fetcher = self._fetcher
        if type(indices) not in (list, tuple) or not indices or self._functions() or self._dispatches():
            raise _OneByOne
        tensors, rows = _below(fetcher.dataset, _as_ints(indices))
        least, most = min(rows), max(rows)
        if not tensors or least < 0 or not all(_plain_rows(tensor) and most < len(tensor) for tensor in tensors):
            raise _OneByOne
        if fetcher.collate_fn is not self._torchs[3] or self._now() != self._torchs:
            raise _OneByOne
        return tensors, rows
