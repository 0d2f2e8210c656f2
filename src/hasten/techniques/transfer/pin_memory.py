"""Page-locked host memory, so that copies to the GPU overlap with computation."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, CudaOnly, Effect, Liveness, Refusal, Resource
from hasten.techniques.data.fork_safety import holds_on_device
from hasten.techniques.nested import tensors_in
from hasten.techniques.replaced import ReplacedFunction


class PinMemory(CudaOnly):
    """Let loaders return pinned batches, and copy those to the GPU without waiting.

    `.to(device)` and `.cuda()` become non-blocking for pinned tensors of a loader. Later work on the same stream still
    sees the whole copy, so the numbers stay the same. Memory that the script pinned itself, and may write to again, is
    still copied synchronously.
    """

    name = "pin_memory"
    effect = Effect.EXACT
    relieves = Resource.TRANSFER
    sources = ("Falcon, tip 2", "Lin, tip 2", "Kuhn, tip 2")
    acts_on = "a DataLoader"
    liveness = Liveness.PASS

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._loader_tensors: Any = None  # live tensors that loaders returned
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders that pin while this is on
        self._replaced: list[ReplacedFunction] = []

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it for loaders whose batches are copied to a GPU."""
        why = "batches are copied to the GPU from pageable memory, or the copy is waited for"
        return cls.refuse_without_copies(evidence) or Choices((True,), why)

    def process(self) -> None:
        """Make copies of the loaders' pinned tensors non-blocking."""
        import torch
        from torch.utils.weak import WeakTensorKeyDictionary

        if torch.cuda.is_available():
            self._loader_tensors = loader_tensors = WeakTensorKeyDictionary()
            for name in ("to", "cuda"):
                self._replaced.append(
                    ReplacedFunction(torch.Tensor, name, functools.partial(_not_waiting, loader_tensors=loader_tensors))
                )
                self._replaced[-1].put_in_place()

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """Remember the tensors that came from a pinning loader."""
        loader_tensors = self._loader_tensors
        if loader_tensors is None or not getattr(iterator, "_pin_memory", False):
            return fetch

        def remembered() -> Any:
            batch = fetch()
            for tensor in tensors_in(batch):
                loader_tensors[tensor] = True
            return batch

        return remembered

    def loader_options(self, options: dict[str, Any]) -> None:
        """Make the loader pin its batches."""
        import torch

        if self.switchable:
            return  # see `loader`
        if why := holds_on_device(options["dataset"]):  # only host memory can be pinned
            self.refused(f"the dataset {why}")
        elif torch.cuda.is_available() and not options["pin_memory"]:
            options["pin_memory"] = True
            self.did("loader")

    def loader(self, loader: Any) -> None:
        """If this may be switched: make passes that begin while it is on pin their batches.

        Persistent workers keep the setting that they were started with.
        """
        import torch

        if not self.switchable or not torch.cuda.is_available() or loader.pin_memory:
            return
        if why := holds_on_device(loader.dataset):
            self.refused(f"the dataset {why}")
            return
        self._loaders.add(loader)
        loader.pin_memory = self.active
        self.did("loader")

    def restore(self) -> None:
        """Restore torch's own `.to` and `.cuda`."""
        while self._replaced:
            self._replaced.pop().put_back()
        self._loader_tensors = None

    def on(self) -> None:
        """Pin in passes that begin from here on."""
        super().on()
        if self._loader_tensors is None:
            self.process()
        for loader in list(self._loaders):
            loader.pin_memory = True

    def off(self) -> None:
        """Stop pinning in passes that begin later."""
        super().off()
        for loader in list(self._loaders):
            loader.pin_memory = False


def _not_waiting(copy: Any, loader_tensors: Any) -> Any:
    """Wrap `Tensor.to` or `Tensor.cuda` not to wait where that is safe: from a loader's pinned tensor to a GPU."""
    import torch

    def copy_to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            tensor.device.type != "cpu"
            or "non_blocking" in kwargs
            or torch.compiler.is_compiling()
            or tensor not in loader_tensors
            or not tensor.is_pinned()
        ):
            return copy(tensor, *args, **kwargs)
        if copy_to.__name__ == "to" and not _to_cuda(args, kwargs):  # a copy to the host must be waited for
            return copy(tensor, *args, **kwargs)
        return copy(tensor, *args, **kwargs) if len(args) > 1 else copy(tensor, *args, non_blocking=True, **kwargs)

    return copy_to


def _to_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of `Tensor.to` name a CUDA device."""
    import torch

    target = kwargs.get("device", args[0] if args else None)
    if isinstance(target, torch.Tensor):
        return False
    return (isinstance(target, int) and not isinstance(target, bool)) or str(target).startswith("cuda")
