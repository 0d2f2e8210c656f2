"""float32 matrix products on faster, narrower hardware units (TF32, bf16)."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence, Machine
from hasten.plan import Setting
from hasten.techniques.base import Choices, Effect, Refusal, Resource
from hasten.techniques.switches import ProcessWide


class MatmulPrecision(ProcessWide):
    """Set `torch.set_float32_matmul_precision`: "high" is TF32 on a GPU, "medium" is bf16 on a CPU that has it.

    It is set when a model's first forward begins. Tensors stay float32 throughout; only the products inside a matrix
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
        """Refuse a setting for which the hardware has no narrower units."""
        if machine.device == "cuda":
            return ""
        if setting == "high":
            return "TF32 exists on NVIDIA GPUs only; on a CPU use medium"
        return "" if {"avx512_bf16", "amx_bf16"} & set(machine.cpu_flags) else "this CPU has no bf16 instructions"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose TF32 on a GPU, oneDNN's bf16 on a CPU."""
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
        self._models = False  # whether a model was seen

    def process(self) -> None:
        """Set the precision, but only once there is a model: data that a script makes earlier must not change."""
        import torch

        if not self._models:
            return
        switches, cudnn = self._switches, torch.backends.cudnn
        switches.set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, str(self.setting))
        if torch.cuda.is_available():
            switches.set(lambda: cudnn.allow_tf32, lambda value: setattr(cudnn, "allow_tf32", value), True)
        self.did("process")

    def prepare(self, model: Any) -> None:
        """Set the precision for the Trainer's stage."""
        self.model(model, ())

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Set the precision at the first model, for matrix products and (on a GPU) convolutions."""
        if not self._models:
            self._models = True
            if self.active:
                self.process()
