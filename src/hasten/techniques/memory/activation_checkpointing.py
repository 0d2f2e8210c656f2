"""Activations of repeated blocks computed again in the backward, not kept."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hasten import messages
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique
from hasten.techniques.memory.pieces import CheckpointedPieces, long_sequentials

SQRT = "sqrt"


class ActivationCheckpointing(Technique):
    """Keep only the inputs of a model's repeated blocks, and run each block's forward again in the backward.

    `true` takes the entries of `nn.ModuleList` and `nn.Sequential` that come at least twice and have layers inside,
    the outermost such ones; a number takes only so many of them, the first ones, whose activations are kept the
    longest; a string names their classes instead: "Block" or "EncoderLayer,DecoderLayer". "sqrt", and `true` where a
    model has no such blocks, cuts each `nn.Sequential` of n >= 4 entries into about sqrt(n) pieces instead. Saves
    memory and costs about a third more computation, in proportion to the blocks, so it pays where it makes room for a
    bigger batch.

    A block is run again exactly as it was: random states (Python's, NumPy's, torch's, and generators that the block
    keeps), autocast, parameters, buffers, attributes and what its code names of globals are put back, and what its
    forward notes on the side is noted once. Some numbers are compared: where others come out the backward ends in an
    error, never in a wrong gradient. A block that cannot be run again (it changes its inputs in place, has hooks of
    the script's inside, prints, writes or logs, goes on with an iterator, or uses torch.func) keeps its activations,
    and that is said. So does one that is called under hooks for saved tensors. Forwards in eval mode or without
    gradients are left alone. Compiled too, a block with spectral_norm sees its vectors one step further in the
    backward.
    """

    name = "activation_checkpointing"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("torch.utils.checkpoint", "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost")
    acts_on = "repeated blocks in a model"

    @classmethod
    def check(cls, setting: Setting) -> str:
        """`true`, "sqrt", how many blocks, or names of classes."""
        if type(setting) is int and setting >= 1:
            return ""
        if setting is True or (isinstance(setting, str) and all(name.isidentifier() for name in _names(setting))):
            return ""
        return 'must be true, "sqrt", a number of blocks, or names of classes ("Block,DecoderLayer")'

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Never by itself."""
        return Refusal("it saves memory and costs time: `hasten tune --memory SIZE` tries it")

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Wrap the forwards of blocks that are not wrapped yet."""
        self.prepare(model)

    def prepare(self, model: Any) -> None:
        """Wrap the blocks' forwards, so that the first step needs less memory already."""
        import torch

        if isinstance(model, torch.jit.ScriptModule):
            self.refused("a scripted model has no blocks to wrap")
            return
        import torch._dynamo.config as dynamo  # an optimizer's first step imports it anyway

        # When the model is compiled too: BatchNorm's statistics do not stand in the way, nor change twice.
        knows = hasattr(dynamo, "skip_fwd_side_effects_in_bwd_under_checkpoint")
        if knows:
            dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        blocks = self._blocks(model)
        for block in blocks:
            if not isinstance(vars(block).get("forward"), Checkpointed):
                whole = not knows and _has_statistics(block)
                vars(block)["forward"] = Checkpointed(block, whole_when_compiled=whole, told=self._tell)
                self.did("block")

        if self.setting == SQRT or (self.setting is True and not blocks):
            self._cut(model)

    def _blocks(self, model: Any) -> list[Any]:
        """Return the blocks that the setting names."""
        if isinstance(self.setting, str):
            return [] if self.setting == SQRT else named(model, _names(self.setting))
        return repeated(model)[: self.setting if type(self.setting) is int else None]

    def _cut(self, model: Any) -> None:
        """Run long Sequentials piece by piece."""
        for owner in long_sequentials(model):
            if not isinstance(vars(owner).get("forward"), CheckpointedPieces):
                vars(owner)["forward"] = CheckpointedPieces(owner, lambda piece: _repeatable(piece, self._tell))
                self.did("sequence in pieces")

    def _tell(self, reason: str) -> None:
        """Say once why blocks keep their activations after all."""
        if f"left alone: {reason}" not in self.acted:
            messages.tell(f"hasten: activation_checkpointing: activations are kept: {reason}")
            self.refused(reason)


def _names(setting: str) -> list[str]:
    return [name.strip() for name in setting.split(",")]


def repeated(model: Any) -> list[Any]:
    """The blocks that a model repeats: outermost entries of one class, with layers inside, in one container."""
    from torch.nn import ModuleList, Sequential

    if isinstance(model, ModuleList | Sequential):
        entries = list(model._modules.values())
        often = Counter(type(entry) for entry in entries if _worth_it(entry))
        blocks = {id(entry): entry for entry in entries if often[type(entry)] >= 2 and _worth_it(entry)}
    else:
        blocks = {}
    for child in model.children():
        if id(child) not in blocks:
            blocks |= {id(block): block for block in repeated(child)}
    return list(blocks.values())


def _worth_it(block: Any) -> bool:
    """Whether a block keeps more than its input: a single layer of torch does not."""
    single = type(block).__module__.startswith("torch.nn.") and not any(True for _ in block.children())
    return not single and any(True for _ in block.parameters())


def named(model: Any, names: list[str]) -> list[Any]:
    """The outermost modules inside a model whose class has one of these names."""
    blocks: dict[int, Any] = {}
    for child in model.children():
        found = [child] if type(child).__name__ in names else named(child, names)
        blocks |= {id(block): block for block in found}
    return list(blocks.values())


def _repeatable(block: Any, told: Callable[[str], None]) -> Any:
    from hasten.techniques.rerun.forward import Repeatable

    kind = type(block).__name__

    def left_alone(reason: str) -> None:
        told(f"{kind}: {reason}")

    name = ActivationCheckpointing.name
    return Repeatable(name, left_alone, asked=lambda: None, or_else=f', or name other blocks ({name} = "Block").')


class Checkpointed:
    """Stands in a block's `__dict__` as its `forward`, so the block stays the same object with the same names.

    Copies of the block are checkpointed too; a pickle holds the plain `forward`, and needs no hasten.
    """

    def __init__(self, block: Any, whole_when_compiled: bool, told: Callable[[str], None]) -> None:
        self.block = block
        self.whole_when_compiled = whole_when_compiled
        # Another one may stand there already: accelerate and peft replace forwards as well.
        self.forward = vars(block).get("forward") or functools.partial(type(block).forward, block)
        self.__wrapped__ = self.forward  # whose signature it is
        self.told = told
        self.repeatable = _repeatable(block, told)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, to be run again in the backward."""
        import torch
        from torch.utils.checkpoint import checkpoint

        if not self.block.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return self.repeatable.run(self.block, self.forward, args, kwargs)
        if self.whole_when_compiled:
            return self.forward(*args, **kwargs)
        # The compiler cuts the graph itself, and keeps track of buffers.
        forward = functools.partial(self.forward, **kwargs) if kwargs else self.forward
        return checkpoint(forward, *args, use_reentrant=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = Checkpointed(copy.deepcopy(self.block, memo), self.whole_when_compiled, self.told)
        twin.forward = twin.__wrapped__ = copy.deepcopy(self.forward, memo)
        return twin

    def __reduce__(self) -> Any:
        # When this is read back, the block's own __dict__ is still empty: the forward of its class is what it gets.
        return getattr, (self.block, "forward")


def _has_statistics(block: Any) -> bool:
    from torch.nn.modules.batchnorm import _NormBase

    return any(isinstance(module, _NormBase) and module.running_mean is not None for module in block.modules())
