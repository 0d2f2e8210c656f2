"""Data loaders and datasets that also work without the rest of hasten, in any PyTorch training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.data.loader import DataLoader
    from hasten.data.parquet import ParquetDataset
    from hasten.data.remote.options import Remote, RemoteError
    from hasten.data.sample_fetcher import SampleError, SampleFault
    from hasten.data.sample_keys import SampleRng, sample_rng
    from hasten.data.sample_store import SampleStore

__all__ = [
    "DataLoader",
    "ParquetDataset",
    "Remote",
    "RemoteError",
    "SampleError",
    "SampleFault",
    "SampleRng",
    "SampleStore",
    "sample_rng",
]

_SUBMODULES = {
    "DataLoader": "loader",
    "SampleFault": "sample_fetcher",
    "ParquetDataset": "parquet",
    "Remote": "remote.options",
    "RemoteError": "remote.options",
    "SampleError": "sample_fetcher",
    "SampleRng": "sample_keys",
    "SampleStore": "sample_store",
    "sample_rng": "sample_keys",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that a script pays only for the submodules it needs."""
    from importlib import import_module

    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUBMODULES[name]}"), name)
