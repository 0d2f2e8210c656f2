"""Too much validation, too few threads: what the verdict is about, as findings."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, HowKnown, Phase
from hasten.evidence.figures import percent
from hasten.evidence.waiting import mean_during, saturated
from hasten.evidence.weigh import COMPUTE, on_gpu, products, seconds_of, share_of, steady_steps, timed

_OFTEN = 0.20  # share of the time from which validation is too much
_EACH_STEP = 0.5  # share of the steps from which forwards without gradients are no validation: a policy that acts
_LONG = 3e-4  # seconds of a product from which more threads share it with profit
_GAIN = 0.8  # of what as many threads as cores would bring if nothing were lost
_MOST = 4  # times as fast, whatever the number of cores


class FrequentValidation(Check):
    """Validation that takes a good part of the training.

    Rests on the measured time of forwards in eval mode or without gradients, and of validation loaders. The gain is
    that of validating half as often, or on half of it.
    """

    name = "frequent_validation"
    sources = ("Falcon, Lightning guide",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One from a fifth of the time on."""
        whole = seconds_of(evidence, *Phase)
        validation = seconds_of(evidence, Phase.VALIDATION)
        steps = steady_steps(evidence)
        validating = [step for step in steps if evidence.step_phases[step][Phase.VALIDATION] > 0]
        if whole <= 0 or validation < _OFTEN * whole or len(validating) > _EACH_STEP * len(steps):
            return
        every = f", after every {len(steps) / len(validating):.0f} steps" if validating else ""
        finding = timed(
            cls.name,
            f"validation takes {percent(validation / whole)} of the time{every}",
            "validate less often, on fewer batches, or in bigger ones; half of it would do for a start",
            validation / whole / 2,
            HowKnown.ESTIMATED,
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


class FewThreads(Check):
    """A CPU training that computes on fewer threads than there are idle cores for.

    Rests on the number torch was given, on the use of the CPU, and on products long enough to be shared.
    """

    name = "few_threads"
    sources = ("PyTorch performance tuning guide, CPU",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One, where cores are idle all the time."""
        use, cores, threads = evidence.use, evidence.machine.cores, evidence.flags.threads
        if use is None or on_gpu(evidence) or not 0 < threads < cores or evidence.flags.distributed > 1:
            return
        working = mean_during(evidence, use.workers) or 0.0
        room = min(round(cores - working), _MOST * threads)
        if saturated(evidence) is not None or room <= threads:
            return
        share = share_of(evidence, products(evidence, least=_LONG))
        compute = share_of(evidence, seconds_of(evidence, *COMPUTE))
        finding = timed(
            cls.name,
            f"torch computes on {threads} of {cores} cores (OMP_NUM_THREADS, or torch.set_num_threads)",
            f"let it have {room} threads: take the setting out, or set it to {room}",
            _GAIN * min(share, compute) * (1 - threads / room),
            HowKnown.ESTIMATED,
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


CHECKS = (FrequentValidation, FewThreads)
