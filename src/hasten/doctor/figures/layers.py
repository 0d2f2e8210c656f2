"""Layers of a run and what follows them."""

from __future__ import annotations

from hasten.evidence import Evidence, Layer


def norm_of(evidence: Evidence, layer: Layer) -> str:
    """Class of the normalisation that takes a layer's output and the mean of each channel from it; "" if none does.

    A LayerNorm takes its mean over the channels, and a GroupNorm over several, so a bias in front of them stays.
    """
    path, _, kind = layer.normed_by.partition(" (")
    kind = kind.rstrip(")") or next((other.kind for other in evidence.layers if path and other.path == path), "")
    return "" if "LayerNorm" in kind or "RMSNorm" in kind else kind
