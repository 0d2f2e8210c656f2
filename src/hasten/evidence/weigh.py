"""The worth of a finding: seconds as a share of the steady step."""

from __future__ import annotations

from hasten.evidence.figures import percent
from hasten.evidence.finding import HowKnown
from hasten.evidence.observed import Layer, Measurement, TriedLive
from hasten.evidence.schema import ASIDE, Evidence, Phase

COMPUTE = (Phase.FORWARD, Phase.BACKWARD)
_WIDTHS = {"float64": 8, "bfloat16": 2, "float16": 2}  # bytes of a number; others: 4
LEAST = 0.01
"""What a finding about time must be worth to be given."""
CERTAIN = 0.05
"""Share of the step from which layers that were tried one by one on a CPU tell what the step will save."""


def seconds_of(evidence: Evidence, *phases: Phase) -> float:
    """Mean seconds of these phases in a steady step."""
    return sum(evidence.mean(phase) for phase in phases)


def steady_seconds(evidence: Evidence) -> float:
    """Mean length of a steady step in seconds, without validation and checkpoints; 0 without steps."""
    return seconds_of(evidence, *(phase for phase in Phase if phase not in ASIDE))


def share_of(evidence: Evidence, seconds: float) -> float:
    """Seconds per step as a share of the steady step, 0 to 1; 0 where no step is known."""
    step = steady_seconds(evidence)
    return min(1.0, max(0.0, seconds / step)) if step > 0 and seconds == seconds else 0.0


def on_gpu(evidence: Evidence) -> bool:
    """Whether a model is trained on a GPU; one that is only asked there (a frozen teacher) does not count."""
    trained = [model for model in evidence.models if model.train_calls or model.backward_through_eval]
    # None is known to be trained while the first step still runs: then all count.
    return any(model.device == "cuda" for model in trained or evidence.models)


def peak_memory(evidence: Evidence) -> tuple[int, int]:
    """Return the memory of the device that it trains on, and its peak there, in bytes; 0 where that is not known."""
    if on_gpu(evidence):
        return next((gpu.memory_total for gpu in evidence.used.gpus), 0), evidence.peak_gpu_bytes or 0
    return evidence.machine.memory_bytes, process_peak(evidence)


def process_peak(evidence: Evidence) -> int:
    """Return the bytes of memory that the training's processes took at their highest, as far as anybody saw."""
    return max([evidence.peak_memory_bytes, *evidence.used.rss])


def weight_bytes(evidence: Evidence) -> tuple[int, int]:
    """Return the bytes of the weights that were trained with, and of their gradients."""
    trained = [(_WIDTHS.get(one.dtype, 4), one) for one in evidence.models if one.train_calls]
    return sum(width * one.parameters for width, one in trained), sum(
        width * one.trained_parameters for width, one in trained
    )


def saved(evidence: Evidence, tried: list[Measurement]) -> float:
    """Share of the step that a change saves, from what it did to these layers: what some lose counts against it.

    Only what was beyond the noise counts. Layers by themselves may be slower than they were within the run: together
    they are taken to be no more than its forward and backward.
    """
    taken = sum(one.before * one.calls for one in tried)
    compute = seconds_of(evidence, *COMPUTE)
    scale = min(1.0, compute / taken) if taken > 0 else 0.0
    return share_of(evidence, scale * sum(one.saved * one.calls for one in tried))


def switched(
    evidence: Evidence, finding: str, claimed: float, how_known: HowKnown
) -> tuple[float, HowKnown, tuple[str, ...]]:
    """A finding's worth, how it is known, and a line on it, where its cure was switched on and off in the run itself.

    A sure gain is the worth. Where chance may have made it, a claim that was measured by itself stands if the blocks do
    not speak against it; an estimate is no more than what the blocks show.

    Args:
        evidence: With `tried`; without, all stays as it was claimed.
        finding: Its name.
        claimed: Its worth by other ways, as a share of the step.
        how_known: How that is known.
    """
    tried = evidence.tried_live(finding)
    if tried is None:
        return claimed, how_known, ()
    words = (_in_blocks(tried),)
    if tried.low > 1:
        return tried.saved, HowKnown.MEASURED, words
    if how_known is HowKnown.MEASURED and claimed <= 1 - 1 / tried.high:
        return claimed, how_known, words
    return min(claimed, max(0.0, tried.saved)), HowKnown.ESTIMATED, words


def is_sure(evidence: Evidence, finding: str) -> bool:
    """Whether switching its cure on and off in the run itself showed a gain for certain."""
    tried = evidence.tried_live(finding)
    return tried is not None and tried.low > 1


def _in_blocks(tried: TriedLive) -> str:
    interval = f"{tried.ratio:.2f}x [{tried.low:.2f}, {tried.high:.2f}]"
    besides = f", with {' and '.join(tried.besides)}" if tried.besides else ""
    return f"switched on and off in this run, in {tried.blocks} blocks each{besides}: {interval} as fast a step"


def gain_of(tried: list[Measurement]) -> float:
    """Return how much less time these take together, as a share of what they took."""
    before = sum(one.before * one.calls for one in tried)
    return 1 - sum(one.after * one.calls for one in tried) / before if before > 0 else 0.0


def place_of(evidence: Evidence, tried: Measurement) -> str:
    """`file:line` of the layer that a measurement was about, "" if it is not known."""
    path = tried.where.partition(" and ")[0]
    return next((layer.where for layer in evidence.layers if layer.path == path), "")


def in_words(tried: Measurement) -> str:
    """A measurement as a line of a finding's details."""
    times = f"{short(tried.before)} -> {short(tried.after)}, faster in {percent(tried.wins)} of {tried.turns} turns"
    return f"{tried.where}: {tried.what}: {times}" if tried.where else f"{tried.what}: {times}"


def short(seconds: float) -> str:
    """Seconds in the unit that suits them.

    >>> short(0.00123), short(2.5e-5), short(3.0)
    ('1.23 ms', '25 us', '3 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def products(evidence: Evidence, convolutions: bool = True, least: float = 0.0) -> float:
    """Seconds per step in what tensor cores are for, in the sampled steps: matrix products and convolutions.

    Args:
        evidence: Of the run.
        convolutions: Count these too.
        least: Seconds that an operator must take each time to be counted.
    """
    if evidence.sampled is None:
        return 0.0
    telling = ("mm", "linear", "matmul", "lstm", "gru", "rnn", *(("conv",) if convolutions else ()))
    return sum(
        one.device_seconds or one.seconds
        for one in evidence.sampled.operators
        if any(word in one.name.rpartition("::")[2].lower() for word in telling) and one.seconds >= least * one.calls
    )


def size_of(layer: Layer) -> str:
    """A layer in words: "Linear 768 -> 3072", "Conv2d 3 -> 64, 7x7".

    >>> size_of(Layer("head", "Linear", {"in_features": 768, "out_features": 50257}))
    'Linear 768 -> 50257'
    """
    sizes = layer.sizes
    for left, right in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if left in sizes and right in sizes:
            kernel = f", {sizes['kernel_size']}x{sizes['kernel_size']}" if "kernel_size" in sizes else ""
            return f"{layer.kind} {sizes[left]} -> {sizes[right]}{kernel}"
    return " ".join([layer.kind, *(f"{name}={size}" for name, size in sizes.items())])
