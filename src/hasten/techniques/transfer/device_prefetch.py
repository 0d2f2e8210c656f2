"""Copy the next batch to the GPU while the current one is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Choices, CudaOnly, Effect, Liveness, Refusal, Resource
from hasten.techniques.nested import tensors_in
from hasten.techniques.replaced import ReplacedFunction


class DevicePrefetch(CudaOnly):
    """Start the copy of a batch to the GPU on its own stream, as soon as the batch exists.

    The script still gets the CPU batch that it expects; when it then calls `.to(device)`, it gets the finished copy. A
    tensor that was changed in between, or is requested in another dtype or on another device, is copied as usual.
    Loaders whose sampler may depend on the training are left alone.
    """

    name = "device_prefetch"
    effect = Effect.EXACT
    relieves = Resource.TRANSFER
    sources = ("NVIDIA data prefetcher (apex imagenet example)", "Lightning #4803")
    acts_on = "a DataLoader"
    liveness = Liveness.PASS  # a pass that has taken a batch early must hand it out

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._copies: Any = None  # pinned CPU tensor -> its copy; by identity, dropped with the tensor
        self._stream: Any = None
        self._replaced: list[ReplacedFunction] = []

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose it if batches are copied to a GPU."""
        why = "each batch's copy to the GPU can run beside the step before it"
        return cls.refuse_without_copies(evidence) or Choices((True,), why)

    def process(self) -> None:
        """Make `.to` and `.cuda` return finished copies."""
        import torch

        if torch.cuda.is_available():
            from torch.utils.weak import WeakTensorKeyDictionary

            self._copies = WeakTensorKeyDictionary()
            self._stream = torch.cuda.Stream()
            for name in ("to", "cuda"):
                self._replaced.append(ReplacedFunction(torch.Tensor, name, self._handing_out))
                self._replaced[-1].put_in_place()

    def restore(self) -> None:
        """Restore torch's own `.to` and `.cuda`."""
        while self._replaced:
            self._replaced.pop().put_back()
        self._stream = None

    def on(self) -> None:
        """Take batches early in passes that begin from here on."""
        super().on()
        if self._stream is None:
            self.process()

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """Take each batch from the workers one step early, and start its copy.

        Without workers nothing is changed: the batch would be made early too, and its random numbers drawn before the
        model's.
        """
        if self._stream is None or not getattr(iterator, "_num_workers", 0):
            return fetch
        if why := _order_depends(iterator):
            self.refused(why)
            return fetch
        ahead: list[Any] = []

        def take() -> tuple[Any, Exception | None]:
            try:
                return self._start_copies(fetch()), None
            except Exception as error:  # the pass's end or a sample's error: raised when its batch is requested
                return None, error

        def one_early() -> Any:
            batch, error = ahead.pop() if ahead else take()
            if isinstance(error, StopIteration):
                ahead.append((None, error))
                raise StopIteration
            ahead.append(take())
            if error is not None:
                raise error
            return batch

        return one_early

    def _start_copies(self, batch: Any) -> Any:
        import torch

        with torch.cuda.stream(self._stream):
            for part in tensors_in(batch):
                if part.device.type == "cpu" and part.is_pinned():
                    copy = part.to(torch.device("cuda"), non_blocking=True)
                    self._copies[part] = (copy, part._version, self._stream.record_event())
        if not self.acted:
            self.did("loader")
        return batch

    def _handing_out(self, copy_to: Any) -> Any:
        import torch

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu" and not torch.compiler.is_compiling() and tensor in self._copies:
                copy, version, event = self._copies[tensor]
                if version == tensor._version and _wants(copy, to.__name__, args, kwargs):
                    del self._copies[tensor]  # handed out once: every `.to` must return a new tensor
                    stream = torch.cuda.current_stream()
                    stream.wait_event(event)
                    copy.record_stream(stream)
                    return copy
            return copy_to(tensor, *args, **kwargs)

        return to


def _order_depends(iterator: Any) -> str:
    """Return why no batch may be taken early; "" if it may.

    Taking one early asks the sampler for the next indices before the training step, on which they may depend.
    """
    from hasten.data.sampler_order import why_not

    order = getattr(iterator, "_index_sampler", None)
    if order is None or _is_iterable(iterator):
        return ""
    return why_not(getattr(order, "hasten_whole", order))  # in a trial, the sampler is wrapped to cut the pass short


def _is_iterable(iterator: Any) -> bool:
    """Return whether its dataset is an IterableDataset, which decides the order itself."""
    from torch.utils.data.dataloader import _DatasetKind

    return bool(iterator._dataset_kind == _DatasetKind.Iterable)


def _wants(copy: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `.to` or `.cuda` with these arguments would give exactly this copy."""
    import torch

    if set(kwargs) - {"device", "non_blocking"} or len(args) > 1:
        return False
    target = kwargs.get("device", args[0] if args else None)
    if target is None:
        return method == "cuda" and bool(copy.device.index == torch.cuda.current_device())
    if not isinstance(target, str | int | torch.device):
        return False
    device = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    named: Any = device.index  # None for plain "cuda", though torch's stubs say int
    index = torch.cuda.current_device() if named is None else named
    return device.type == "cuda" and bool(index == copy.device.index)
