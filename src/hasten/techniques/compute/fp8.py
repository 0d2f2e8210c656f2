"""Linear layers computed in 8-bit floating point, by torchao."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, CudaOnly, Effect, Refusal, Resource


class Fp8(CudaOnly):
    """Multiply in linear layers in float8, with torchao; weights, gradients and optimizer keep their dtypes.

    The setting is torchao's recipe: "tensorwise" (one scale per tensor, the fastest), "rowwise" (one per row) or
    "rowwise_with_gw_hp" (weight gradients in the layer's own dtype, the most accurate); the latter two want inputs in
    bf16 (`precision`). It needs torchao (`pip install 'hasten[fp8]'`) and a GPU of compute capability 8.9 or newer.
    Without these the Trainer and `hasten.setup` refuse it, and a script trains on without it, with the reason. It
    converts layers of the exact class `nn.Linear` whose sizes are multiples of 16, except the model's last linear
    layer, as in torchao's example. The layers stay the same objects with the same parameters, so state dicts and
    checkpoints do not change. Three bits of mantissa (two in gradients, "tensorwise") are much coarser than bf16:
    compare the losses of whole trainings.

    torchao expects the model to be compiled (`compile`); in eager mode float8 is slower than bf16. The technique has
    not been run on a GPU: layers and gradients were compared on a CPU, where torchao emulates float8.
    """

    name = "fp8"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("torchao.float8", "Micikevicius et al. 2022, FP8 Formats for Deep Learning")
    values = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    acts_on = "an nn.Linear with sizes that are multiples of 16, before the model's last one"
    emulate = False
    """Whether float8 is emulated, on any device: for tests."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._taken: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    @classmethod
    def roundoff(cls, setting: Setting) -> float:
        """Return the rounding error of e5m2, the dtype of gradients under "tensorwise", or of e4m3."""
        return 2.0**-2 if setting == "tensorwise" else 2.0**-3

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose nothing, since it has not been measured on a GPU yet."""
        return cls.refuse_without_gpu(evidence) or Refusal(
            'not measured on a GPU yet: `fp8 = "tensorwise"` in a plan switches it on'
        )

    def prepare(self, model: Any) -> None:
        """Convert the model's linear layers to float8.

        Raises:
            HastenError: The hardware or torchao is missing.
        """
        self._refuse_without_hardware(model)
        convert, config = self._torchao()
        for layer in linear_layers(model):
            twin = convert(layer, config=config)  # a new Float8Linear that shares the layer's parameters
            more = {name: value for name, value in vars(twin).items() if name not in vars(layer)}
            # Turn the layer itself into a Float8Linear rather than put its twin into the model: its hooks, references
            # to it, and layers that the model uses in two places, stay intact.
            vars(layer).update(more)
            layer.__class__ = type(twin)
            self._taken[layer] = set(more)
            self.did("layer")

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Convert a script's model, or leave it alone and tell the user why."""
        try:
            self.prepare(model)
        except HastenError as error:
            self.gave_up(error.message)

    def teardown(self) -> None:
        """Turn the layers back into plain `nn.Linear`."""
        import torch

        for layer, more in list(self._taken.items()):
            layer.__class__ = torch.nn.Linear
            for name in more:
                vars(layer).pop(name, None)
        self._taken.clear()

    def _refuse_without_hardware(self, model: Any) -> None:
        """Raise `HastenError` if the model is not on a GPU that computes in float8."""
        import torch

        gpu = next((parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"), None)
        if self.emulate:
            return
        if gpu is None:
            raise HastenError("fp8 needs an NVIDIA GPU, and the model is not on one", "leave fp8 out")
        if torch.version.hip or torch.cuda.get_device_capability(gpu) < (8, 9):
            raise HastenError(
                f"fp8 needs a GPU of compute capability 8.9 or newer, not a {torch.cuda.get_device_name(gpu)}",
                'leave fp8 out; precision = "bf16-mixed" is for any GPU since Ampere',
            )

    def _torchao(self) -> tuple[Any, Any]:
        """Return torchao's conversion function and its config for the recipe."""
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError as error:
            raise HastenError(f"fp8 needs torchao: {error}", "pip install 'hasten[fp8]'") from None
        config = Float8LinearConfig.from_recipe_name(str(self.setting))
        # pad_inner_dim: the number of rows need not be a multiple of 16, as in an epoch's last batch.
        return convert_to_float8_training, dataclasses.replace(config, pad_inner_dim=True, emulate=self.emulate)


def linear_layers(model: Any) -> list[Any]:
    """Return the layers of a model that may compute in float8, each once, in the model's order."""
    from torch import nn

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [
        layer
        for layer in linear[:-1]
        if type(layer) is nn.Linear
        and "forward" not in vars(layer)  # another technique's or the script's: it would hide the converted class's
        and type(layer.weight) is nn.Parameter
        and layer.weight.element_size() <= 4  # float8 products come out in float32 at most
        and layer.in_features % 16 == layer.out_features % 16 == 0
    ]
