"""Loaders' parts that a person can also use by themselves."""

from hasten.data.sample_store import SampleStore

__all__ = ["SampleStore"]
