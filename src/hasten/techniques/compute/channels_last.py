"""Images stored pixel by pixel, as convolution kernels read them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Call, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.nested import tensors_in


class ChannelsLast(Technique):
    """Let 2-D convolutions compute in `torch.channels_last`, and the layers between them.

    Other kernels run, which add in another order. What a convolution reads is laid out when it reads it, so weights,
    gradients, the optimizer's state, inputs and files lie in memory as they do without, and so does what a model gives
    to the script. An activation is laid out as without before its memory is given a second name (`view`, `flatten`,
    `chunk`, `permute`, an index), it is pickled, or random numbers are drawn for it. A script that uses channels last
    itself is left alone, as is compiled code, which chooses layouts of its own, and a model whose own code may tell the
    difference: it asks how tensors lie (`stride`, `is_contiguous`), or calls torch by names of its own (`from torch
    import rand_like`), `torch.ops`, vmap or TorchScript.
    """

    name = "channels_last"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 16", "PyTorch performance tuning guide")
    acts_on = "a model with 2-D convolutions"
    liveness = Liveness.STEP

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """On for models with 2-D convolutions."""
        models = [model for model in evidence.models if {"Conv2d", "ConvTranspose2d"} & set(model.layers)]
        if not models:
            return Refusal("no 2-D convolution in the model")
        if not any(len(shape) == 4 for model in models for shape in model.input_shapes):
            return Refusal("no model takes a 4-D tensor")
        return Choices((True,), "2-D convolutions on tensors stored channel by channel")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._gone = ""  # why all is left alone

    def prepare(self, model: Any) -> None:
        """Go on with the models of the Trainer's stage before."""
        for one in list(self._models):
            self._lay_out(one)

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Lay out what this model's convolutions read."""
        from hasten.techniques.compute.images_last import LAYOUT, lies_last, why_it_shows

        if self._gone or not has_2d_convolution(model):
            return
        tensors = laid_weights(model)
        if not LAYOUT.weights:  # else they may lie so by this technique: a block that is called again for its backward
            tensors += tensors_in(args)
        if any(map(lies_last, tensors)):
            self._let_go("the script lays out its images channels last itself")
            return
        if why := why_it_shows(model):
            self.refused(why)
            return
        self._models.add(model)
        self._lay_out(model)
        self.did("model")

    def on(self) -> None:
        """Lay out the models that are known by now."""
        if self._gone:
            raise HastenError(self._gone)
        from hasten.techniques.compute.images_last import lies_last

        super().on()
        for model in list(self._models):
            if any(map(lies_last, laid_weights(model))):
                raise HastenError("the script lays out its images channels last itself")
            self._lay_out(model)

    def off(self) -> None:
        """Lay out nothing; no weight, gradient or state ever lay otherwise."""
        super().off()
        self.over()

    def _lay_out(self, model: Any) -> None:
        from torch.nn import Parameter, UninitializedParameter

        from hasten.techniques.compute.images_last import LAYOUT

        if self.active and not self._gone:
            weights = [getattr(layer, "weight", None) for layer in convolutions(model)]
            LAYOUT.add([one for one in weights if type(one) in (Parameter, UninitializedParameter)], self._let_go)

    def forward(self, call: Call) -> Call:
        """Give the script what a model gives as it lies without."""
        from hasten.techniques.compute.images_last import outputs_as_plain

        def laid_out(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outputs = call(module, args, kwargs)
            outputs_as_plain(outputs)
            return outputs

        return laid_out

    def over(self) -> None:
        """Leave the model as any other."""
        from hasten.techniques.compute.images_last import LAYOUT

        LAYOUT.clear()

    def _let_go(self, why: str) -> None:
        """Leave everything alone from here on, and say so once."""
        from hasten.techniques.compute.images_last import LAYOUT

        if not self._gone:
            self._gone = why
            self.refused(why)
        if self.active:
            LAYOUT.clear()
            print(f"hasten: channels_last lets go: {why}. Take it out of the plan.", file=sys.stderr)


def has_2d_convolution(model: Any) -> bool:
    """Whether a module holds a 2-D convolution."""
    return next(convolutions(model), None) is not None


def laid_weights(model: Any) -> list[Any]:
    """The weights of a module's 2-D convolutions that lie somewhere by now.

    A convolution of a script's own class may have none (it makes them in its forward), a lazy one has none yet.
    """
    from torch.nn.parameter import is_lazy

    weights = [getattr(layer, "weight", None) for layer in convolutions(model)]
    return [one for one in weights if one is not None and not is_lazy(one)]


def convolutions(model: Any) -> Iterator[Any]:
    """The 2-D convolutions in a module."""
    import torch

    kinds = torch.nn.Conv2d | torch.nn.ConvTranspose2d
    return (layer for layer in model.modules() if isinstance(layer, kinds))
