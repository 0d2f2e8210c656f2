"""Activations of repeated blocks computed again in the backward, not kept."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

from hasten import messages
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.memory.blocks import named, paths_in, repeated, words_of
from hasten.techniques.memory.sequential_segments import CheckpointedSegments, long_sequentials
from hasten.techniques.memory.standing_forward import TORCHSCRIPT, StandingForward
from hasten.techniques.recompute.costs import BlockCost, Meter
from hasten.techniques.switches import Switches

SQRT = "sqrt"


class ActivationCheckpointing(Technique):
    """Keep only the inputs of a model's repeated blocks, and run each block's forward again in the backward.

    `true` takes the entries of `nn.ModuleList` and `nn.Sequential` that come at least twice and have layers inside,
    the outermost such ones; a number takes only so many of them, the first ones, whose activations are kept the
    longest; a string names their classes instead ("Block" or "EncoderLayer,DecoderLayer") or their paths in the model
    ("blocks.0-5,blocks.9"). "sqrt", and `true` where a model has no such blocks, cuts each `nn.Sequential` of n >= 4
    entries into about sqrt(n) pieces instead. Saves memory and costs about a third more computation, in proportion to
    the blocks, so it pays where it makes room for a bigger batch. `hasten tune --memory SIZE` measures how long each
    block takes to compute again and how many bytes that saves, and names those that fit the size at the least time.

    A block is run again exactly as it was: random states (Python's, NumPy's, torch's, and generators that the block
    keeps), autocast, parameters, buffers, attributes and what its code names of globals are put back, and what its
    forward notes on the side is noted once. Some numbers are compared: where others come out the backward ends in an
    error, never in a wrong gradient. A block that cannot be run again (it changes its inputs in place, has hooks of
    the script's inside, prints, writes or logs, goes on with an iterator, or uses torch.func) keeps its activations,
    and that is said. So does one that is called under hooks for saved tensors. Forwards in eval mode or without
    gradients are left alone. Where the model is compiled as well, blocks that draw by Python or NumPy, or change
    buffers other than BatchNorm's, keep their activations.
    """

    name = "activation_checkpointing"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("torch.utils.checkpoint", "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost")
    acts_on = "repeated blocks in a model"
    liveness = Liveness.STEP  # the forwards that it replaces look at `active`; graphs that it left are whole

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._switches = Switches()
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()  # to be wrapped by `on`
        self._standing: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose forwards were replaced
        self._meters: dict[str, Meter] | None = None

    @classmethod
    def check(cls, setting: Setting) -> str:
        """`true`, "sqrt", how many blocks, or names of classes and paths."""
        if type(setting) is int and setting >= 1:
            return ""
        if setting is True or (isinstance(setting, str) and words_of(setting)):
            return ""
        return (
            'must be true, "sqrt", a number of blocks, names of classes ("Block,DecoderLayer") or paths of modules'
            ' ("blocks.0-5")'
        )

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Never by itself."""
        return Refusal("it saves memory and costs time: `hasten tune --memory SIZE` tries it")

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Wrap the forwards of blocks that are not wrapped yet."""
        self.prepare(model)

    def prepare(self, model: Any) -> None:
        """Wrap the blocks' forwards, so that the first step needs less memory already."""
        if self.active:
            self._wrap(model)
        else:
            self._models.add(model)

    def on(self) -> None:
        """Wrap the models that are known by now; what was wrapped before looks at `active`."""
        super().on()
        self._let_statistics_be()
        for model in list(self._models):
            self._wrap(model)
        self._models.clear()

    def off(self) -> None:
        """Run forwards as they are."""
        super().off()
        self._switches.put_back()

    def measure(self) -> None:
        """Measure, from the first forward on, what each block saves and costs: for `measured`."""
        self._meters = {}

    def measured(self) -> list[BlockCost]:
        """Return what the blocks save and cost, in the order of the model; [] where `measure` was not called."""
        costs = [meter.cost(path) for path, meter in (self._meters or {}).items()]
        return [cost for cost in costs if cost is not None]

    def _wrap(self, model: Any) -> None:
        import torch

        if isinstance(model, torch.jit.ScriptModule):
            self.refused("a scripted model has no blocks to wrap")
            return
        if not self._switches:
            self._let_statistics_be()
        paths = paths_in(model)
        blocks = self._blocks(model, paths)
        of_modules = {id(module): path for path, module in reversed(paths.items())}
        for block in blocks:
            if not isinstance(vars(block).get("forward"), Checkpointed):
                meter = self._meter(of_modules.get(id(block), ""), block)
                self._stand(block, Checkpointed(block, self, meter), "block")

        if self.setting == SQRT or (self.setting is True and not blocks):
            self._cut(model)

    def _let_statistics_be(self) -> None:
        """Have compiled blocks change BatchNorm's statistics once, where torch knows how."""
        import torch._dynamo.config as dynamo  # an optimizer's first step imports it anyway

        if knows_statistics():
            self._switches.set(
                lambda: dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint,
                lambda value: setattr(dynamo, "skip_fwd_side_effects_in_bwd_under_checkpoint", value),
                True,
            )

    def _blocks(self, model: Any, paths: dict[str, Any]) -> list[Any]:
        """Return the blocks that the setting names."""
        if not isinstance(self.setting, str):
            return repeated(model)[: self.setting if type(self.setting) is int else None]
        words = [] if self.setting == SQRT else words_of(self.setting)
        at_paths = {word: paths[word] for word in words if word in paths}
        missing = [word for word in words if "." in word and word not in paths]
        if at_paths and missing:
            self.refused(f"{type(model).__name__} has no {missing[0]}")
        blocks = [*named(model, words), *at_paths.values()]
        return list({id(block): block for block in blocks}.values())

    def _meter(self, path: str, block: Any) -> Meter | None:
        return None if self._meters is None else self._meters.setdefault(path, Meter(type(block).__name__))

    def _cut(self, model: Any) -> None:
        """Run long Sequentials piece by piece."""
        for owner in long_sequentials(model):
            if not isinstance(vars(owner).get("forward"), CheckpointedSegments):
                made = functools.partial(_repeatable, told=self.tell)
                self._stand(owner, CheckpointedSegments(owner, made, lambda: self.active), "sequence in pieces")

    def _stand(self, module: Any, forward: StandingForward, what: str) -> None:
        """Put a forward in the place of a module's."""
        TORCHSCRIPT.need(self)
        vars(module)["forward"] = forward
        self._standing.add(module)
        self.did(what)

    def over(self) -> None:
        """Leave modules as they were found."""
        for module in list(self._standing):
            if isinstance(standing := vars(module).get("forward"), StandingForward):
                standing.step_aside(module)
        self._standing.clear()
        TORCHSCRIPT.leave(self)

    def tell(self, reason: str) -> None:
        """Say once why blocks keep their activations after all."""
        if f"left alone: {reason}" not in self.acted:
            messages.tell(f"hasten: activation_checkpointing: activations are kept: {reason}")
            self.refused(reason)


def knows_statistics() -> bool:
    """Whether torch can leave a block's side effects out where compiled code runs it again."""
    import torch._dynamo.config as dynamo

    return hasattr(dynamo, "skip_fwd_side_effects_in_bwd_under_checkpoint")


def _repeatable(block: Any, told: Callable[[str], None], meter: Meter | None = None) -> Any:
    from hasten.techniques.recompute.forward import Repeatable

    kind = type(block).__name__

    def left_alone(reason: str) -> None:
        told(f"{kind}: {reason}")

    name = ActivationCheckpointing.name
    or_else = f', or name other blocks ({name} = "Block").'
    return Repeatable(name, left_alone, asked=lambda: None, or_else=or_else, meter=meter)


class Checkpointed(StandingForward):
    """A block's forward that is run again in the backward.

    Copies of the block are checkpointed too; a pickle holds the plain `forward`, and needs no hasten.
    """

    def __init__(self, block: Any, technique: ActivationCheckpointing, meter: Meter | None = None) -> None:
        self._block = weakref.ref(block)  # it holds this: a model that the script drops is freed at once, as without
        # When the model is compiled too: BatchNorm's statistics do not stand in the way, nor change twice. Others may,
        # and draws from Python's or NumPy's generators do, until a forward has shown that there are none.
        self._statistics = not knows_statistics() and _has_statistics(block)
        self.whole_when_compiled = self._statistics or _has_other_buffers(block)
        self.own = vars(block).get("forward")
        self.technique = technique
        self.repeatable = _repeatable(block, technique.tell, meter)

    @property
    def block(self) -> Any:
        """The block in whose `__dict__` this stands."""
        return self._block()

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward in whose place this stands: the class's as it is by now, which a script may replace."""
        return self.own or functools.partial(type(self.block).forward, self.block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, to be run again in the backward."""
        import torch
        from torch.utils.checkpoint import checkpoint

        if not self.technique.active or not self.block.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch._C._is_tracing():  # of torch.jit.trace: what it writes down may be saved
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
                # Compiled code broke off here, and what is inside is compiled by itself: another time in another way.
                self.technique.tell(f"{type(self.block).__name__}: the compiler does not take it as a whole")
                return self.forward(*args, **kwargs)
            output = self.repeatable.run(self.block, self.forward, args, kwargs)
            self.whole_when_compiled = self._statistics or not self.repeatable.is_pure
            return output
        if self.whole_when_compiled:
            return self.forward(*args, **kwargs)
        # The compiler cuts the graph itself, and keeps track of buffers.
        forward = functools.partial(self.forward, **kwargs) if kwargs else self.forward
        return checkpoint(forward, *args, use_reentrant=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = Checkpointed.__new__(Checkpointed)
        block = copy.deepcopy(self.block, memo)
        vars(twin).update(vars(self), _block=weakref.ref(block), own=copy.deepcopy(self.own, memo))
        twin.repeatable = _repeatable(block, self.technique.tell)
        return twin

    def __reduce__(self) -> Any:
        # When this is read back, the block's own __dict__ is still empty: the forward of its class is what it gets.
        return getattr, (self.block, "forward")


def _has_statistics(block: Any) -> bool:
    from torch.nn.modules.batchnorm import _NormBase

    return any(isinstance(module, _NormBase) and module.running_mean is not None for module in block.modules())


def _has_other_buffers(block: Any) -> bool:
    from torch.nn.modules.batchnorm import _NormBase

    return any(module._buffers and not isinstance(module, _NormBase) for module in block.modules())
