"""The technique `channels_last`: which models it may act on, and when it gives up. `images_last` does the work."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from hasten import messages
from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Call, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.nested import tensors_in


class ChannelsLast(Technique):
    """Run 2-D convolutions, and the layers between them, in the memory format `torch.channels_last`.

    Other kernels run, which add in another order. A convolution's input is converted when the convolution reads it, so
    weights, gradients, optimizer state, inputs, files, and the outputs that a model returns to the script all keep the
    strides that they have without the technique. An activation is converted back to contiguous before its memory gets a
    second name (`view`, `flatten`, `chunk`, `permute`, an index), before it is pickled, and before random numbers are
    drawn for it. Left alone are scripts that use channels last themselves, compiled code, which chooses its own
    layouts, and models whose own code may notice the difference: it asks for the layout of tensors (`stride`,
    `is_contiguous`), or calls torch under imported names (`from torch import rand_like`), `torch.ops`, vmap or
    TorchScript.
    """

    name = "channels_last"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("Lin, tip 16", "PyTorch performance tuning guide")
    acts_on = "a model with 2-D convolutions"
    liveness = Liveness.STEP

    @classmethod
    def roundoff(cls, setting: Setting) -> float:
        """Return 8 units of float32's last place: on a CPU, BatchNorm adds a channel's values one after the other.

        In the other layout it adds rows first, and the rows' sums then, which rounds less.
        """
        return 2.0**-20

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it for models that have 2-D convolutions and take a 4-D tensor."""
        models = [model for model in evidence.models if {"Conv2d", "ConvTranspose2d"} & set(model.layers)]
        if not models:
            return Refusal("no 2-D convolution in the model")
        if not any(len(shape) == 4 for model in models for shape in model.input_shapes):
            return Refusal("no model takes a 4-D tensor")
        return Choices((True,), "2-D convolutions on tensors stored channel by channel")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._why_given_up = ""  # reason why everything is left alone; "" while the technique may act

    def prepare(self, model: Any) -> None:
        """Re-apply the layout to models from the Trainer's previous stage."""
        for known in list(self._models):
            self._lay_out(known)

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Convert the inputs of this model's convolutions from now on, unless that is unsafe."""
        from hasten.techniques.compute.images_last import LAYOUT, lies_last, why_it_shows

        if self._why_given_up or not has_2d_convolution(model):
            return
        tensors = existing_weights(model)
        # Inputs in channels last show that the script uses the format itself, unless this technique has converted them:
        # activation checkpointing calls a block of the model again, with an activation as its input.
        if not LAYOUT.weights:
            tensors += tensors_in(args)
        if any(map(lies_last, tensors)):
            self._give_up("the script lays out its images channels last itself")
            return
        if why := why_it_shows(model):
            self.refused(why)
            return
        self._models.add(model)
        self._lay_out(model)
        self.did("model")

    def on(self) -> None:
        """Convert for all models known so far.

        Raises:
            HastenError: The technique was given up, or a script's weights are in channels last by now.
        """
        if self._why_given_up:
            raise HastenError(self._why_given_up)
        from hasten.techniques.compute.images_last import lies_last

        super().on()
        for model in list(self._models):
            if any(map(lies_last, existing_weights(model))):
                raise HastenError("the script lays out its images channels last itself")
            self._lay_out(model)

    def off(self) -> None:
        """Stop converting. Weights, gradients and states never changed their layout, so nothing needs undoing."""
        super().off()
        self.teardown()

    def _lay_out(self, model: Any) -> None:
        from torch.nn import Parameter, UninitializedParameter

        from hasten.techniques.compute.images_last import LAYOUT

        if self.active and not self._why_given_up:
            weights = [getattr(layer, "weight", None) for layer in convolutions(model)]
            LAYOUT.add([own for own in weights if type(own) in (Parameter, UninitializedParameter)], self._give_up)

    def forward(self, call: Call) -> Call:
        """Return a model's outputs to the script with the layout that they have without the technique."""
        from hasten.techniques.compute.images_last import outputs_as_plain

        def laid_out(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outputs = call(module, args, kwargs)
            outputs_as_plain(outputs)
            return outputs

        return laid_out

    def teardown(self) -> None:
        """Stop laying out the model's convolutions."""
        from hasten.techniques.compute.images_last import LAYOUT

        LAYOUT.clear()

    def _give_up(self, why: str) -> None:
        """Give up for the rest of the process, and tell the user once."""
        from hasten.techniques.compute.images_last import LAYOUT

        if not self._why_given_up:
            self._why_given_up = why
            self.refused(why)
        if self.active:
            LAYOUT.clear()
            messages.tell(f"hasten: channels_last does not act from here on: {why}. Remove it from the plan.")


def has_2d_convolution(model: Any) -> bool:
    """Return whether a module contains a 2-D convolution."""
    return next(convolutions(model), None) is not None


def existing_weights(model: Any) -> list[Any]:
    """Return the weights of a module's 2-D convolutions, as far as they have one.

    A convolution of a script's own class may compute its weight in its forward, and a lazy one has none before the
    first forward.
    """
    from torch.nn.parameter import is_lazy

    weights = [getattr(layer, "weight", None) for layer in convolutions(model)]
    return [weight for weight in weights if weight is not None and not is_lazy(weight)]


def convolutions(model: Any) -> Iterator[Any]:
    """Yield the 2-D convolutions in a module, transposed ones included."""
    import torch

    kinds = torch.nn.Conv2d | torch.nn.ConvTranspose2d
    return (layer for layer in model.modules() if isinstance(layer, kinds))
