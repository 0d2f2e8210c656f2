"""Attention on a CPU by plain matrix products in place of the flash kernel."""

from __future__ import annotations

from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import in_words, saved, timed
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class Attention(ProcessWide):
    """Let `scaled_dot_product_attention` on a CPU take its plain implementation ("math").

    The CPU's flash kernel saves memory for long sequences, but its backward is slow in bf16 and for short ones.
    On a GPU, where flash is the fast one, this is not tried.
    """

    name = "attention"
    finds = "attention_by_hand"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("measured here: CPU flash backward in bf16, 9 -> 24 ms a layer",)
    values = ("math",)

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On for scaled_dot_product_attention on a CPU."""
        if not evidence.flags.attention:
            return Refusal("scaled_dot_product_attention was not called")
        if any(model.device == "cuda" for model in evidence.models):
            return Refusal("on a GPU the flash kernel is the fast one")
        return Choices(("math",), "the CPU's flash attention has a slow backward")

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Attention made of softmax and products where torch's own is faster for the shape, as tried on the spot.

        This technique does not cure it: the script's code must change.
        """
        tried = evidence.measured_for(cls.finds)
        if not tried:
            return None
        first = max(tried, key=lambda one: one.saved * one.calls)
        return timed(
            cls.finds,
            f"{first.what} (batch, heads, length, width) is made by hand; scaled_dot_product_attention takes "
            f"{percent(first.gain)} less time",
            "call torch.nn.functional.scaled_dot_product_attention(q, k, v), with is_causal=True for a causal mask",
            saved(evidence, [one for one in tried if one.saved > 0]),
            HowKnown.MEASURED,
            place=first.where,
            details=(*map(in_words, tried), "tried without mask and dropout"),
            sources=("torch.nn.functional.scaled_dot_product_attention",),
        )

    def process(self) -> None:
        """Switch the flash kernel off; torch uses this one switch for the CPU too."""
        import torch

        cuda = torch.backends.cuda
        self._switches.set(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False)
        self.did("process")
