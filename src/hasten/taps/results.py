"""Taps on results: losses in validation, scaled losses, checkpoints, copies to the GPU."""

from __future__ import annotations

import functools
from time import perf_counter
from typing import Any

from hasten.evidence import Phase
from hasten.taps.passed_over import passed_over

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


def install(session: Any) -> None:
    """Set the taps."""
    if session.run.recorder is not None:
        _tap_losses(session)
        _tap_scaler(session)
        _tap_checkpoints(session)
        _tap_copies(session)


@passed_over
def _tap_losses(session: Any) -> None:
    import torch
    import torch.nn.functional as functional
    from torch.compiler import is_compiling

    def tap(plain: Any) -> Any:
        @functools.wraps(plain)
        def loss(*args: Any, **kwargs: Any) -> Any:
            value = plain(*args, **kwargs)
            if (session.validating or session.aside) and not is_compiling():
                recorder = session.run.recorder
                if recorder is not None and isinstance(value, torch.Tensor) and _validates(session, recorder, value):
                    recorder.validation_loss(value.detach().float().mean())
            return value

        return loss

    attend = functional.scaled_dot_product_attention

    @functools.wraps(attend)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            session.run.seen["attention"] = True
        return attend(*args, **kwargs)

    taps = {name: tap(getattr(functional, name)) for name in _LOSSES if hasattr(functional, name)}
    taps["scaled_dot_product_attention"] = attention
    plains = {name: getattr(functional, name) for name in taps}
    for name, tapped in taps.items():
        setattr(functional, name, tapped)
    untapped_for_script(functional, taps, plains)


def _validates(session: Any, recorder: Any, loss: Any) -> bool:
    """Whether a loss is validation's: it has a graph if, and only if, the last forward has one."""
    if session.without_graph and loss.requires_grad:
        return False  # of another forward, before that of a target net or a teacher
    if session.aside and not loss.requires_grad:
        recorder.was_validation(session.aside)
        session.validating, session.aside = True, 0.0
    return bool(session.validating)


@passed_over
def untapped_for_script(functional: Any, taps: dict[str, Any], plains: dict[str, Any]) -> None:
    """torch.jit.script reads the source of what it compiles: it must find torch's own functions."""
    import torch

    plain = torch.jit.script

    @functools.wraps(plain)
    def script(*args: Any, **kwargs: Any) -> Any:
        for name, function in plains.items():
            setattr(functional, name, function)
        try:
            return plain(*args, **kwargs)
        finally:
            for name, function in taps.items():
                setattr(functional, name, function)

    torch.jit.script = script


def _tap_scaler(session: Any) -> None:
    """Remember the loss in front of a script's own GradScaler, whose scale would hide it."""
    from torch.amp import GradScaler

    plain = GradScaler.scale

    @functools.wraps(plain)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        if self.is_enabled():
            session.run.seen["grad_scaler"] = True
            session.unscaled.clear()
            session.unscaled[id(scaled)] = outputs.detach() if hasattr(outputs, "detach") else None
        return scaled

    GradScaler.scale = scale  # type: ignore[method-assign]


def _tap_checkpoints(session: Any) -> None:
    import torch

    plain = torch.save

    @functools.wraps(plain)
    def save(*args: Any, **kwargs: Any) -> None:
        start = perf_counter()
        plain(*args, **kwargs)
        if session.run.recorder is not None:
            session.run.recorder.add(Phase.CHECKPOINT, perf_counter() - start)

    torch.save = save


def _tap_copies(session: Any) -> None:
    """Time copies from the CPU to a GPU; without a GPU there are none."""
    import torch

    if not torch.cuda.is_available():
        return

    def tap(plain: Any) -> Any:
        @functools.wraps(plain)
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

    torch.Tensor.to = tap(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = tap(torch.Tensor.cuda)  # type: ignore[method-assign]
