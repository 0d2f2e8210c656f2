"""Read facts from the loaders, models and optimizers that a script builds."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hasten.evidence.libraries import is_library
from hasten.evidence.loaders import LoaderFacts
from hasten.evidence.parts import parts
from hasten.evidence.schema import Flags, ModelFacts, OptimizerFacts

_HASTEN_FOLDER = str(Path(__file__).resolve().parent.parent)


def caller(frame: FrameType | None = None) -> str:
    """Return the `file:line` of the script's innermost frame, skipping torch, other libraries and hasten.

    If all frames are libraries', return the outermost one.

    Args:
        frame: The frame to start at; default: this function's caller.
    """
    frame = frame or sys._getframe(1)
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", _HASTEN_FOLDER)):
            location = f"{name}:{frame.f_lineno}"
            if not is_library(name):
                return location
            fallback = location
        frame = frame.f_back
    return fallback


def loader_facts(loader: Any, options: dict[str, Any], where: str) -> LoaderFacts:
    """Return the facts of a DataLoader; `options` are the arguments it was built with, by name."""
    import torch.multiprocessing
    from torch.utils.data import IterableDataset, default_collate

    context = options.get("multiprocessing_context")
    handed = getattr(loader, "_hasten_workers", None)  # workers given by a technique: see hasten.data.worker_pass
    method = context if isinstance(context, str) else getattr(context, "_name", None)
    return LoaderFacts(
        dataset=type(options["dataset"]).__name__,
        where=where,
        iterable=isinstance(options["dataset"], IterableDataset),
        batches=length_of(loader),
        samples=length_of(options["dataset"]),
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        num_workers=handed.workers if handed is not None else options["num_workers"],
        prefetch_factor=handed.prefetch if handed is not None else options["prefetch_factor"],
        persistent_workers=options["persistent_workers"],
        pin_memory=bool(options["pin_memory"]),
        start_method=method or torch.multiprocessing.get_start_method(allow_none=True) or _default_start_method(),
        default_collate=loader.collate_fn is default_collate,
        own_worker_init=options["worker_init_fn"] is not None,
    )


def _default_start_method() -> str:
    import multiprocessing

    return multiprocessing.get_all_start_methods()[0]


def length_of(sized: Any) -> int | None:
    """Return `len(sized)`, or None if it has no length."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def batch_bytes(batch: Any) -> int:
    """Return the bytes of a batch's tensors and arrays."""
    import torch

    return sum(part.nbytes for part in parts(batch)[0] if isinstance(part, torch.Tensor))


def _shape(argument: Any) -> tuple[int, ...] | None:
    """Return a tensor's shape; None for nested tensors and for objects that are no tensors."""
    try:
        return tuple(int(size) for size in argument.shape)
    except Exception:  # a class of the script may raise anything from its `shape`
        return None


class ModelWatch:
    """Counts how an outermost module is used, and reads its facts.

    Args:
        module: The module. Only a weak reference is held unless `keep`: a script may make and drop many modules.
        args: The arguments of its first call.
        keep: Whether to hold a strong reference, so that its facts can be read at the end; used in trials, which are
            short.

    Attributes:
        module: Returns the module; None once it was deleted.
    """

    def __init__(self, module: Any, args: tuple[Any, ...], keep: bool) -> None:
        self.module: Any = (lambda: module) if keep else weakref.ref(module)
        self.train_calls = self.eval_calls = self.eval_calls_with_graph = 0
        self.backward_through_eval = False
        self.autocast = ""
        self.input_shapes = tuple(shape for arg in args if (shape := _shape(arg)) is not None)
        self._last: ModelFacts | None = None  # result of the last call of `facts` while the module existed

    def called(self, training: bool, output: Any) -> None:
        """Count a finished forward. If it was in eval mode and has a graph, hook its output to notice a backward."""
        if training:
            self.train_calls += 1
            return
        self.eval_calls += 1
        from torch.utils._pytree import tree_iter

        with_graph = [tensor for tensor in tree_iter(output) if getattr(tensor, "requires_grad", False)]
        if with_graph:
            self.eval_calls_with_graph += 1
            if not self.backward_through_eval:
                for tensor in with_graph:
                    tensor.register_hook(self._used)

    def _used(self, gradient: Any) -> None:
        self.backward_through_eval = True

    def facts(self) -> ModelFacts | None:
        """Return the facts so far; for a deleted module those of the last call, or None if there was none."""
        from torch.nn.parameter import is_lazy

        module = self.module()
        if module is None:
            return self._last and dataclasses.replace(
                self._last,
                train_calls=self.train_calls,
                eval_calls=self.eval_calls,
                eval_calls_with_graph=self.eval_calls_with_graph,
                backward_through_eval=self.backward_through_eval,
            )
        parameters = [p for p in module.parameters() if not is_lazy(p)]  # lazy parameters have no size yet
        # All devices, since the first parameter may be an embedding that `host_embeddings` keeps on the CPU.
        devices = [p.device.type for p in parameters]
        layers = Counter(type(layer).__name__ for layer in module.modules() if not any(True for _ in layer.children()))
        compiled = type(module).__name__ == "OptimizedModule" or any(
            _is_compiled(layer) or type(layer).__name__ == "OptimizedModule" for layer in module.modules()
        )
        self._last = ModelFacts(
            name=type(module).__name__,
            parameters=sum(p.numel() for p in parameters),
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            layers=dict(layers),
            dtype=str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
            device="cuda" if "cuda" in devices else next(iter(devices), ""),
            compiled=compiled,
            autocast=self.autocast,
            train_calls=self.train_calls,
            eval_calls=self.eval_calls,
            eval_calls_with_graph=self.eval_calls_with_graph,
            backward_through_eval=self.backward_through_eval,
            input_shapes=self.input_shapes,
        )
        return self._last


@dataclass
class LearningRates:
    """The learning rates that one optimizer's steps were made with.

    Attributes:
        reference: The session's reference to the optimizer. It tells this optimizer from a later one with the same id.
        schedule: Class of the latest scheduler that was built for it.
        rates: The distinct learning rates, in order.
        steps: Steps that it had made when its rate was read last. A rate that is set after the last step is not used.
    """

    reference: Any
    schedule: str = ""
    rates: list[float] = field(default_factory=list)
    steps: int = -1


def optimizer_facts(
    optimizer: Any, where: str, steps: int, why_not: str, learning_rates: LearningRates | None = None
) -> OptimizerFacts:
    """Return the facts of an optimizer: its options, and the schedule and learning rates that the run used."""
    first = optimizer.param_groups[0] if optimizer.param_groups else {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return OptimizerFacts(
        name=type(optimizer).__name__,
        where=where,
        parameters=len(parameters),
        fused=bool(first.get("fused")) or hasattr(vars(optimizer).get("_init_group"), "fuses"),  # by our technique
        foreach=first.get("foreach"),
        fusable=not why_not,
        why_not_fusable=why_not,
        steps=steps,
        options={name: option for name, value in first.items() if (option := _option(value)) is not None},
        schedule=learning_rates.schedule if learning_rates else "",
        rates=tuple(learning_rates.rates) if learning_rates else (),
        shapes=tuple(shape for p in parameters[:2000] if (shape := _shape(p)) is not None),
    )


def _option(value: Any) -> float | bool | str | None:
    """Return an optimizer's option as plain data; None if it is not set or no option ("params")."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and all(isinstance(part, int | float) for part in value):
        return ", ".join(map(str, value))
    # A learning rate may be a tensor (`capturable`); one on a GPU is not read, which would wait for the device.
    return float(value) if getattr(value, "is_cpu", False) and value.numel() == 1 else None


def global_flags(used: dict[str, Any], compiler: str) -> Flags:
    """Return torch's global switches as they are now, overridden by the values `used` that were seen during the run."""
    import torch

    on_gpu = torch.cuda.is_available()
    world = (
        torch.distributed.get_world_size()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else 1
    )
    flags: dict[str, Any] = {
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic,
        "distributed": world,
        "bf16": on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        "compiler": compiler,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }
    return Flags(**{**flags, **used})


def _is_compiled(layer: Any) -> bool:
    """Return whether `layer.compile()` was called.

    `hasten.setup` stores its own object in the same attribute; that object's `compiled` tells.
    """
    implementation = getattr(layer, "_compiled_call_impl", None)
    return getattr(implementation, "compiled", implementation) is not None
