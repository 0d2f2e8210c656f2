"""Memory-saving losses, and data parallelism in one process, to use in your own models."""

from hasten.nn.chunked_cross_entropy import ChunkedCrossEntropy, chunked_cross_entropy
from hasten.nn.data_parallel import DataParallelCriterion, DataParallelModel, gather

__all__ = [
    "ChunkedCrossEntropy",
    "DataParallelCriterion",
    "DataParallelModel",
    "chunked_cross_entropy",
    "gather",
]
