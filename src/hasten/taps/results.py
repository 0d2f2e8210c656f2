"""Taps on results: validation losses, losses scaled by a GradScaler, checkpoints, copies to the GPU."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from hasten.evidence import Phase
from hasten.taps.protocol import Session
from hasten.taps.wrapping import hidden_from_warnings, tap

_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)


def install(session: Session) -> None:
    """Set the taps."""
    if session.run.recorder is not None:
        _tap_losses(session)
        _tap_scaler(session)
        _tap_checkpoints(session)
        _tap_copies(session)


@hidden_from_warnings
def _tap_losses(session: Session) -> None:
    import torch
    import torch.nn.functional as functional
    from torch.compiler import is_compiling

    transforming = torch._C._are_functorch_transforms_active  # in `vmap(grad(...))` a loss is a wrapper, not a number

    def listening(plain: Any) -> Any:
        def loss(*args: Any, **kwargs: Any) -> Any:
            value = plain(*args, **kwargs)
            if (session.validating or session.maybe_validation_seconds) and not (is_compiling() or transforming()):
                recorder = session.run.recorder
                if recorder is not None and isinstance(value, torch.Tensor) and _validates(session, recorder, value):
                    recorder.validation_loss(value.detach().float().mean())
            return value

        return loss

    def attending(plain: Any) -> Any:
        def attention(*args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                session.run.facts["attention"] = True
            return plain(*args, **kwargs)

        return attention

    makers = {name: listening for name in _LOSSES if hasattr(functional, name)}
    makers["scaled_dot_product_attention"] = attending
    plains = {name: getattr(functional, name) for name in makers}
    for name, make in makers.items():
        tap(functional, name, make)
    untapped_for_script(functional, {name: getattr(functional, name) for name in makers}, plains)


def _validates(session: Session, recorder: Any, loss: Any) -> bool:
    """Return whether a loss is a validation loss: it must have a graph if and only if the last forward has one."""
    if session.without_graph and loss.requires_grad:
        return False  # the loss of an earlier forward, after which a target network or a teacher ran without a graph
    # A forward that was taken for a teacher's (see modules.py) turns out to be validation: its loss has no graph.
    if session.maybe_validation_seconds and not loss.requires_grad:
        recorder.was_validation(session.maybe_validation_seconds)
        session.validating, session.maybe_validation_seconds = True, 0.0
    return bool(session.validating)


@hidden_from_warnings
def untapped_for_script(functional: Any, taps: dict[str, Any], plains: dict[str, Any]) -> None:
    """Tap torch.jit.script to put torch's own functions back while it runs: it reads the source of what it compiles."""
    import torch

    @hidden_from_warnings
    def scripting(plain: Any) -> Any:
        def script(*args: Any, **kwargs: Any) -> Any:
            for name, function in plains.items():
                setattr(functional, name, function)
            try:
                return plain(*args, **kwargs)
            finally:
                for name, function in taps.items():
                    setattr(functional, name, function)

        return script

    tap(torch.jit, "script", scripting)


def _tap_scaler(session: Session) -> None:
    """Remember the unscaled loss of a script's own GradScaler, to record it instead of the scaled one."""
    from torch.amp import GradScaler

    def scaling(plain: Any) -> Any:
        def scale(self: Any, outputs: Any) -> Any:
            scaled = plain(self, outputs)
            if self.is_enabled():
                session.run.facts["grad_scaler"] = True
                session.unscaled.clear()
                session.unscaled[id(scaled)] = outputs.detach() if hasattr(outputs, "detach") else None
            return scaled

        return scale

    tap(GradScaler, "scale", scaling)


def _tap_checkpoints(session: Session) -> None:
    import torch

    def saving(plain: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> None:
            start = perf_counter()
            plain(*args, **kwargs)
            if session.run.recorder is not None:
                session.run.recorder.add(Phase.CHECKPOINT, perf_counter() - start)

        return save

    tap(torch, "save", saving)


def _tap_copies(session: Session) -> None:
    """Time copies from the CPU to a GPU, if there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return

    def copying(plain: Any) -> Any:
        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or tensor.device.type != "cpu":
                return plain(tensor, *args, **kwargs)
            recorder = session.run.recorder
            if recorder is None or recorder.resting is not None:
                return plain(tensor, *args, **kwargs)
            start = perf_counter()
            moved = plain(tensor, *args, **kwargs)
            if moved.device.type != "cpu":
                recorder.add(Phase.TRANSFER, perf_counter() - start)
                if recorder.listeners:
                    recorder.mark(Phase.TRANSFER, False)
            return moved

        return copy

    for name in ("to", "cuda"):
        tap(torch.Tensor, name, copying)
