"""Conclusions from a loader benchmark: how many workers are enough, and what holds the loader up."""

from __future__ import annotations

import math
import statistics

from hasten.doctor.verdict.diagnosis import Verdict
from hasten.evidence import Evidence, LoaderBench, LoaderFacts, Phase, net_seconds
from hasten.evidence.loaders import Consumed
from hasten.report import words

STAGE_WORDS = {
    "read": "reading files",
    "decode": "decoding",
    "transform": "transforms",
    "collate": "collating",
    "other": "the dataset's own code",
}
STAGES = tuple(STAGE_WORDS)
_AS_GOOD = 1.1  # as fast, within the noise of a bench
_CROWDED = 0.3  # cores that others keep busy, above which it is said
_MUCH = 0.1  # share of a step, of a batch: worth a word


def loader_verdict(evidence: Evidence, bench: LoaderBench) -> Verdict:
    """The answer for a run whose training loader was measured in place of training."""
    loader = bench.loader
    size = f", batches of {loader.batch_size}" if loader.batch_size else ""
    samples = f", {loader.samples:,} samples" if loader.samples else ""
    details = [f"the loader of {loader.where}: {loader.dataset}{samples}{size}"]
    if bench.ended == "stopped":
        details.append("stopped by Ctrl-C: this is what was measured so far")
    details += remarks(bench)
    if not bench.ended:
        details.append(f"the script's process died ({evidence.error or 'for an unknown reason'})")
    return Verdict("loader", title(bench), (*details, *_crowded(evidence)))


def title(bench: LoaderBench) -> str:
    """Return what was found, in one line."""
    best, none = bench.best, bench.rate_of(0)
    if best is None:
        failure = next((f"{rate.error}{_place(rate.where)}" for rate in bench.rates), "nothing was measured")
        return f"the loader returns no batches: {failure}"
    parts = []
    if none is None or best is none:
        parts.append("no number of workers does better than none" if none and len(bench.measured) > 1 else "")
    elif none.samples_per_s > 0:
        ratio = words.times(best.samples_per_s / none.samples_per_s)
        parts.append(f"{_workers(best.workers)} {_give(best.workers)} {ratio} of what 0 give")
    parts.append(f"the loader alone can feed {speed(best.samples_per_s)}")
    if bench.stages is not None and bench.stages.seconds > 0:
        most = max(STAGES, key=bench.stages.by_name.__getitem__)
        share = words.percent(bench.stages.by_name[most] / bench.stages.seconds)
        parts.append(f"{STAGE_WORDS[most]} {'is' if most != 'transform' else 'are'} {share} of it")
    return "; ".join(filter(None, parts))


def remarks(bench: LoaderBench) -> list[str]:
    """Return what else the figures say, most important first."""
    return [*_failures(bench), *_own(bench), *_training(bench), *_starts(bench), *_python(bench), *bench.notes]


def _crowded(evidence: Evidence) -> list[str]:
    """Whether others were busy on the machine meanwhile."""
    own = [cores for cores in evidence.used.cpu if math.isfinite(cores)]
    if not own:
        return []
    others = sum(evidence.used.cores) - statistics.fmean(own)
    if others <= _CROWDED:
        return []
    busy = f"other processes kept {others:.1f} of this machine's {evidence.machine.cores} cores busy meanwhile"
    return [f"{busy}: on an idle one the figures are higher, and more workers help more"]


def consumed(evidence: Evidence, facts: LoaderFacts) -> Consumed | None:
    """Return what a training took of its loader, in its steady steps; None where it had none."""
    if evidence.train_loader is None:
        return None
    steps = [evidence.step_phases[index] for index in evidence.steady()]
    total = sum(map(net_seconds, steps))
    if not total > 0:
        return None
    per_second = len(steps) / total
    size = evidence.train_loader.batch_size or facts.batch_size or 1
    return Consumed(
        samples_per_s=per_second * size,
        batches_per_s=per_second,
        waited=sum(step[Phase.DATA] for step in steps) / total,
        workers=evidence.train_loader.num_workers,
    )


def _failures(bench: LoaderBench) -> list[str]:
    """Numbers of workers that could not be measured, by reason; nothing where the verdict says it."""
    if bench.best is None:
        return []
    reasons: dict[tuple[str, str], list[str]] = {}
    for rate in bench.rates:
        if rate.error:
            reasons.setdefault((rate.error, rate.where), []).append(str(rate.workers))
    return [
        f"with {' and '.join(numbers)} workers it fails: {error}{_place(where)}"
        for (error, where), numbers in reasons.items()
    ]


def _own(bench: LoaderBench) -> list[str]:
    """The script's own number of workers beside the best."""
    best, own = bench.best, bench.rate_of(bench.loader.num_workers)
    if best is None or own is None or len(bench.measured) == 1:
        return []
    yours = f"the script's own {_workers(own.workers)} {_give(own.workers)} {speed(own.samples_per_s)}"
    if best is own or own.samples_per_s * _AS_GOOD >= best.samples_per_s:
        fewer = best.workers < own.workers
        return [f"{yours}: {f'{_workers(best.workers)} would do' if fewer else 'as good as any'}"]
    return [f"{yours}: num_workers={best.workers} gives {words.times(best.samples_per_s / own.samples_per_s)} of that"]


def _training(bench: LoaderBench) -> list[str]:
    """Return what a training took, beside what the loader can give."""
    took = bench.consumed
    if took is None:
        return []
    sentence = (
        f"the training took {speed(took.samples_per_s)} with {_workers(took.workers)} and waited "
        f"{words.percent(took.waited)} of its step for data"
    )
    alone = bench.rate_of(took.workers)
    if took.waited < _MUCH / 2:
        return [f"{sentence}: the loader does not hold it up"]
    if alone is None:
        return [sentence]
    if alone.samples_per_s > 1.5 * took.samples_per_s and took.workers:
        ratio = words.times(alone.samples_per_s / took.samples_per_s)
        return [f"{sentence}, although these workers alone give {ratio} of that: beside the training they lack CPU"]
    return [f"{sentence}; the loader alone gives {speed(alone.samples_per_s)} with as many: it holds the training up"]


def _starts(bench: LoaderBench) -> list[str]:
    """The wait at the begin of each epoch."""
    loader, own = bench.loader, bench.rate_of(bench.loader.num_workers)
    if own is None or not loader.num_workers:
        return []
    stays = words.duration(own.epoch_start)
    if loader.persistent_workers or own.epoch_start is None:
        return [f"an epoch's first batch comes after {stays if own.epoch_start else words.duration(own.first_batch)}"]
    wait, cure = words.duration(own.first_batch), "persistent_workers=True"
    return [f"each epoch restarts its workers and waits {wait} for the first batch; with {cure}, {stays}"]


def _python(bench: LoaderBench) -> list[str]:
    stages = bench.stages
    found = []
    if stages is not None and stages.python >= _MUCH:
        place = f", most of it in {words.clean(stages.hottest)}" if stages.hottest else ""
        found.append(f"{words.percent(stages.python)} of a sample's time is the dataset's own pure Python{place}")
    if stages is not None and stages.copies >= _MUCH:
        found.append(f"{words.percent(stages.copies)} of a worker's time goes into passing batches on")
    return found


def speed(samples_per_s: float) -> str:
    """`5,200 samples/s`; below ten, with what tells."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


def _workers(number: int) -> str:
    return words.count(number, "worker")


def _give(number: int) -> str:
    return "gives" if number == 1 else "give"


def _place(where: str) -> str:
    return f" ({words.clean(where)})" if where else ""
