"""In-memory tensors gathered by one indexing call a batch, not sample by sample."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, ordinary_wait
from hasten.evidence.weigh import share_of, timed
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique

_GATHERED = 80e-6  # seconds: a loader's own cost of a batch, and one index_select a tensor (26 us here)
_BYTES = 2e9  # copied a second by one core


class BatchedFetch(Technique):
    """Gather a batch of a TensorDataset with one `index_select` a tensor.

    The DataLoader asks a dataset for each sample and stacks them; for tensors that lie in memory anyway this
    is most of the cost of a small step. Values, order and random numbers stay the same.
    """

    name = "batched_fetch"
    finds = "sample_by_sample"
    effect = Effect.EXACT
    relieves = Resource.DATA
    sources = ("Lin, tip 3", "fastai #3949")
    acts_on = "a DataLoader over a TensorDataset"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On for TensorDatasets."""
        loader = evidence.train_loader
        if loader is None:
            return Refusal("the script trains without a DataLoader")
        if loader.probe is None or not loader.probe.in_memory:
            return Refusal(f"{loader.dataset} is not a TensorDataset with the default collate function")
        return Choices((True,), "samples lie in memory as tensors and are gathered one by one")

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Tensors in memory that are fetched sample by sample.

        Rests on the measured wait for a batch of a TensorDataset, less what gathering its bytes at once costs
        (Lin, tip 3; fastai #3949).
        """
        loader = evidence.train_loader
        if loader is None or not loader.default_collate or loader.iterable:
            return None
        if loader.dataset != "TensorDataset" and not (loader.probe is not None and loader.probe.in_memory):
            return None
        wait = ordinary_wait(evidence)
        workers = " and passed on by workers" if loader.num_workers else ""
        return timed(
            cls.finds,
            f"tensors that lie in memory are fetched sample by sample and stacked{workers}: {in_ms(wait)} for each "
            f"batch of {loader.batch_size or 'so many'}",
            "gather each batch at once: `for rows in torch.randperm(len(x)).split(batch_size): batch = x[rows], "
            "y[rows]`, or the technique batched_fetch"
            + (", with num_workers=0" if workers else ", which leaves the script as it is"),
            share_of(evidence, wait - _GATHERED - loader.batch_bytes / _BYTES),
            HowKnown.ESTIMATED,
            place=loader.where,
            technique=cls.name,
            setting="true",
            sources=cls.sources,
        )

    def loader_options(self, options: dict[str, Any]) -> None:
        """Note which loaders will be gathered: where they have workers, that happens in those."""
        batched = options["batch_size"] is not None or options["batch_sampler"] is not None
        if row_tensors(_Planned(options["dataset"], options["collate_fn"], batched))[0] is not None:
            self.did("loader")

    def fetcher(self, fetcher: Any) -> Any:
        """Gather batches at once where samples are rows of tensors."""
        tensors, rows = row_tensors(fetcher)
        if tensors is None:
            return fetcher
        return _Gather(fetcher, tensors, rows)


def row_tensors(fetcher: Any) -> tuple[tuple[Any, ...] | None, Any]:
    """The tensors whose rows this fetcher's samples are, and their row numbers (None: as they stand)."""
    import torch
    from torch.utils.data import Subset, TensorDataset, default_collate

    if getattr(fetcher, "collate_fn", None) is not default_collate or not getattr(fetcher, "auto_collation", False):
        return None, None
    dataset, rows = fetcher.dataset, None
    while type(dataset) is Subset:
        inner = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        rows = inner if rows is None else inner[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not dataset.tensors or any(t.requires_grad for t in dataset.tensors):
        return None, None
    return dataset.tensors, rows


class _Planned:
    """What `row_tensors` looks at, of a loader that is not built yet."""

    def __init__(self, dataset: Any, collate_fn: Any, auto_collation: bool) -> None:
        from torch.utils.data import default_collate

        self.dataset = dataset
        self.collate_fn = collate_fn or default_collate
        self.auto_collation = auto_collation


class _Gather:
    """A fetcher that indexes whole batches."""

    def __init__(self, fetcher: Any, tensors: tuple[Any, ...], rows: Any) -> None:
        import torch

        self.dataset = fetcher.dataset
        self._fetcher = fetcher
        self._tensors = tensors
        self._rows = rows
        self._as_index = torch.as_tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, indices: Any) -> Any:
        """What `default_collate([dataset[i] for i in indices])` gives."""
        try:
            index = self._as_index(indices)
            if self._rows is not None:
                index = self._rows[index]
            # Unlike tensor[index], this gives the strides that stacking gives; they decide which kernels run.
            return [tensor.index_select(0, index) for tensor in self._tensors]
        except (IndexError, RuntimeError):  # an index from the end, or one that is not there
            return self._fetcher.fetch(indices)
