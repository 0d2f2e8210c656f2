"""float32 matrix products computed on faster, narrower units."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class MatmulPrecision(ProcessWide):
    """`torch.set_float32_matmul_precision`: "high" is TF32 on a GPU, "medium" bf16 on a CPU that has it.

    Set from the first forward of a model on. Tensors stay float32 throughout; only the products inside a matrix
    multiplication are narrower.
    """

    name = "matmul_precision"
    effect = Effect.ROUNDING
    relieves = Resource.COMPUTE
    sources = ("NVIDIA Ampere tuning guide", "torch.set_float32_matmul_precision")
    values = ("high", "medium")

    @classmethod
    def roundoff(cls, setting: Setting) -> float:
        """Return TF32's rounding error for "high", bf16's for "medium"."""
        return 2.0**-10 if setting == "high" else 2.0**-8

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """The hardware must have the narrower units."""
        if machine.device == "cuda":
            return ""
        if setting == "high":
            return "TF32 exists on NVIDIA GPUs only; on a CPU use medium"
        return "" if {"avx512_bf16", "amx_bf16"} & set(machine.cpu_flags) else "this CPU has no bf16 instructions"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """TF32 on a GPU, oneDNN's bf16 on a CPU."""
        setting = "high" if any(model.device == "cuda" for model in evidence.models) else "medium"
        if evidence.flags.matmul_precision != "highest":
            return Refusal(f"the script sets it already ({evidence.flags.matmul_precision})")
        machine = evidence.machine
        if setting == "medium" and machine.device == "cuda":
            return Refusal("the script trains on the CPU although the machine has a GPU")
        if why := cls.useless(setting, machine):
            return Refusal(why)
        return Choices((setting,), "float32 matrix products at full width")

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._models = False

    def process(self) -> None:
        """Set it, once there is a model: data that a script makes before it trains is what it is without."""
        import torch

        if not self._models:
            return
        switches, cudnn = self._switches, torch.backends.cudnn
        switches.set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, str(self.setting))
        if torch.cuda.is_available():
            switches.set(lambda: cudnn.allow_tf32, lambda value: setattr(cudnn, "allow_tf32", value), True)
        self.did("process")

    def prepare(self, model: Any) -> None:
        """Set it for the Trainer's stage."""
        self.model(model, ())

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Set it from a script's first model on, for matrix products and (on a GPU) convolutions."""
        if not self._models:
            self._models = True
            if self.active:
                self.process()
