"""Techniques with defects, which a check must find. Registered in the forks that run trainings, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hasten.techniques.base import Call, Effect, Resource, Technique


class _Planted(Technique):
    relieves = Resource.COMPUTE
    effect = Effect.ROUNDING


class ScalesAGradient(_Planted):
    """The first weight matrix learns from 0.9 of its gradient."""

    name = "scales_a_gradient"

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        next(model.parameters()).register_hook(lambda gradient: gradient * 0.9)


class DropsABatch(_Planted):
    """The fifth batch is never given."""

    name = "drops_a_batch"
    effect = Effect.EXACT

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        given = [0]

        def dropping() -> Any:
            given[0] += 1
            if given[0] == 5:
                fetch()
            return fetch()

        return dropping


class DropsEveryFiftieth(_Planted):
    """Every 50th batch is never given: later than a check looks."""

    name = "drops_every_fiftieth"
    effect = Effect.EXACT

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        given = [0]

        def dropping() -> Any:
            given[0] += 1
            if given[0] % 50 == 0:
                fetch()
            return fetch()

        return dropping


class NarrowWeights(_Planted):
    """Weights are rounded to bf16 after each step, with no master copy."""

    name = "narrow_weights"

    @classmethod
    def roundoff(cls, setting: Any) -> float:
        return 2.0**-8

    def optimizer(self, optimizer: Any) -> None:
        import torch

        def narrow(this: Any, *_: Any) -> None:
            with torch.no_grad():
                for group in this.param_groups:
                    for parameter in group["params"]:
                        parameter.copy_(parameter.bfloat16())

        optimizer.register_step_post_hook(narrow)


class RoundsDown(_Planted):
    """Linear layers give what they give less twelve units in the last place: no more than other kernels may."""

    name = "rounds_down"

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        import torch

        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda module, args, output: output * (1 - 12 * 2.0**-23))


class DrawsOnce(_Planted):
    """Python's random numbers are drawn once, in the third forward."""

    name = "draws_once"
    effect = Effect.EXACT

    def forward(self, call: Call) -> Call:
        count = [0]

        def drawing(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            count[0] += 1
            if count[0] == 3:
                self.draw()
            return call(module, args, kwargs)

        return drawing

    def draw(self) -> None:
        """Take a number."""
        random.random()


class DrawsOnceFromNumPy(DrawsOnce):
    """NumPy's random numbers are drawn once, in the third forward."""

    name = "draws_once_from_numpy"

    def draw(self) -> None:
        import numpy as np

        np.random.rand()  # noqa: NPY002 - the global one


class DrawsOnceFromTorch(DrawsOnce):
    """torch's random numbers are drawn once, in the third forward."""

    name = "draws_once_from_torch"

    def draw(self) -> None:
        import torch

        torch.rand(())


class AddsToTheLoss(_Planted):
    """The loss is larger by one, and every gradient what it was."""

    name = "adds_to_the_loss"
    effect = Effect.EXACT

    def process(self) -> None:
        from torch.nn import functional

        plain = functional.cross_entropy
        functional.cross_entropy = lambda *args, **kwargs: plain(*args, **kwargs) + 1.0


class SpoilsAMoment(_Planted):
    """A second moment that the optimizer keeps is two units in the last place off, behind the second step."""

    name = "spoils_a_moment"
    effect = Effect.EXACT

    def optimizer(self, optimizer: Any) -> None:
        count = [0]

        def spoil(this: Any, *_: Any) -> None:
            count[0] += 1
            if count[0] == 2:
                next(iter(this.state.values()))["exp_avg_sq"].mul_(1 + 2.0**-22)

        optimizer.register_step_post_hook(spoil)


class TurnsTheRate(_Planted):
    """The learning rate is another behind the second step."""

    name = "turns_the_rate"
    effect = Effect.EXACT

    def optimizer(self, optimizer: Any) -> None:
        count = [0]

        def turn(this: Any, *_: Any) -> None:
            count[0] += 1
            if count[0] == 2:
                this.param_groups[0]["lr"] *= 1.001

        optimizer.register_step_post_hook(turn)


class ValidatesOtherwise(_Planted):
    """What a model gives in eval mode is twice what it should be."""

    name = "validates_otherwise"
    effect = Effect.EXACT

    def forward(self, call: Call) -> Call:
        return lambda module, args, kwargs: call(module, args, kwargs) * (1.0 if module.training else 2.0)


class LeavesAFile(_Planted):
    """A file is written that the script does not write."""

    name = "leaves_a_file"
    effect = Effect.EXACT

    def optimizer(self, optimizer: Any) -> None:
        with open("more.txt", "w") as file:
            file.write("x")


class FreezesBuffers(_Planted):
    """BatchNorm's statistics stay as they are."""

    name = "freezes_buffers"

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        for module in model.modules():
            if hasattr(module, "momentum") and getattr(module, "running_mean", None) is not None:
                module.momentum = 0.0


class StepsTwice(_Planted):
    """The optimizer's fourth step is made twice."""

    name = "steps_twice"

    def optimizer(self, optimizer: Any) -> None:
        step, count = optimizer.step, [0]

        def twice(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == 4:
                step(*args, **kwargs)
            return step(*args, **kwargs)

        optimizer.step = twice


class OnlyTogether(_Planted):
    """Alone it does nothing; with `only_together_too` the loss is scaled."""

    name = "only_together"

    def backward(self, call: Call) -> Call:
        import torch

        torch.hasten_test_together = True  # type: ignore[attr-defined]
        return call


class OnlyTogetherToo(_Planted):
    """See `OnlyTogether`."""

    name = "only_together_too"

    def backward(self, call: Call) -> Call:
        import torch

        def scaled(tensors: Any, *args: Any, **kwargs: Any) -> None:
            call(tensors * 1.05 if hasattr(torch, "hasten_test_together") else tensors, *args, **kwargs)

        return scaled


class LeavesAlone(_Planted):
    """Changes nothing at all."""

    name = "leaves_alone"
    effect = Effect.EXACT


class SavesOtherOptions(_Planted):
    """The saved file says another learning rate than the optimizer has."""

    name = "saves_other_options"
    effect = Effect.EXACT

    def optimizer(self, optimizer: Any) -> None:
        def changed(_: Any, state: dict[str, Any]) -> None:
            for group in state["param_groups"]:
                group["lr"] = 10.0 * group["lr"]

        optimizer.register_state_dict_post_hook(changed)


class LoadsOtherOptions(_Planted):
    """After a resume the optimizer has another learning rate than was saved."""

    name = "loads_other_options"
    effect = Effect.EXACT

    def optimizer(self, optimizer: Any) -> None:
        def changed(this: Any) -> None:
            for group in this.param_groups:
                group["lr"] = 2.0 * group["lr"]

        optimizer.register_load_state_dict_post_hook(changed)


class Fails(_Planted):
    """The script fails under it, in its third step."""

    name = "fails"

    def optimizer(self, optimizer: Any) -> None:
        count = [0]

        def failing(*_: Any) -> None:
            count[0] += 1
            if count[0] == 3:
                raise RuntimeError("planted")

        optimizer.register_step_pre_hook(failing)


TECHNIQUES = (
    ScalesAGradient,
    DropsABatch,
    DropsEveryFiftieth,
    NarrowWeights,
    RoundsDown,
    DrawsOnce,
    DrawsOnceFromNumPy,
    DrawsOnceFromTorch,
    AddsToTheLoss,
    SpoilsAMoment,
    TurnsTheRate,
    ValidatesOtherwise,
    LeavesAFile,
    FreezesBuffers,
    StepsTwice,
    OnlyTogether,
    OnlyTogetherToo,
    LeavesAlone,
    SavesOtherOptions,
    LoadsOtherOptions,
    Fails,
)


def register() -> None:
    """Put them into this process's catalogue."""
    from hasten.techniques import CATALOGUE

    CATALOGUE.update({technique.name: technique for technique in TECHNIQUES})
