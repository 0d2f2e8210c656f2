"""Mixed precision: matrix work in 16 bits, parameters and sums in 32."""

from __future__ import annotations

import types
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

        def guarded(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self._scaler is None or self._scaler.may_step():
                return step(this, *args, **kwargs)
            return None

        optimizer.step = types.MethodType(guarded, optimizer)

    def backward(self, call: Call) -> Call:
        """With fp16: scale the loss, unscale the gradients."""
        if self.setting != "16-mixed":
            return call
        self._scaler = _Scaler(call)
        return self._scaler.backward


def device_to_cast(module: Any, torch: Any) -> str:
    """Where a module computes in float32: "cpu", "cuda", or "" when it is of another dtype."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.dtype is not torch.float32:
        return ""
    return str(parameter.device.type)


class _Scaler:
    """Dynamic loss scaling around `backward`, invisible to what comes after it.

    Gradients are brought back to their true size right after each backward, so clipping and logging see what
    they expect. The scale is a power of two, which makes the way there and back exact.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self.scale = 2.0**15
        self._clean_steps = 0
        self._overflow: Any = None

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.autograd.backward` on the scaled loss."""
        import torch

        single = isinstance(tensors, torch.Tensor)
        roots = [tensors] if single else list(tensors)
        leaves = _leaves(roots)
        before = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if before:  # accumulated so far: scaled along, so that one division serves the sum
            torch._foreach_mul_(before, self.scale)
        scaled = [root * self.scale for root in roots]
        self._call(scaled[0] if single else scaled, *args, **kwargs)
        after = [leaf.grad for leaf in leaves if leaf.grad is not None]
        overflow = torch.zeros(1, device=roots[0].device)
        inverse = torch.full((1,), 1.0 / self.scale, device=roots[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(after, overflow, inverse)
        self._overflow = overflow if self._overflow is None else self._overflow + overflow

    def may_step(self) -> bool:
        """Whether the gradients are finite; adapts the scale. Reads one number from the device, as GradScaler does."""
        overflowed = self._overflow is not None and bool(self._overflow.item())
        self._overflow = None
        self._clean_steps = 0 if overflowed else self._clean_steps + 1
        if overflowed:
            self.scale = max(1.0, self.scale / 2)
        elif self._clean_steps >= 2000:
            self.scale, self._clean_steps = min(self.scale * 2, 2.0**24), 0
        return not overflowed


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
