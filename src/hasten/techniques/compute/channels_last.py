"""Images stored pixel by pixel, as convolution kernels read them."""

from __future__ import annotations

import weakref
from typing import Any

from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import CERTAIN, gain_of, in_words, on_gpu, place_of, saved, timed
from hasten.techniques.base import Call, Choices, Effect, Refusal, Resource, Technique
from hasten.techniques.nested import map_tensors


class ChannelsLast(Technique):
    """Keep 4-D tensors of convolutional models in `torch.channels_last`: weights, and inputs however nested.

    Other kernels run, which add in another order. A model that calls `.view` across channels needs NCHW and
    fails in its trial; it is then left as it is. Under the Trainer the images in a batch are laid out before the step.
    """

    name = "channels_last"
    finds = "channels_first"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 16", "PyTorch performance tuning guide")
    acts_on = "a model with 2-D convolutions"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On for models with 2-D convolutions."""
        models = [model for model in evidence.models if {"Conv2d", "ConvTranspose2d"} & set(model.layers)]
        if not models:
            return Refusal("no 2-D convolution in the model")
        if not any(len(shape) == 4 for model in models for shape in model.input_shapes):
            return Refusal("no model takes a 4-D tensor")
        return Choices((True,), "2-D convolutions on tensors stored channel by channel")

    @classmethod
    def finding(cls, evidence: Evidence) -> Finding | None:
        """Convolutions that are faster on this machine with channels last, which was tried on the spot.

        Layer by layer: on a CPU that stands for a step that was not tried, with the copies between layers of both
        kinds, so there it is an estimate, and what is worth less than 5 % is not given.
        """
        tried = evidence.measured_for(cls.finds)
        if not tried or isinstance(cls.settings(evidence), Refusal):
            return None
        worth, gpu = saved(evidence, tried), on_gpu(evidence)
        if not gpu and worth < CERTAIN:
            return None
        return timed(
            cls.finds,
            f"{tried[0].what.partition(':')[0]} and the like read images channel by channel; channels last they take "
            f"{percent(gain_of(tried))} less time",
            "model.to(memory_format=torch.channels_last), and the same of the images of each batch",
            worth, HowKnown.MEASURED if gpu else HowKnown.ESTIMATED,
            place=place_of(evidence, tried[0]),
            where=tried[0].where,
            details=tuple(map(in_words, tried)),
            technique=cls.name, setting="true", sources=cls.sources,
        )  # fmt: skip

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Change the layout of the weights."""
        import torch

        if has_2d_convolution(model):
            model.to(memory_format=torch.channels_last)
            self.did("model")

    def forward(self, call: Call) -> Call:
        """Change the layout of the inputs, those inside a batch's lists and dicts too."""
        import torch

        last = torch.channels_last
        convolutional: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

        def lay_out(tensor: Any) -> Any:
            # A tensor that lies so already is given back as it is.
            return tensor.contiguous(memory_format=last) if tensor.dim() == 4 and not tensor.is_sparse else tensor

        def laid_out(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            known = convolutional.get(module)
            if known is None:
                known = convolutional[module] = has_2d_convolution(module)
            if known:
                args, kwargs = map_tensors(lay_out, (args, kwargs))
            return call(module, args, kwargs)

        return laid_out


def has_2d_convolution(model: Any) -> bool:
    """Whether a module holds a 2-D convolution."""
    import torch

    return any(isinstance(layer, torch.nn.Conv2d | torch.nn.ConvTranspose2d) for layer in model.modules())
