"""The technique `activation_checkpointing`: recompute repeated blocks in the backward instead of keeping activations.

`memory/blocks.py` chooses the blocks. The forward of each is replaced, in the instance's `__dict__`, by a
`Checkpointed` that runs the block through `recompute.forward.Repeatable`, which can repeat a forward exactly. Long
Sequentials are cut into pieces by `sequential_segments`. Under torch.compile, torch's own checkpoint takes over.
"""

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
from hasten.techniques.memory.standing_forward import TORCHSCRIPT, StandInForward
from hasten.techniques.recompute.costs import BlockCost, BlockMeter
from hasten.techniques.switches import Switches

SQRT = "sqrt"


class ActivationCheckpointing(Technique):
    """Keep only the inputs of a model's repeated blocks, and run each block's forward again in the backward.

    `true` takes the entries of `nn.ModuleList` and `nn.Sequential` whose class occurs at least twice and has layers
    inside, the outermost ones; a number takes only that many, the first ones, whose activations are kept the longest; a
    string names their classes ("Block" or "EncoderLayer,DecoderLayer") or their paths in the model
    ("blocks.0-5,blocks.9"). "sqrt", and `true` if a model has no such blocks, cuts each `nn.Sequential` of n >= 4
    entries into about sqrt(n) pieces instead. It saves memory and costs about a third more computation, in proportion
    to the blocks, so it pays where it makes room for a bigger batch. `hasten tune --memory SIZE` measures how long each
    block takes to recompute and how many bytes that saves, and names the blocks that fit the size at the least time.

    A block is repeated exactly: random states (Python's, NumPy's, torch's, and generators that the block holds),
    autocast, parameters, buffers, attributes and the globals that its code names are restored, and the side effects of
    its forward happen once. Some numbers are compared: if they differ, the backward ends in an error, never in a wrong
    gradient. A block that cannot be repeated (it changes its inputs in place, contains hooks of the script, prints,
    writes or logs, advances an iterator, or uses torch.func) keeps its activations, and the user is told. So does a
    block that is called under saved-tensor hooks. Forwards in eval mode or without gradients are left alone. If the
    model is compiled as well, blocks that draw random numbers from Python or NumPy, or change buffers other than
    BatchNorm's, keep their activations.
    """

    name = "activation_checkpointing"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("torch.utils.checkpoint", "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost")
    acts_on = "repeated blocks in a model"
    liveness = Liveness.STEP  # replaced forwards test `active` at each call; graphs made before a switch stay valid

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._switches = Switches()
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()  # to be wrapped by `on`
        self._standing: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose forwards were replaced
        self._meters: dict[str, BlockMeter] | None = None

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Return what is wrong with a setting: true, "sqrt", a number of blocks, or names of classes and paths."""
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
        """Propose nothing: it saves memory and costs time."""
        return Refusal("it saves memory and costs time: `hasten tune --memory SIZE` tries it")

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Wrap the forwards of blocks that are not wrapped yet, such as blocks added after `prepare`."""
        self.prepare(model)

    def prepare(self, model: Any) -> None:
        """Wrap the blocks' forwards, so that the first step needs less memory already."""
        if self.active:
            self._wrap(model)
        else:
            self._models.add(model)

    def on(self) -> None:
        """Wrap the models known so far. Blocks that are wrapped already test `active` themselves."""
        super().on()
        self._let_statistics_be()
        for model in list(self._models):
            self._wrap(model)
        self._models.clear()

    def off(self) -> None:
        """Run forwards plainly; the wrappers stay."""
        super().off()
        self._switches.put_back()

    def measure(self) -> None:
        """Measure what each block saves and costs, from the first forward on. Call it before models are wrapped."""
        self._meters = {}

    def measured(self) -> list[BlockCost]:
        """Return what the blocks save and cost, in the order of the model; [] if `measure` was not called."""
        costs = [meter.cost(path) for path, meter in (self._meters or {}).items()]
        return [cost for cost in costs if cost is not None]

    def _wrap(self, model: Any) -> None:
        """Replace the forwards of a model's blocks, or of its long Sequentials."""
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
        """Make compiled blocks update BatchNorm's statistics only once, if this version of torch can."""
        import torch._dynamo.config as dynamo  # costs nothing extra: an optimizer's first step imports it anyway

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

    def _meter(self, path: str, block: Any) -> BlockMeter | None:
        return None if self._meters is None else self._meters.setdefault(path, BlockMeter(type(block).__name__))

    def _cut(self, model: Any) -> None:
        """Replace the forwards of long Sequentials, to run piece by piece."""
        for owner in long_sequentials(model):
            if not isinstance(vars(owner).get("forward"), CheckpointedSegments):
                make_repeatable = functools.partial(_repeatable, told=self.tell)
                segments = CheckpointedSegments(owner, make_repeatable, lambda: self.active)
                self._stand(owner, segments, "sequence in pieces")

    def _stand(self, module: Any, forward: StandInForward, what: str) -> None:
        """Replace a module's forward by a stand-in."""
        TORCHSCRIPT.need(self)
        vars(module)["forward"] = forward
        self._standing.add(module)
        self.did(what)

    def teardown(self) -> None:
        """Restore the modules' own forwards."""
        for module in list(self._standing):
            if isinstance(standing := vars(module).get("forward"), StandInForward):
                standing.step_aside(module)
        self._standing.clear()
        TORCHSCRIPT.leave(self)

    def tell(self, reason: str) -> None:
        """Tell the user, once per reason, why blocks keep their activations."""
        if f"left alone: {reason}" not in self.acted:
            messages.tell(f"hasten: activation_checkpointing: activations are kept: {reason}")
            self.refused(reason)


def knows_statistics() -> bool:
    """Return whether this version of torch can omit a block's side effects when compiled code repeats it."""
    import torch._dynamo.config as dynamo

    return hasattr(dynamo, "skip_fwd_side_effects_in_bwd_under_checkpoint")


def _repeatable(block: Any, told: Callable[[str], None], meter: BlockMeter | None = None) -> Any:
    """Return a `Repeatable` for a block; `told` is called with the reason when it keeps its activations."""
    from hasten.techniques.recompute.forward import Repeatable

    kind = type(block).__name__

    def left_alone(reason: str) -> None:
        told(f"{kind}: {reason}")

    name = ActivationCheckpointing.name
    or_else = f', or name other blocks ({name} = "Block").'
    return Repeatable(name, left_alone, on_backward=lambda: None, or_else=or_else, meter=meter)


class Checkpointed(StandInForward):
    """Stand-in for a block's `forward`, stored in the block's `__dict__`: the block stays the same object.

    Copies of the block are checkpointed too; a pickle contains the plain `forward`, and can be read without hasten.
    """

    def __init__(self, block: Any, technique: ActivationCheckpointing, meter: BlockMeter | None = None) -> None:
        # A weak reference, since the block refers to this object: a model that the script drops is freed at once, as
        # without the technique, and not only by the garbage collector.
        self._block = weakref.ref(block)
        # Whether the block keeps its activations when the model is compiled too. BatchNorm's statistics are no reason
        # if torch can leave them out of the repetition. Other buffers are one, until an uncompiled forward has shown
        # that the block changes none and draws nothing from Python's or NumPy's generators: see `__call__`.
        self._statistics = not knows_statistics() and _has_statistics(block)
        self.whole_when_compiled = self._statistics or _has_other_buffers(block)
        # Accelerate and peft replace forwards in the same way: call theirs rather than the class's.
        self.own = vars(block).get("forward")
        self.technique = technique
        self.repeatable = _repeatable(block, technique.tell, meter)

    @property
    def block(self) -> Any:
        """The block whose forward this replaces."""
        return self._block()

    @property
    def forward(self) -> Callable[..., Any]:
        """The replaced forward. The class's is looked up at each call, since a script may replace it."""
        return self.own or functools.partial(type(self.block).forward, self.block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward, and let the backward run it again."""
        import torch
        from torch.utils.checkpoint import checkpoint

        if not self.technique.active or not self.block.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch._C._is_tracing():  # torch.jit.trace: the traced graph may be saved
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
                # Dynamo is active but not tracing this call: a graph break. It would compile the functions inside the
                # block one by one, and in the repetition maybe differently than in the forward.
                self.technique.tell(f"{type(self.block).__name__}: the compiler does not take it as a whole")
                return self.forward(*args, **kwargs)
            output = self.repeatable.run(self.block, self.forward, args, kwargs)
            self.whole_when_compiled = self._statistics or not self.repeatable.is_pure
            return output
        if self.whole_when_compiled:
            return self.forward(*args, **kwargs)
        # Traced as a part of a compiled graph: the compiler implements torch's checkpoint itself, random states and
        # buffers included.
        forward = functools.partial(self.forward, **kwargs) if kwargs else self.forward
        return checkpoint(forward, *args, use_reentrant=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = Checkpointed.__new__(Checkpointed)
        block = copy.deepcopy(self.block, memo)
        vars(twin).update(vars(self), _block=weakref.ref(block), own=copy.deepcopy(self.own, memo))
        twin.repeatable = _repeatable(block, self.technique.tell)
        return twin

    def __reduce__(self) -> Any:
        # When a pickle is loaded, the block's `__dict__` is still empty at this point, so `getattr` finds the forward
        # of its class.
        return getattr, (self.block, "forward")


def _has_statistics(block: Any) -> bool:
    """Return whether a block contains normalization layers with running statistics."""
    from torch.nn.modules.batchnorm import _NormBase

    return any(isinstance(module, _NormBase) and module.running_mean is not None for module in block.modules())


def _has_other_buffers(block: Any) -> bool:
    """Return whether a block contains buffers other than running statistics."""
    from torch.nn.modules.batchnorm import _NormBase

    return any(module._buffers and not isinstance(module, _NormBase) for module in block.modules())
