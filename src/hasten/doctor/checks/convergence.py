"""Checks of what the training learns from and towards: losses that are none, inputs far from 0 and 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, Severity, split_place

_NORMS = ("BatchNorm", "LayerNorm", "InstanceNorm", "GroupNorm", "LazyBatchNorm", "RMSNorm", "Embedding")


class BadLosses(Check):
    """Losses that were NaN or infinite."""

    name = "bad_losses"
    sources = ("torch.autograd.set_detect_anomaly",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """High where the training did not recover."""
        if not evidence.bad_losses:
            return
        bad = [index for index, loss in enumerate(evidence.losses) if loss is None or not math.isfinite(loss)]
        steps = max(evidence.steps, evidence.bad_losses)
        first = f", the first in step {evidence.number(bad[0]) + 1}" if bad else ""
        stayed = bool(bad) and bad[-1] == len(evidence.losses) - 1
        half = any(model.autocast == "float16" or model.dtype == "float16" for model in evidence.models)
        unscaled = half and not evidence.flags.grad_scaler
        where = next((optimizer.where for optimizer in evidence.optimizers if optimizer.steps), "")
        file, line = split_place(where)
        yield Finding(
            cls.name,
            f"{evidence.bad_losses} of {steps} losses were NaN or infinite{first}",
            "compute in bfloat16, or scale the loss with torch.amp.GradScaler"
            if unscaled
            else "run the step before under torch.autograd.detect_anomaly() to see which operator made it; then a "
            "lower rate, a warm-up or clipped gradients",
            Severity.HIGH if stayed or evidence.bad_losses > steps / 10 else Severity.MEDIUM,
            file=file,
            line=line,
            details=("it computes in float16 without a GradScaler",) if unscaled else (),
            sources=cls.sources,
        )


class UnnormalisedInputs(Check):
    """Inputs whose mean or spread is far from 0 and 1, by the statistics of the first batches."""

    name = "unnormalised_inputs"
    sources = ("LeCun, Bottou, Orr, Müller, Efficient BackProp, 1998", "Kuhn")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """Of floating-point inputs only: integers are tokens, or images that the script may normalise later."""
        inputs = evidence.inputs
        if inputs is None or inputs.mean is None or inputs.std is None or "float" not in inputs.dtype:
            return
        if evidence.layers and evidence.layers[0].kind.startswith(_NORMS):
            return  # the model normalises them itself
        why = _why_not_normal(inputs.mean, inputs.std, inputs.last_mean, inputs.last_std)
        if not why:
            return
        spanned, pixels = "", False
        if inputs.low is not None and inputs.high is not None:
            spanned = f", values from {inputs.low:g} to {inputs.high:g}"
            pixels = inputs.low >= 0 and 100 < inputs.high <= 255
        file, line = split_place(evidence.train_loader.where if evidence.train_loader else "")
        yield Finding(
            cls.name,
            f"{why}{spanned}",
            "divide the pixels by 255 (ToTensor does), then subtract the mean and divide by the standard deviation"
            if pixels
            else "subtract each feature's mean over the training set and divide by its standard deviation",
            Severity.NOTE,
            file=file,
            line=line,
            details=("unless the script normalises them behind the loader",),
            sources=cls.sources,
        )


def _why_not_normal(mean: float, std: float, feature_mean: float | None, feature_std: float | None) -> str:
    """What is unusual about inputs, "" where they are near enough to normal."""
    if not all(map(math.isfinite, (mean, std))):
        return ""
    if abs(mean) > 5 or std > 10:
        return f"inputs have mean {mean:.3g} and standard deviation {std:.3g}"
    if 0 < std < 0.01:
        return f"inputs hardly vary: standard deviation {std:.3g}"
    if (feature_mean or 0) > 5 or (feature_std or 0) > 10:
        return f"a feature of the inputs has mean {feature_mean or 0:.3g} or standard deviation {feature_std or 0:.3g}"
    return ""


def spikes(evidence: Evidence) -> int:
    """How often the loss jumped to over four times the median of the 20 before it."""
    losses = [loss for loss in evidence.losses if loss is not None and math.isfinite(loss)]
    return sum(
        losses[index] > 4 * middle > 0
        for index in range(20, len(losses))
        if (middle := statistics.median(losses[index - 20 : index])) > 0
    )


CHECKS = (BadLosses, UnnormalisedInputs)
