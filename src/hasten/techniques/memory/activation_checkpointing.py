"""Activations of repeated blocks computed again in the backward, not kept."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from typing import Any

from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource, Technique


class ActivationCheckpointing(Technique):
    """Keep only the inputs of a model's repeated blocks, and run each block's forward again in the backward.

    `true` takes the entries of `nn.ModuleList` and `nn.Sequential` that come at least twice and have layers inside,
    the outermost such ones; a string names their classes instead: "Block" or "EncoderLayer,DecoderLayer". Saves
    memory and costs about a third more computation, so it pays where it makes room for a bigger batch.

    Random numbers, autocast and buffers (BatchNorm's statistics) are as they were in the first forward, so the
    numbers stay the same. Forwards in eval mode or without gradients are left alone. Hooks on layers inside a block
    run twice, and what a forward notes on the side is noted twice. A block that changes its input in place, or
    fills a cache that it was given, ends in torch's own error in the backward: name other blocks then. Compiled
    too, BatchNorm is still right, but a block with spectral_norm sees its vectors one step further in the backward.
    """

    name = "activation_checkpointing"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("torch.utils.checkpoint", "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost")
    acts_on = "repeated blocks in a model"

    @classmethod
    def check(cls, setting: Setting) -> str:
        """`true`, or names of classes."""
        if setting is True or (isinstance(setting, str) and all(name.isidentifier() for name in _names(setting))):
            return ""
        return 'must be true, or names of classes ("Block,DecoderLayer")'

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Never by itself."""
        return Refusal("it saves memory and costs time; put it into the plan by hand to make room for a bigger batch")

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
        blocks = repeated(model) if self.setting is True else named(model, _names(str(self.setting)))
        for block in blocks:
            if not isinstance(vars(block).get("forward"), Checkpointed):
                vars(block)["forward"] = Checkpointed(block, whole_when_compiled=not knows and _has_statistics(block))
                self.did("block")


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


class Checkpointed:
    """Stands in a block's `__dict__` as its `forward`, so the block stays the same object with the same names.

    Copies of the block are checkpointed too; a pickle holds the plain `forward`, and needs no hasten.
    """

    def __init__(self, block: Any, whole_when_compiled: bool) -> None:
        self.block = block
        self.whole_when_compiled = whole_when_compiled
        # Another one may stand there already: accelerate and peft replace forwards as well.
        self.forward = vars(block).get("forward") or functools.partial(type(block).forward, block)
        self.__wrapped__ = self.forward  # whose signature it is
        self.changing: list[Any] | None = None  # modules whose buffers change in a forward; None: not known yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, to be run again in the backward."""
        import torch
        from torch.utils.checkpoint import checkpoint

        if not self.block.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        forward = functools.partial(self.forward, **kwargs) if kwargs else self.forward
        if torch.compiler.is_compiling() and self.whole_when_compiled:
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler cuts the graph itself, and keeps track of buffers
            return checkpoint(forward, *args, use_reentrant=False)
        contexts = contextlib.nullcontext(), _AsItWas(self._with_buffers() if self.changing is None else self.changing)
        if self.changing is not None:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)
        before = {module: _versions(module) for module in self._with_buffers()}
        output = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)
        self.changing = [
            module for module, versions in before.items() if versions is None or versions != _versions(module)
        ]
        return output

    def _with_buffers(self) -> list[Any]:
        return [module for module in self.block.modules() if module._buffers]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = Checkpointed(copy.deepcopy(self.block, memo), self.whole_when_compiled)
        twin.forward = twin.__wrapped__ = copy.deepcopy(self.forward, memo)
        return twin

    def __reduce__(self) -> Any:
        # When this is read back, the block's own __dict__ is still empty: the forward of its class is what it gets.
        return getattr, (self.block, "forward")


def _has_statistics(block: Any) -> bool:
    return any(_versions(module) is None for module in block.modules())


def _versions(module: Any) -> list[tuple[int, int]] | None:
    """Which buffers a module has and how often they were changed; None where changes leave no trace."""
    from torch.nn.modules.batchnorm import _NormBase

    if isinstance(module, _NormBase) and module.running_mean is not None:
        return None
    return [(id(buffer), buffer._version) for buffer in module._buffers.values() if buffer is not None]


class _AsItWas:
    """Brings back, for the forward in the backward, the modules' buffers and the default dtype of now.

    May be entered several times, one after the other: `retain_graph=True` lets two backwards pass.
    """

    def __init__(self, modules: list[Any]) -> None:
        import torch

        self._dtype = torch.get_default_dtype()
        self._then = [
            (
                module._buffers,
                {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()},
            )
            for module in modules
        ]
        self._now: list[dict[str, Any]] = []
        self._dtype_now: Any = None

    def __enter__(self) -> None:
        import torch

        self._dtype_now = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        self._now = [dict(buffers) for buffers, _ in self._then]
        for buffers, then in self._then:
            buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in then.items()})

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_default_dtype(self._dtype_now)
        for (buffers, _then), now in zip(self._then, self._now, strict=True):
            buffers.update(now)
        self._now = []
