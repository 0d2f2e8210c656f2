"""Attention on a CPU by plain matrix products in place of the flash kernel."""

from __future__ import annotations

from hasten.evidence import Evidence
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class Attention(ProcessWide):
    """Let `scaled_dot_product_attention` on a CPU take its plain implementation ("math").

    The CPU's flash kernel saves memory for long sequences, but its backward is slow in bf16 and for short ones.
    On a GPU, where flash is the fast one, this is not tried.
    """

    name = "attention"
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

    def process(self) -> None:
        """Switch the flash kernel off; torch uses this one switch for the CPU too."""
        import torch

        cuda = torch.backends.cuda
        self._switches.set(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False)
        self.did("process")
