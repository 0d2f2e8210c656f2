"""The technique `activation_offload`: which forwards it may act on. `saved_on_host` makes the copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques.base import Call, Choices, CudaOnly, Effect, Liveness, Refusal, Resource


class ActivationOffload(CudaOnly):
    """Keep large activations in the host's pinned memory between forward and backward; the GPU holds few of them.

    The results are the same bits: each tensor that autograd saves comes back unchanged, with its strides. Weights, the
    model's inputs, tensors below 1 MiB and those whose elements overlap stay on the GPU, and so do tensors that a loss
    outside the model's forward saves. It costs two copies over the bus for each activation, and the host's memory, so
    it pays where recomputation (`activation_checkpointing`) leaves too much on the GPU. Left alone are forwards in eval
    mode or without gradients, forwards under the script's own saved-tensor hooks, compiled models, and models whose
    parameters are not plain tensors (FSDP's). It has not been run on a GPU yet: the copies were tested on a CPU.
    """

    name = "activation_offload"
    effect = Effect.EXACT
    relieves = Resource.MEMORY
    sources = ("torch.autograd.graph.save_on_cpu",)
    acts_on = "a model that trains on a GPU"
    liveness = Liveness.STEP  # it acts in `forward` only; graphs made before a switch stay valid
    device = "cuda"
    """Type of the device whose tensors are moved: tests move those of a CPU."""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose nothing: it saves memory and costs time."""
        return cls.refuse_without_gpu(evidence) or Refusal(
            "it saves memory and costs time: `hasten tune --memory SIZE` tries it"
        )

    @classmethod
    def clashes(cls, setting: Setting, plan: Mapping[str, Setting]) -> str:
        """Refuse other techniques that decide what a backward keeps."""
        if plan.get("compile", False) is not False:
            return "compiled code decides by itself what its backward keeps"
        if plan.get("activation_checkpointing", False) is not False:
            return "activation_checkpointing does not keep what it would move"
        return ""

    def forward(self, call: Call) -> Call:
        """Move the tensors that the forward saves for its backward."""
        import torch
        from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
        from torch.compiler import is_compiling

        from hasten.techniques.memory.saved_on_host import OnHost

        grad_enabled = torch.is_grad_enabled

        def offloading(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # top_hooks: the script's own saved-tensor hooks, or another technique's, decide what is kept.
            if not module.training or not grad_enabled() or is_compiling() or top_hooks(True) is not None:
                return call(module, args, kwargs)
            if why := self._why_not(module):
                if f"left alone: {why}" not in self.acted:
                    self.gave_up(why)
                return call(module, args, kwargs)
            on_host = OnHost(self.device, module, (args, kwargs))
            if "model" not in self.acted:
                self.did("model")
            try:
                with on_host:
                    return call(module, args, kwargs)
            except RuntimeError as error:
                if "saved tensor hooks" in str(error):  # torch.func's transforms refuse saved-tensor hooks
                    error.add_note("hasten: raised by the technique activation_offload: take it out of the plan.")
                raise

        return offloading

    def _why_not(self, module: Any) -> str:
        """Return why a model is left alone; "" if it is not."""
        import torch

        if isinstance(module, torch._dynamo.OptimizedModule):
            return "the model is compiled, and decides by itself what its backward keeps"
        # Any parameter on the GPU will do, not only the first: `host_embeddings` keeps tables on the host.
        first = next((parameter for parameter in module.parameters() if parameter.device.type == self.device), None)
        if first is None:
            return "CUDA only: the model is not on a GPU"
        if type(first) is not torch.nn.Parameter or type(first.data) is not torch.Tensor:
            return f"its parameters are no plain tensors ({type(first.data).__name__})"
        return ""
