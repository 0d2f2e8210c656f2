"""Conclusions from a loader benchmark: how many workers are enough, and what makes the loader slow."""

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
_AS_GOOD = 1.1  # ratio of two speeds up to which they count as equal, within the noise of a benchmark
_CROWDED = 0.3  # number of cores kept busy by other processes, above which a detail says so
_NOTABLE = 0.1  # share of a sample's or a worker's time from which a remark mentions it


def loader_verdict(evidence: Evidence, bench: LoaderBench) -> Verdict:
    """Return the verdict of a run whose training loader was measured instead of training."""
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
    """Return the result of the benchmark in one line: the best number of workers, its speed and the costliest stage."""
    best, no_workers = bench.best, bench.rate_of(0)
    if best is None:
        failure = next((f"{rate.error}{_place(rate.where)}" for rate in bench.rates), "nothing was measured")
        return f"the loader returns no batches: {failure}"
    parts = []
    if no_workers is None or best is no_workers:
        parts.append("no number of workers does better than none" if no_workers and len(bench.measured) > 1 else "")
    elif no_workers.samples_per_s > 0:
        ratio = words.times(best.samples_per_s / no_workers.samples_per_s)
        parts.append(f"{_workers(best.workers)} {_gives(best.workers)} {ratio} of what 0 give")
    parts.append(f"the loader alone can feed {speed(best.samples_per_s)}")
    if bench.stages is not None and bench.stages.seconds > 0:
        most = max(STAGES, key=bench.stages.by_name.__getitem__)
        share = words.percent(bench.stages.by_name[most] / bench.stages.seconds)
        parts.append(f"{STAGE_WORDS[most]} {'is' if most != 'transform' else 'are'} {share} of it")
    return "; ".join(filter(None, parts))


def remarks(bench: LoaderBench) -> list[str]:
    """Return the other conclusions from the benchmark, most important first."""
    return [
        *_failures(bench),
        *_compare_own(bench),
        *_training(bench),
        *_starts(bench),
        *_python(bench),
        *bench.notes,
    ]


def _crowded(evidence: Evidence) -> list[str]:
    """Return a sentence if other processes kept the machine busy during the benchmark."""
    training_cores = [cores for cores in evidence.used.cpu if math.isfinite(cores)]
    if not training_cores:
        return []
    other_cores = sum(evidence.used.cores) - statistics.fmean(training_cores)
    if other_cores <= _CROWDED:
        return []
    busy = f"other processes kept {other_cores:.1f} of this machine's {evidence.machine.cores} cores busy meanwhile"
    return [f"{busy}: on an idle one the figures are higher, and more workers help more"]


def consumed(evidence: Evidence, facts: LoaderFacts) -> Consumed | None:
    """Return how much a training took from its loader in its steady steps; None if it had no loader or no such steps.

    Args:
        evidence: The training's evidence.
        facts: The benchmarked loader; its batch size is used if the training's is unknown.
    """
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
    """Return a sentence per reason why some numbers of workers failed."""
    if bench.best is None:  # all failed: the title says why
        return []
    reasons: dict[tuple[str, str], list[str]] = {}
    for rate in bench.rates:
        if rate.error:
            reasons.setdefault((rate.error, rate.where), []).append(str(rate.workers))
    return [
        f"with {' and '.join(numbers)} workers it fails: {error}{_place(where)}"
        for (error, where), numbers in reasons.items()
    ]


def _compare_own(bench: LoaderBench) -> list[str]:
    """Compare the script's own number of workers with the best."""
    best, own_rate = bench.best, bench.rate_of(bench.loader.num_workers)
    if best is None or own_rate is None or len(bench.measured) == 1:
        return []
    yours = f"the script's own {_workers(own_rate.workers)} {_gives(own_rate.workers)} {speed(own_rate.samples_per_s)}"
    if best is own_rate or own_rate.samples_per_s * _AS_GOOD >= best.samples_per_s:
        fewer = best.workers < own_rate.workers
        return [f"{yours}: {f'{_workers(best.workers)} would do' if fewer else 'as good as any'}"]
    return [
        f"{yours}: num_workers={best.workers} gives {words.times(best.samples_per_s / own_rate.samples_per_s)} of that"
    ]


def _training(bench: LoaderBench) -> list[str]:
    """Compare the speed of a training with that of its loader alone, if the training's evidence was given."""
    took = bench.consumed
    if took is None:
        return []
    sentence = (
        f"the training took {speed(took.samples_per_s)} with {_workers(took.workers)} and waited "
        f"{words.percent(took.waited)} of its step for data"
    )
    alone = bench.rate_of(took.workers)
    if took.waited < _NOTABLE / 2:
        return [f"{sentence}: the loader does not hold it up"]
    if alone is None:
        return [sentence]
    # Much faster without the training, and yet the training waited: the training's own threads take the CPU time that
    # the workers need.
    if alone.samples_per_s > 1.5 * took.samples_per_s and took.workers:
        ratio = words.times(alone.samples_per_s / took.samples_per_s)
        return [f"{sentence}, although these workers alone give {ratio} of that: beside the training they lack CPU"]
    return [f"{sentence}; the loader alone gives {speed(alone.samples_per_s)} with as many: it holds the training up"]


def _starts(bench: LoaderBench) -> list[str]:
    """Return the wait for the first batch of each epoch, and what persistent workers would make of it."""
    loader, own_rate = bench.loader, bench.rate_of(bench.loader.num_workers)
    if own_rate is None or not loader.num_workers:
        return []
    first, later = words.duration(own_rate.first_batch), words.duration(own_rate.epoch_start)
    if loader.persistent_workers or own_rate.epoch_start is None:
        return [f"an epoch's first batch comes after {later if own_rate.epoch_start else first}"]
    cure = "persistent_workers=True"
    return [f"each epoch restarts its workers and waits {first} for the first batch; with {cure}, {later}"]


def _python(bench: LoaderBench) -> list[str]:
    """Return sentences if pure Python, or passing batches on, takes much of a worker's time."""
    stages = bench.stages
    sentences = []
    if stages is not None and stages.python >= _NOTABLE:
        place = f", most of it in {words.clean(stages.hottest)}" if stages.hottest else ""
        sentences.append(f"{words.percent(stages.python)} of a sample's time is the dataset's own pure Python{place}")
    if stages is not None and stages.copies >= _NOTABLE:
        sentences.append(f"{words.percent(stages.copies)} of a worker's time goes into passing batches on")
    return sentences


def speed(samples_per_s: float) -> str:
    """Return a speed as text: `5,200 samples/s`; below ten with two significant digits."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 10 else f"{samples_per_s:.2g} samples/s"


def _workers(number: int) -> str:
    return words.count(number, "worker")


def _gives(number: int) -> str:
    return "gives" if number == 1 else "give"


def _place(where: str) -> str:
    return f" ({words.clean(where)})" if where else ""
