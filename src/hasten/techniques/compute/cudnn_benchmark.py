"""cuDNN's autotuner: convolution kernels chosen by measurement."""

from __future__ import annotations

from hasten.evidence import Evidence
from hasten.techniques.base import Choices, CudaOnly, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class CudnnBenchmark(CudaOnly, ProcessWide):
    """Let cuDNN time its convolution kernels and keep the fastest (`torch.backends.cudnn.benchmark = True`).

    It measures once per input size, so it pays where input sizes stay the same.
    """

    name = "cudnn_benchmark"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 15", "Kuhn, tip 6")

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it for models with convolutions on a GPU, unless the script wants deterministic algorithms."""
        if refusal := cls.refuse_without_gpu(evidence):
            return refusal
        if evidence.flags.cudnn_benchmark:
            return Refusal("the script sets it already")
        if evidence.flags.deterministic:
            return Refusal("the script asks for deterministic algorithms")
        if not any(layer.startswith("Conv") for model in evidence.models for layer in model.layers):
            return Refusal("no convolution in the model")
        return Choices((True,), "cuDNN picks its kernels by rule of thumb")

    def process(self) -> None:
        """Switch the autotuner on."""
        import torch

        cudnn = torch.backends.cudnn
        self._switches.set(lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value), True)
        self.did("process")
