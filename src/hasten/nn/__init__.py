"""Layers and losses that need less memory than the plain ones, for models of your own."""

from hasten.nn.chunked_cross_entropy import ChunkedCrossEntropy, chunked_cross_entropy

__all__ = ["ChunkedCrossEntropy", "chunked_cross_entropy"]
