"""cuDNN asked to measure its convolution kernels once and keep the fastest."""

from __future__ import annotations

from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.weigh import in_words, is_sure, place_of, saved, switched, timed
from hasten.techniques.base import Choices, CudaOnly, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class CudnnBenchmark(CudaOnly, ProcessWide):
    """`torch.backends.cudnn.benchmark = True`: pays where input sizes stay the same."""

    name = "cudnn_benchmark"
    finds = "cudnn_benchmark_off"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 15", "Kuhn, tip 6")
    tried = True

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On for convolutions whose sizes stay the same."""
        if refusal := cls.refuse_without_gpu(evidence):
            return refusal
        if evidence.flags.cudnn_benchmark:
            return Refusal("the script sets it already")
        if evidence.flags.deterministic:
            return Refusal("the script asks for deterministic algorithms")
        if not any(layer.startswith("Conv") for model in evidence.models for layer in model.layers):
            return Refusal("no convolution in the model")
        return Choices((True,), "cuDNN picks its kernels by rule of thumb")

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """cuDNN not asked to measure although sizes stay the same: tried on the spot.

        In the run itself, switched on and off in blocks of steps; where that was not done, layer by layer.
        """
        tried = evidence.measured_for(cls.finds)
        sizes = len(evidence.inputs.shapes) if evidence.inputs else 0
        if sizes > 2 or isinstance(cls.settings(evidence), Refusal):  # 2: a last, smaller batch
            return None
        if not tried and not is_sure(evidence, cls.finds):
            return None
        worth, how_known, live = switched(evidence, cls.finds, saved(evidence, tried), HowKnown.MEASURED)
        return timed(
            cls.finds,
            "cuDNN picks the kernels of its convolutions by rule of thumb although their sizes stay the same",
            "set torch.backends.cudnn.benchmark = True at the start",
            worth, how_known,
            place=place_of(evidence, tried[0]) if tried else "",
            where=tried[0].where if tried else "",
            details=(*live, *map(in_words, tried)),
            technique=cls.name, setting="true", sources=cls.sources,
        )  # fmt: skip

    @classmethod
    def may_help(cls, evidence: Evidence) -> bool:
        """Where sizes stay the same."""
        return len(evidence.inputs.shapes) <= 2 if evidence.inputs else True

    def process(self) -> None:
        """Switch it on."""
        import torch

        cudnn = torch.backends.cudnn
        self._switches.set(lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value), True)
        self.did("process")
