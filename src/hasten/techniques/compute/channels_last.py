"""Images stored pixel by pixel, as convolution kernels read them."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence
from hasten.techniques.base import Call, Choices, Effect, Refusal, Resource, Technique


class ChannelsLast(Technique):
    """Keep 4-D tensors of convolutional models in `torch.channels_last`.

    Other kernels run, which add in another order. A model that calls `.view` across channels needs NCHW and
    fails in its trial; it is then left as it is.
    """

    name = "channels_last"
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

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Change the layout of the weights."""
        import torch

        if has_2d_convolution(model):
            model.to(memory_format=torch.channels_last)
            self.did("model")

    def forward(self, call: Call) -> Call:
        """Change the layout of the inputs."""
        import torch

        last = torch.channels_last
        convolutional: dict[int, bool] = {}

        def laid_out(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            known = convolutional.get(id(module))
            if known is None:
                known = convolutional[id(module)] = has_2d_convolution(module)
            if known:
                args = tuple(
                    x.contiguous(memory_format=last) if isinstance(x, torch.Tensor) and x.dim() == 4 else x
                    for x in args
                )
            return call(module, args, kwargs)

        return laid_out


def has_2d_convolution(model: Any) -> bool:
    """Whether a module holds a 2-D convolution."""
    import torch

    return any(isinstance(layer, torch.nn.Conv2d | torch.nn.ConvTranspose2d) for layer in model.modules())
