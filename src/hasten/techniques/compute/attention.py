"""Attention on a CPU with plain matrix products instead of the flash kernel."""

from __future__ import annotations

from hasten.evidence import Evidence
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class Attention(ProcessWide):
    """Use the plain implementation ("math") of `scaled_dot_product_attention` on a CPU.

    The CPU's flash kernel saves memory for long sequences, but its backward is slow in bf16 and for short sequences.
    On a GPU this is not tried, because flash is the faster kernel there.
    """

    name = "attention"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("measured here: CPU flash backward in bf16, 9 -> 24 ms a layer",)
    values = ("math",)

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose "math" if the script calls `scaled_dot_product_attention` on a CPU."""
        if not evidence.flags.attention:
            return Refusal("scaled_dot_product_attention was not called")
        if any(model.device == "cuda" for model in evidence.models):
            return Refusal("on a GPU the flash kernel is the fast one")
        return Choices(("math",), "the CPU's flash attention has a slow backward")

    def process(self) -> None:
        """Switch the flash kernel off. The switch is named after CUDA, but torch obeys it on the CPU too."""
        import torch

        cuda = torch.backends.cuda
        self._switches.set(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False)
        self.did("process")
