"""Computing in 16 bits: matrix work alone (mixed), or the whole model (true)."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Mapping
from typing import Any

from hasten import messages
from hasten.errors import HastenError
from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques import gradient_access
from hasten.techniques.base import Call, Choices, Effect, Liveness, Refusal, Resource, Technique
from hasten.techniques.compute.loss_scaling import LossScaler
from hasten.techniques.compute.narrow_kernels import missing_kernel
from hasten.techniques.compute.scaled_steps import guard
from hasten.techniques.compute.true_precision import convert, in_dtype, new_tensors_in
from hasten.techniques.float32_draws import Float32Draws
from hasten.techniques.nested import map_tensors, tensors_in

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


# What torch's and NumPy's errors say where tensors are of a type that they do not take, or of two.
_OF_TYPES = re.compile("dtype|(scalar|data) ?type|ScalarType|Half|[fF]loat16|a primitive|not implemented for")

_TRUE = {"bf16-true": "bfloat16", "16-true": "float16", "64-true": "float64"}


class Precision(Technique):
    """Compute in another floating-point type than float32.

    "bf16-mixed" and "16-mixed" run the forward of outermost modules (under the Trainer the whole step, loss included)
    under autocast, and hand outputs back in float32; parameters stay float32, and random numbers those of float32.
    "bf16-mixed" needs nothing else. "16-mixed" scales the loss so that small gradients survive fp16, unscales them
    right after the backward, and skips a step whose gradients overflowed, which it says. Buffers that overflowed
    (BatchNorm's statistics) get their values from before the step. It goes back to float32, with the reason, where
    something sees gradients inside the backward (hooks, `retain_grad`, autograd functions of the script) or takes them
    in a way of its own (`torch.autograd.grad`, a GradScaler, an optimizer that differentiates more than once a step),
    where tensors get gradients that no optimizer of torch's steps, and where numbers overflow with no scale at all.
    Whoever reads `.grad` between an overflow and its step finds zeros in place of what is not finite (a clip's norm is
    that of the rest); where it is the script itself, which may keep what it reads, that is once, and it is float32 from
    there on. A forward that cannot take 16 bits (it writes into float32 by an index, or asks for a NumPy array) ends in
    torch's error, with a note, and later ones are in float32.

    "bf16-true", "16-true" and "64-true" are for the Trainer: they convert the model itself, cast floating-point
    inputs, and let tensors made in the forward be of that type too; outputs stay in it, and random numbers are those of
    float32. A script's model is left as it is, since what the script holds of it (an average, weights that processes
    share, files) would not follow. tune does not try them.
    """

    name = "precision"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("Falcon, tip 6", "Wolf", "Lin, tip 8", "Kuhn, tip 5")
    values = ("bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
    acts_on = "a model"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._scaler = LossScaler(self.gave_up, self._dropped) if setting == "16-mixed" else None
        self._converted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._wides: list[Float32Draws] = []
        self._stop_reason = ""  # why no forward is cast any more
        self._scripts_own = False  # whether the script was seen under its own autocast, whose draws are in 16 bits

    @property
    def drops_overflows(self) -> bool:
        """Whether steps whose gradients are not finite are dropped here: in fp16, until something speaks against it."""
        return self._scaler is not None and not self._scaler.stop_reason

    @classmethod
    def liveness_of(cls, setting: Setting) -> Liveness:
        """The mixed ones at any step; a model that was converted has lost what float32 held beyond 16 bits."""
        return Liveness.PROCESS if setting in _TRUE else Liveness.STEP

    @classmethod
    def roundoff(cls, setting: Setting) -> float:
        """Return the rounding error of bf16, fp16 or float32 (float64 rounds less than the script does)."""
        return {"bf16": 2.0**-8, "16": 2.0**-10}.get(str(setting).partition("-")[0], 2.0**-23)

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """On a CPU without bf16 instructions it computes, but slower."""
        if setting == "64-true":
            return "float64 is slower than float32, never faster"
        bf16 = {"avx512_bf16", "amx_bf16"} & set(machine.cpu_flags) and setting in ("bf16-mixed", "bf16-true")
        if machine.device == "cuda" or bf16:
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

    def process(self) -> None:
        """With fp16: notice who looks at gradients inside the backward, or differentiates by itself."""
        if self._scaler is not None:
            gradient_access.watch(self, Precision._looked)
            gradient_access.watch_own_ways(self, Precision._leave)
            self._scaler.reads.watch()

    def restore(self) -> None:
        """Notice nothing more."""
        gradient_access.leave(self)
        if self._scaler is not None:
            self._scaler.reads.leave()

    def teardown(self) -> None:
        """Put torch's own ways to draw random numbers back."""
        while self._wides:
            self._wides.pop().leave()

    def on(self) -> None:
        """Cast from the next forward on; the scale is the one it was switched off with."""
        super().on()
        if stop_reason := self._stop_reason or (self._scaler is not None and self._scaler.stop_reason):
            raise HastenError(stop_reason)
        if self._scaler is not None:
            self.process()
            self._scaler.resume()

    def off(self) -> None:
        """Cast and scale no more."""
        super().off()
        if self._scaler is not None:
            self._scaler.paused = True

    def _looked(self, who: str) -> None:
        self._leave(f"{who} sees gradients inside the backward")

    def _leave(self, why: str) -> None:
        if self._scaler is not None and self.active:
            self._scaler.leave(why)

    def prepare(self, model: Any) -> None:
        """With "bf16-true", "16-true" and "64-true": make floating-point parameters and buffers of that type.

        In place: the parameters stay the same objects. Does nothing with the mixed settings, nor a second time.

        Raises:
            HastenError: Something outside of the model shares its memory.
        """
        dtype = self._true_dtype()
        if dtype is None:
            return
        convert(model, dtype)
        if model not in self._converted:
            self._converted.update(model.modules())
            self.did("model")

    def _true_dtype(self) -> Any:
        """The type that the model is converted to, or None."""
        import torch

        name = _TRUE.get(str(self.setting))
        return getattr(torch, name) if name else None

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """A script's model is not converted: what the script holds of it, an average or a saved file, would not be."""
        if self._converted:  # the Trainer's: a part of it that was added later
            self.prepare(model)
        elif self.setting in _TRUE:
            kind = _TRUE[str(self.setting)]
            self.gave_up(
                f'"{self.setting}" is for the Trainer: a script\'s own averages, shared weights and files would not '
                f"follow its model into {kind}; call model.to(torch.{kind}) in the script"
            )

    def forward(self, call: Call) -> Call:
        """The forward under autocast, or in the model's own type."""
        dtype = self._true_dtype()
        if dtype is None:
            return self._mixed(call)
        in_its_type = in_dtype(call, dtype)
        wide = self._wide()

        def as_prepared(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module not in self._converted:
                return call(module, args, kwargs)
            with wide:
                return in_its_type(module, args, kwargs)

        return as_prepared

    def _mixed(self, call: Call) -> Call:
        """Autocast around the forward, float32 behind it."""
        import torch

        dtype = torch.bfloat16 if self.setting == "bf16-mixed" else torch.float16
        kinds: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # Without autocast's cache of cast weights: it hides a step of the optimizer within a training step, and weights
        # first used under no_grad would get no gradient.
        scaler = self._scaler
        contexts = {
            kind: torch.autocast(kind, dtype, cache_enabled=False)
            for kind in ("cpu", "cuda")
            if kind == "cpu" or torch.cuda.is_available()
        }

        def widen(part: Any) -> Any:
            return part.float() if part.dtype is dtype else part

        wide = self._wide()
        enabled, grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled

        def mixed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kind = kinds.get(module)
            if kind is None:
                kind = device_to_cast(module, torch)
                if kind == "meta":  # a stage of a pipeline without parameters of its own: where its batches are
                    kind = _first_device(args) or kind
                if kind == "cpu" and (why := missing_kernel(module, dtype)):
                    self.refused(why)
                    kind = ""
                kinds[module] = kind
                if kind:
                    self.did("model")
            if kind not in contexts or self._stop_reason or (scaler is not None and scaler.stop_reason):
                return call(module, args, kwargs)
            if enabled(kind):  # the script's own: its outputs and draws are in 16 bits already
                self._under_autocast(kind)
                return call(module, args, kwargs)
            if scaler is not None and module.training:
                scaler.buffers.before_forward(module)
            try:
                with contexts[kind], wide:
                    output = call(module, args, kwargs)
            except (RuntimeError, TypeError) as error:
                self._not_taken(error, str(dtype).removeprefix("torch."))
                raise
            output = map_tensors(widen, output, in_place=True)  # the model may keep what holds them
            if scaler is not None and module.training:
                if not grad_enabled():
                    self._look_at_buffers(scaler)
                elif scaler.looked_for():
                    self._look_at(output, scaler)
            return output

        return mixed

    def optimizer(self, optimizer: Any) -> None:
        """With fp16: skip a step that overflowed."""
        if self._scaler is not None:
            self._scaler.paused = not self.active
            guard(optimizer, self._scaler, self._may_step)

    def _not_taken(self, error: Exception, dtype: str) -> None:
        """A forward under autocast ended in an error: where it may be autocast's, cast no more and say so.

        It is not run again in float32: what it has drawn, counted and changed until then stays. A script that goes on
        behind errors has lost this step alone.
        """
        if not _OF_TYPES.search(str(error)):
            return
        error.add_note(
            f'hasten: precision = "{self.setting}" ran this forward under autocast, where layers give {dtype}, which '
            "may not have been taken. Take precision out of the plan, or cast in the forward (`.float()`)"
        )
        self._stop_reason = f"a forward ended in an error with tensors in {dtype}"
        self.failed(self._stop_reason)
        if self._scaler is None:
            self.gave_up(self._stop_reason)
        else:
            self._leave(self._stop_reason)

    def _look_at(self, output: Any, scaler: LossScaler) -> None:
        """Training forwards that no backward follows: a script may leave out steps whose loss is not finite."""
        if not all(bool(tensor.isfinite().all()) for tensor in tensors_in(output)):
            scaler.buffers.restore()
            self._leave("numbers overflow in fp16 in the forward, and no backward follows")

    def _look_at_buffers(self, scaler: LossScaler) -> None:
        """Training forwards without a graph, which a script may run to renew BatchNorm's statistics."""
        if scaler.buffers.restore():
            self._leave("numbers overflow in fp16 in a forward without gradients, and the model keeps statistics of it")

    def _under_autocast(self, kind: str) -> None:
        self._scripts_own = True
        self._leave("the script runs under autocast itself")
        self.refused(f"the script runs under autocast itself ({kind})")

    def _may_step(self, optimizer: Any) -> bool:
        if self._scaler is None or self._scaler.paused or self._scaler.may_step(optimizer):
            return True
        if "step skipped" not in self.acted:
            messages.tell("hasten: precision: gradients overflowed in fp16; this step is skipped (said once)")
        self.did("step skipped")
        return False

    def _dropped(self) -> None:
        if "overflow dropped by the script" not in self.acted:
            messages.tell("hasten: precision: the script dropped gradients that overflowed in fp16 (said once)")
        self.did("overflow dropped by the script")

    def backward(self, call: Call) -> Call:
        """What is computed again in the backward draws as it did in the forward; fp16: scale the loss and unscale."""
        scaler, dtype = self._scaler, self._true_dtype()
        wide = self._wide()

        def as_in_forward(*args: Any, **kwargs: Any) -> None:
            if not self.active or self._scripts_own or (dtype is not None and not self._converted):
                call(*args, **kwargs)
                return
            with wide, contextlib.nullcontext() if dtype is None else new_tensors_in(dtype):
                call(*args, **kwargs)

        def scaled(tensors: Any, *args: Any, **kwargs: Any) -> None:
            assert scaler is not None
            scaler.backward(as_in_forward, tensors, *args, **kwargs)

        return as_in_forward if scaler is None else scaled

    def _wide(self) -> Float32Draws:
        name = _TRUE.get(str(self.setting))
        wide = Float32Draws() if name is None else Float32Draws([name])
        self._wides.append(wide)
        return wide

    def counted(self) -> tuple[Any, ...]:
        """With fp16: what backwards count of overflows, for `recount`."""
        return () if self._scaler is None else self._scaler.counted()

    def recount(self, counted: tuple[Any, ...]) -> None:
        """With fp16: forget the backwards since `counted`, which are done again."""
        if self._scaler is not None:
            self._scaler.recount(counted)

    def state_dict(self) -> dict[str, Any]:
        """With fp16: the scale, and for how many steps it has held."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With fp16: go on with that scale."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


def _first_device(args: tuple[Any, ...]) -> str:
    """Where the first tensor among arguments is; "" where there is none."""
    device_types: list[str] = []

    def see(tensor: Any) -> Any:
        device_types.append(tensor.device.type)
        return tensor

    map_tensors(see, args)
    return device_types[0] if device_types else ""


def device_to_cast(module: Any, torch: Any) -> str:
    """Where a module computes in float32: "cpu", "cuda", or "" when none of its parameters is float32."""
    devices = [parameter.device.type for parameter in module.parameters() if parameter.dtype is torch.float32]
    if "cuda" in devices:
        return "cuda"  # a table that `host_embeddings` keeps on the CPU may come first
    # Other stages' layers of a pipeline are on "meta" here.
    return next((str(device) for device in devices if device != "meta"), str(devices[0]) if devices else "")
