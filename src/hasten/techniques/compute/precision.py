"""Mixed precision: matrix work in 16 bits, parameters and sums in 32."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterator
from typing import Any

from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques.base import Call, Choices, Effect, Refusal, Resource, Technique

_TENSOR_WORK = frozenset(
    [
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose1d",
        "ConvTranspose2d",
        "Linear",
        "Bilinear",
        "LSTM",
        "GRU",
        "RNN",
        "LSTMCell",
        "GRUCell",
        "MultiheadAttention",
        "NonDynamicallyQuantizableLinear",
        "Conv1D",
    ]
)


class Precision(Technique):
    """Run the forward of outermost modules under autocast; hand their outputs back in float32.

    "bf16-mixed" needs nothing else. "16-mixed" scales the loss so that small gradients survive fp16, unscales
    them before anyone sees them, and skips a step whose gradients overflowed.
    """

    name = "precision"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("Falcon, tip 6", "Wolf", "Lin, tip 8", "Kuhn, tip 5")
    values = ("bf16-mixed", "16-mixed")
    acts_on = "a model"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._scaler: _Scaler | None = None

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """On a CPU without bf16 instructions it computes, but slower."""
        if machine.device == "cuda" or (
            {"avx512_bf16", "amx_bf16"} & set(machine.cpu_flags) and setting == "bf16-mixed"
        ):
            return ""
        return "this CPU has no instructions for it; it will be slower than float32"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """bf16 where the hardware has it, else fp16 on a GPU."""
        models = [model for model in evidence.models if model.train_calls or model.backward_through_eval]
        if not models:
            return Refusal("no module's forward was seen in training")
        if autocast := next((model.autocast for model in models if model.autocast), ""):
            return Refusal(f"the script runs under autocast ({autocast}) already")
        if all(model.dtype in ("bfloat16", "float16", "float64") for model in models):
            return Refusal(f"the model is in {models[0].dtype}")
        if not any(layer in model.layers for model in models for layer in _TENSOR_WORK):
            return Refusal("no layer that has a 16-bit kernel (convolution, linear, recurrent)")
        on_gpu = any(model.device == "cuda" for model in models)
        if evidence.flags.grad_scaler:
            return Refusal("the script scales its gradients itself")
        if on_gpu:
            setting = "bf16-mixed" if evidence.flags.bf16 else "16-mixed"
            return Choices((setting,), "float32 on hardware that is several times faster in 16 bits")
        if reason := cls.useless("bf16-mixed", evidence.machine):
            return Refusal(reason)
        return Choices(("bf16-mixed",), "float32 on a CPU that has bf16 instructions")

    def forward(self, call: Call) -> Call:
        """Autocast around the forward, float32 behind it."""
        import torch
        from torch.utils._pytree import tree_map

        dtype = torch.bfloat16 if self.setting == "bf16-mixed" else torch.float16
        kinds: dict[int, str] = {}
        contexts = {
            kind: torch.autocast(kind, dtype) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()
        }

        def widen(part: Any) -> Any:
            return part.float() if isinstance(part, torch.Tensor) and part.dtype is dtype else part

        def mixed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kind = kinds.get(id(module))
            if kind is None:
                kind = kinds[id(module)] = device_to_cast(module, torch)
                if kind:
                    self.did("model")
            if kind not in contexts:
                return call(module, args, kwargs)
            with contexts[kind]:
                output = call(module, args, kwargs)
            return widen(output) if isinstance(output, torch.Tensor) else tree_map(widen, output)

        return mixed

    def optimizer(self, optimizer: Any) -> None:
        """With fp16: skip a step that overflowed."""
        if self.setting != "16-mixed":
            return
        step = type(optimizer).step
        if self._scaler is not None:
            self._scaler.joined(optimizer)

        def guarded(this: Any, *args: Any, **kwargs: Any) -> Any:
            scaler = self._scaler
            if scaler is None:
                return step(this, *args, **kwargs)
            if (args[0] if args else kwargs.get("closure")) is not None:
                # The optimizer calls backward itself, when it is too late to skip: nothing may overflow then.
                with scaler.resting():
                    return step(this, *args, **kwargs)
            return step(this, *args, **kwargs) if scaler.may_step(this) else None

        optimizer.step = types.MethodType(guarded, optimizer)

    def backward(self, call: Call) -> Call:
        """With fp16: scale the loss, unscale the gradients."""
        if self.setting != "16-mixed":
            return call
        scaler = self._scaler = _Scaler(call)

        def scaled(tensors: Any, *args: Any, **kwargs: Any) -> None:
            scaler.backward(tensors, *args, **kwargs)

        return scaled


def device_to_cast(module: Any, torch: Any) -> str:
    """Where a module computes in float32: "cpu", "cuda", or "" when it is of another dtype."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.dtype is not torch.float32:
        return ""
    return str(parameter.device.type)


class _Scaler:
    """Dynamic loss scaling around `backward`, invisible to what comes after it.

    Gradients are brought back to their true size right after each backward, so clipping and logging see what
    they expect. The scale is a power of two, which makes the way there and back exact. Where a parameter has
    hooks, which would see scaled gradients, nothing is scaled.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.scale = 2.0**15
        self._clean_steps = 0
        self._overflows: Any = None  # on the device: backwards so far that overflowed
        self._adapted = 0  # how many of them have made the scale smaller
        self._answered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._rests = False

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Scale nothing meanwhile."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """`torch.autograd.backward` on the scaled loss."""
        import torch

        single = isinstance(tensors, torch.Tensor)
        roots = [tensors] if single else list(tensors)
        leaves = _leaves(roots)
        if self._rests or any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves):
            self._call(tensors, *args, **kwargs)
            return
        before = _gradients(leaves)
        if before:  # accumulated so far: scaled along, so that one division serves the sum
            torch._foreach_mul_(before, self.scale)
        scaled = [root * self.scale for root in roots]
        self._call(scaled[0] if single else scaled, *args, **kwargs)
        by_device: dict[Any, list[Any]] = {}
        for gradient in _gradients(leaves):
            by_device.setdefault(gradient.device, []).append(gradient)
        for device, gradients in by_device.items():
            overflow = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1.0 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
            self._overflows = overflow if self._overflows is None else self._overflows + overflow.to(self._overflows)

    def joined(self, optimizer: Any) -> None:
        """An optimizer was built: overflows before that are none of its own."""
        self._answered[optimizer] = self._adapted

    def may_step(self, optimizer: Any) -> bool:
        """Whether no backward overflowed since this optimizer last asked; adapts the scale.

        Reads one number from the device, as GradScaler does.
        """
        overflows = 0 if self._overflows is None else int(self._overflows.item())
        if overflows > self._adapted:
            self._adapted, self._clean_steps = overflows, 0
            self.scale = max(1.0, self.scale / 2)
        else:
            self._clean_steps += 1
            if self._clean_steps >= 2000:
                self.scale, self._clean_steps = min(self.scale * 2, 2.0**24), 0
        fine = overflows == self._answered.get(optimizer, 0)
        self._answered[optimizer] = overflows
        return fine


def _gradients(leaves: list[Any]) -> list[Any]:
    """The leaves' gradients; of sparse ones the values."""
    present = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in present]


def _leaves(roots: list[Any]) -> list[Any]:
    """The leaf tensors that a backward from `roots` accumulates into."""
    found: dict[int, Any] = {}
    seen, queue = set(), [root.grad_fn for root in roots if root.grad_fn is not None]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        queue += [following for following, _ in node.next_functions]
    return list(found.values())
