"""Checks of sizes: multiples that the hardware wants, parameters without use, padding."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, HowKnown, Layer, Measurement, severity_of
from hasten.evidence.figures import percent
from hasten.evidence.weigh import COMPUTE, LEAST, in_words, place_of, saved, seconds_of, share_of, size_of, timed

_BATCH = "batch_size="


class OddSizes(Check):
    """Layers and batches whose sizes are no multiple of what the hardware wants, where rounding them up is faster."""

    name = "odd_sizes"
    sources = ("NVIDIA, Matrix Multiplication Background User's Guide", "PyTorch performance tuning guide")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """Only where it was tried on this machine, for the very sizes, and brought something."""
        tried = evidence.measured_for(cls.name)
        best: dict[str, Measurement] = {}
        for one in tried:
            if not one.detail.startswith(_BATCH) and one.saved > (best[one.where].saved if one.where in best else 0):
                best[one.where] = one
        for one in best.values():
            finding = timed(
                cls.name,
                f"{one.what} makes its forward and backward {percent(one.gain)} shorter here",
                f"give it {one.detail}, and what feeds or follows it the same",
                saved(evidence, [one]),
                HowKnown.MEASURED,
                place=place_of(evidence, one),
                where=one.where,
                details=tuple(in_words(other) for other in tried if other.where == one.where),
                sources=cls.sources,
            )
            if finding:
                yield finding
        yield from cls._batch(evidence, [one for one in tried if one.detail.startswith(_BATCH)])

    @classmethod
    def _batch(cls, evidence: Evidence, tried: list[Measurement]) -> Iterator[Finding]:
        loader = evidence.train_loader
        if not tried or loader is None:
            return
        finding = timed(
            cls.name,
            f"batches of {loader.batch_size} are slower per sample than {tried[0].detail}",
            f"give the loader {tried[0].detail}",
            saved(evidence, tried),
            HowKnown.MEASURED,
            place=loader.where,
            details=tuple(map(in_words, tried)),
            sources=cls.sources,
        )
        if finding:
            yield finding


class BiasBeforeNorm(Check):
    """A bias that the normalisation behind it takes away again."""

    name = "bias_before_norm"
    sources = ("PyTorch performance tuning guide", "Kuhn")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One for all; with a worth only where leaving the bias out was measured to save time."""
        layers = [
            layer
            for layer in evidence.layers
            if layer.bias and norm_of(evidence, layer) and layer.kind.startswith(("Conv", "Linear"))
        ]
        if not layers:
            return
        worth = saved(evidence, [one for one in evidence.measured_for(cls.name) if one.saved > 0])
        known = worth if worth >= LEAST else None
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        # Where a layer is built is not known, only where it is called: the source's own finding says that.
        yield Finding(
            cls.name,
            f"{layers[0].path}{more}: a bias right before {norm_of(evidence, layers[0])} is taken away again",
            "build it with bias=False",
            severity_of(known), known, HowKnown.MEASURED if known else HowKnown.READ,
            where=layers[0].path,
            details=tuple(f"{layer.path}: {size_of(layer)}" for layer in layers),
            sources=cls.sources,
        )  # fmt: skip


class RaggedBatches(Check):
    """Sequences of unlike length in one batch, filled up to the longest."""

    name = "ragged_batches"
    sources = ("torchtext, BucketIterator", "Hugging Face Trainer, group_by_length")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """Its worth: the padding's share of forward and backward, a fifth of which stays even among like lengths."""
        inputs = evidence.inputs
        if inputs is None or inputs.padding < 0.1 or "int" not in inputs.dtype or not _reads_tokens(evidence):
            return
        longest = max((shape[1] for shape, _ in inputs.shapes if len(shape) == 2), default=0)
        if longest < 8:
            return
        lengths = len({shape[1:] for shape, _ in inputs.shapes})
        varying = f", in batches of {lengths} lengths" if lengths > 1 else f", all batches {longest} long"
        finding = timed(
            cls.name,
            f"{percent(inputs.padding)} of the tokens are padding{varying}",
            "batch sequences of like length (a batch sampler that sorts within a large window), padded to the longest "
            "of their batch",
            0.8 * inputs.padding * share_of(evidence, seconds_of(evidence, *COMPUTE)),
            HowKnown.ESTIMATED,
            place=evidence.train_loader.where if evidence.train_loader else "",
            sources=cls.sources,
        )
        if finding:
            yield finding


def norm_of(evidence: Evidence, layer: Layer) -> str:
    """Class of the normalisation that takes a layer's output and the mean of each channel from it; "" if none does.

    A LayerNorm takes its mean over the channels, and a GroupNorm over several, so a bias in front of them stays.
    """
    path, _, kind = layer.normed_by.partition(" (")
    kind = kind.rstrip(")") or next((other.kind for other in evidence.layers if path and other.path == path), "")
    return "" if "LayerNorm" in kind or "RMSNorm" in kind else kind


def _reads_tokens(evidence: Evidence) -> bool:
    """Whether the model embeds integers: those of another model are not tokens."""
    return any("Embedding" in layer for model in evidence.models for layer in model.layers)


CHECKS = (OddSizes, BiasBeforeNorm, RaggedBatches)
