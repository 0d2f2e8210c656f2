"""Checks of how the weights are updated. They touch the result, not the time: notes, unless harm was seen."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.doctor.checks.convergence import spikes
from hasten.evidence import Evidence, Finding, Severity, split_place
from hasten.evidence.schema import OptimizerFacts

_RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
_BY_RATE = ("SGD", "ASGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop")
_L2 = ("Adam", "NAdam", "RAdam", "Adamax")
_LONG = 100  # steps before a rate that has not changed says anything


class NoGradientClipping(Check):
    """A recurrent network whose gradients nothing bounds."""

    name = "no_gradient_clipping"
    sources = ("Pascanu, Mikolov, Bengio, 2013", "Kuhn")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """Only of a run in which clipping would have been seen."""
        if evidence.listened != "doctor" or not evidence.steps or evidence.events_of("clip"):
            return
        stepping = [optimizer for optimizer in evidence.optimizers if optimizer.steps]
        if stepping and all(optimizer.name == "LBFGS" for optimizer in stepping):
            return  # it takes the loss's curvature from gradients as they are
        kinds = [kind for kind in _RECURRENT for model in evidence.models if kind in model.layers]
        if not kinds:
            return
        jumps = spikes(evidence)
        harm = (
            "losses were NaN or infinite" if evidence.bad_losses else f"the loss jumped {jumps} times" if jumps else ""
        )
        layer = next((layer for layer in evidence.layers if layer.kind in _RECURRENT), None)
        yield Finding(
            cls.name,
            f"a recurrent network ({kinds[0]}) trains without gradient clipping{f', and {harm}' if harm else ''}",
            "call torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) between backward and the optimizer's step",
            Severity.MEDIUM if harm else Severity.NOTE,
            where=layer.path if layer else "",
            sources=cls.sources,
        )


class ConstantRate(Check):
    """One learning rate from the first step to the last."""

    name = "constant_rate"
    sources = ("Kuhn", "Smith, Topin, Super-Convergence, 2018")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """Of one optimizer, over its whole training or beyond its first epoch: before, a schedule may yet begin.

        Several optimizers (GANs, reinforcement learning) often keep their rates on purpose: nothing is said of them.
        """
        stepping = [optimizer for optimizer in evidence.optimizers if optimizer.steps]
        if len(stepping) != 1:
            return
        optimizer = stepping[0]
        epochs = sum(one.trained and one.batches > 0 for one in evidence.passes)
        seen_enough = epochs >= 2 or (evidence.ended == "finished" and epochs <= 1)
        if optimizer.steps < _LONG or optimizer.name not in _BY_RATE or not seen_enough:
            return
        if optimizer.schedule or len(optimizer.rates) != 1:
            return
        file, line = split_place(optimizer.where)
        over = f" over {epochs} epochs" if epochs >= 2 else ""
        yield Finding(
            cls.name,
            f"{optimizer.name} made all of its {optimizer.steps} steps{over} at the rate {optimizer.rates[0]:g}",
            "let it fall towards the end (OneCycleLR or CosineAnnealingLR, with a short warm-up)",
            Severity.NOTE,
            file=file,
            line=line,
            sources=cls.sources,
        )


class AdamWithL2(Check):
    """Weight decay that Adam divides by the size of the gradients."""

    name = "adam_with_l2"
    sources = ("Loshchilov, Hutter, Decoupled Weight Decay Regularization, 2019", "Kuhn")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One an optimizer."""
        for optimizer in evidence.optimizers:
            decay = optimizer.options.get("weight_decay", 0.0)
            if optimizer.name not in _L2 or isinstance(decay, str) or not decay or _decoupled(optimizer):
                continue
            cure = "torch.optim.AdamW" if optimizer.name == "Adam" else "decoupled_weight_decay=True"
            file, line = split_place(optimizer.where)
            yield Finding(
                cls.name,
                f"{optimizer.name} with weight_decay={decay:g} adds it to the gradients, where it hardly decays "
                "weights that have large ones",
                f"use {cure} (its weight_decay wants another value, often 0.01 to 0.1)",
                Severity.NOTE,
                file=file,
                line=line,
                sources=cls.sources,
            )


def _decoupled(optimizer: OptimizerFacts) -> bool:
    return optimizer.options.get("decoupled_weight_decay") in (True, "True")


CHECKS = (NoGradientClipping, ConstantRate, AdamWithL2)
